"""The plan of a relation, and the fold of its changes to net changes of rows."""
