"""``streamer demo``: two shops stream into one warehouse, all of it on this machine.

show.py is the play from beginning to end; stage.py owns what has to be stopped and removed after
it; shop.py is the shops' tables and rows, workload.py what goes on in them; watch.py and view.py
show it; compare.py tells whether the warehouse holds what the shops do.
"""
