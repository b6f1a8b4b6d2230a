"""Applies the changes of held lanes, beside the workers and without delaying live lanes."""
