"""The command line: arguments in, exit code out.

Exit codes:

- 0: done
- 1: the answer is no
- 2: wrong usage or configuration
- 3: a server is unreachable or rejects streamer
- 4: an error that needs an operator

One line on stderr names the problem and the next step.

Commands import their work inside their functions: `--help` needs none, and scripts often call
commands that need few libraries. `tests/unit/test_imports.py` counts the modules.
"""
