"""Applies changes of source definitions at the target, in the stream and beside the stream."""
