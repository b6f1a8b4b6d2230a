"""The long-running process: the engine, and tasks for all sources."""
