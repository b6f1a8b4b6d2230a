"""Compares sources with the target while both change: ranges, digests, keys that differ."""
