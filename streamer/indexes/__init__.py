"""Indexes that foreign keys of the target need, and their builds beside the stream."""
