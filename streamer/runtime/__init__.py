"""The running parts: engine, sessions of sources, guards, health, replicas."""
