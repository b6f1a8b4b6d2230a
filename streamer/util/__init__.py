"""Small helpers: delays, waits, directories, positions, failpoints."""
