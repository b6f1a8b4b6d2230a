"""Spark: its process, its jobs, and the protection of what it is given."""
