"""A fleet on a machine: many tenants on two clusters, shared by several replicas of `run`.

``make fleet SOURCES=60 REPLICAS=3`` runs it; `tests/fault/test_replicas.py` is the small version in
the suite.
"""
