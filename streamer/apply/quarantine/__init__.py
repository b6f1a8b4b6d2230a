"""Changes that the target refused: their keys, their rows in quarantine, operators' requests."""
