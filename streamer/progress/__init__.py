"""Memory: which changes are durable, and the bookkeeping tables in the target."""
