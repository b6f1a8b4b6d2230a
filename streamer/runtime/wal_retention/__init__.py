"""The WAL that a slot retains: its limit, and the journal that replaces it."""
