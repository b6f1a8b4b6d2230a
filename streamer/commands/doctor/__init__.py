"""``streamer doctor``: diagnoses problems, and gathers the facts for a bug report in one file."""
