"""``streamer demo``: two shops stream into one warehouse, all of it on this machine.

show.py is the demo from beginning to end. stage.py owns the processes and directories, and removes
them afterwards. shop.py has the shops' tables and rows, workload.py their customers. watch.py and
view.py show the progress. compare.py compares shops and warehouse.
"""
