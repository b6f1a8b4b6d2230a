"""Guards of a source: slot, publications, renamed and dropped tables, timeline."""
