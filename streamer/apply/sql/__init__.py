"""SQL that applies rows, as text. Pure."""
