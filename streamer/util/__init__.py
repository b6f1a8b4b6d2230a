"""Delays, waits, directories, positions, failpoints."""
