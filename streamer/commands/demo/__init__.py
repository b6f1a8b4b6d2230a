"""``streamer demo``: two shops stream into a warehouse, on this machine alone.

demo.py              the demo from beginning to end
embedded_servers.py  PostgreSQL servers, also for tests
demo_servers.py      processes and directories of the demo, and their removal
shop_tables.py       the shops' tables and rows
shop_workload.py     the shops' customers
demo_figures.py      the figures of the program, and its comparison of shops and warehouse
demo_output.py       the progress, on the screen
"""
