"""The state of a table, the options of a resync, and the progress of a source. Pure."""
