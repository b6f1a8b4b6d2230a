"""Spark: the process, the jobs, and the protection of secrets."""
