"""One source while it streams: its session, its pipeline, and the supervisor of both."""
