"""Workers: windows of changes, written and committed in a target transaction."""
