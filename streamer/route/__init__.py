"""Where a change goes: source relation to target relation, and to which worker. Pure."""
