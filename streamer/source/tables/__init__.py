"""Facts about the tables of a source, beside its catalog."""
