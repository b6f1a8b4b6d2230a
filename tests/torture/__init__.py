"""A random workload under random faults: no change may be lost or doubled.

``make torture SECONDS=300 SEED=7`` runs the storm for long; `test_torture.py` for a moment.
"""
