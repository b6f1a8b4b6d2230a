"""Indexes that foreign keys of the target need, and building them beside the stream."""
