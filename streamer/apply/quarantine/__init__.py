"""Changes that the target refused: keys, rows in quarantine, operators' requests."""
