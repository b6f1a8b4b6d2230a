"""``streamer check``: the preflight. It changes nothing, anywhere.

command.py        what is read, and in which order
source_facts.py   what a source says           target_facts.py    what the target says
rules.py          which tables the rules mean                                         pure
source.py         what is wrong at a source                                           pure
target.py         what is wrong at the target, and between sources                    pure
target_tables.py  what is wrong with a target table                                   pure
conversion.py     whether values of one type fit into another                         pure
spark.py          what is wrong with the Spark that copies
findings.py       what a check finds, and the report                                  pure
"""
