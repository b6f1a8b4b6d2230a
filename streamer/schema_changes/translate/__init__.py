"""Changes of definitions as statements for the target. Pure."""
