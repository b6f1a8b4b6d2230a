"""``streamer tenants``: the databases of a group, identified in the targets by sid."""
