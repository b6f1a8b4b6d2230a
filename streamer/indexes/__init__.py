"""Indexes that foreign keys of the target need, built beside the stream."""
