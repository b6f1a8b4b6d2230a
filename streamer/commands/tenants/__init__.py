"""``streamer tenants``: the databases of a group, which the targets tell apart by their sid."""
