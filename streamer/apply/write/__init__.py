"""Workers: windows of changes, written and committed in one target transaction."""
