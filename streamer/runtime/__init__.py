"""Who runs: pipelines of sources, the shared parts, and their supervision."""
