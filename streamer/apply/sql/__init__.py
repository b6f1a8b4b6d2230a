"""The SQL of the apply, as text. Pure."""
