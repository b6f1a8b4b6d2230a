"""Changes of definitions, in the stream and beside it, made at the target."""
