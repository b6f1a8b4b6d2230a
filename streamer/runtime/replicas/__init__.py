"""Several processes of one configuration: each runs a share of the sources."""
