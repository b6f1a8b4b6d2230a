"""The plan of a relation, and the fold of changes to net changes of rows."""
