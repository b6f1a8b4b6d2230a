"""``streamer demo``: two shops stream into a warehouse, all on this machine.

show.py         the demo from beginning to end
stage.py        its processes and directories, and their removal
shop.py         the shops' tables and rows
workload.py     the shops' customers
figures.py      the figures of the program, and its comparison of shops and warehouse
view.py         the progress, on the screen
"""
