"""Compares sources with the target while both change: ranges, digests, differing keys."""
