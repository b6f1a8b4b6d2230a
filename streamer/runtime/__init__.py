"""The running parts: pipelines of sources, shared services, and their supervision."""
