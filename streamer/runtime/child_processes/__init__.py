"""``processes: N``: one command starts several replicas of itself, and they share one port."""
