"""``streamer check``: the preflight. It changes nothing, anywhere.

`check.py` reads the facts (`source_facts.py`, `target_facts.py`). Modules with the name
``*_findings`` judge them. `findings.py` has the report, and `sql_file.py` its statements as a
script.
"""
