"""Changes that the target refused: written to quarantine, retried or dropped."""
