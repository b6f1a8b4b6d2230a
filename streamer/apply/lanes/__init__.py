"""Lanes: the changes of a table in order, live in a queue or held on disk."""
