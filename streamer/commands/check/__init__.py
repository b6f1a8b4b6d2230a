"""``streamer check``: the preflight. The check changes neither side.

`check.py` reads the facts (`source_facts.py`, `target_facts.py`). Modules with the name
``*_findings`` judge the facts. `findings.py` defines the report, and `sql_file.py` its statements
as a script.
"""
