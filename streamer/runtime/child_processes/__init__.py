"""``processes: N``: one command starts several replicas of itself, which share one port."""
