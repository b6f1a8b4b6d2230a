"""``streamer check``: the preflight. Changes neither a source nor the target.

command.py        the reads, in their order
source_facts.py   the facts of a source
target_facts.py   the facts of the target
rules.py          the tables of the rules                       pure
source.py         problems at a source                          pure
target.py         problems at the target, and between sources   pure
target_tables.py  problems of target tables                     pure
publications.py   problems of a source's publications           pure
identities.py     statements that repair replica identities     pure
conversion.py     whether values of a type fit into a different type   pure
spark.py          problems of the Spark that copies
transport.py      whether binary transport will be used         pure
findings.py       findings, and the report                      pure
sql_file.py       their statements as a script                  pure
"""
