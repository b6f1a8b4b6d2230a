"""Everything at once: a random workload, random faults, and nothing may be lost or doubled.

``make torture SECONDS=300 SEED=7`` runs it for long; `test_torture.py` for a moment.
"""
