"""Streams many PostgreSQL databases into one. The tree below is the way of a change:

source/         1 READ the publisher: catalogs, publication, slot, stream of frames
decode/         2 DECODE bytes into changes, grouped by transaction            pure
route/          3 ROUTE: which target relation, which worker                   pure
apply/          4 APPLY: windows of changes, folded, staged, written
                5 COMMIT: changes and their progress rows in one transaction
progress/       6 ACKNOWLEDGE what is durable; the bookkeeping tables
sync/           the bulk copy beside the stream, on Spark
runtime/        who runs: pipeline.py puts 1 to 6 together (start reading there), engine, supervisor
config/         settings, and the mapping of static mode
observability/  metrics, logs, HTTP
commands/       what the commands do;  cli.py  their arguments
admin/          the mapping in a database: draft, plan, apply; the API

lsn.py errors.py containment.py sql.py sqlstate.py hints.py session.py backoff.py failpoints.py
migrations.py   used by all
"""

__version__ = "0.1.0"
