"""The replication stream of a source, and the feedback to it."""
