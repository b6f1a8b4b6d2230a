"""Streams many PostgreSQL databases into one. The tree below follows a change on its way:

source/         1 READ the publisher: catalogs, publication, slot, stream of frames
decode/         2 DECODE bytes into changes, grouped by transaction            pure
mapping/        3 MAP: which relation goes to which target relation            pure
apply/          4 APPLY: windows of changes, folded, staged, written
                5 COMMIT: changes and their progress rows in one transaction
target/         the subscriber: connections, catalogs, added columns and indexes
definitions/    indexes, constraints and defaults of source tables, rendered for the target
progress/       6 ACKNOWLEDGE durable changes; the bookkeeping tables
sync/           the bulk copy beside the stream, on Spark
compare/        the rows of sources and target compared while both change, on Spark
indexes/        indexes that foreign keys need, built beside the stream
runtime/        the tasks: pipeline.py puts 1 to 6 together (start there), engine, supervisor
report/         the facts of a fleet, and the list of problems
config/         settings, and the mapping of static mode
observability/  metrics, logs, HTTP
commands/       the work of the commands
admin/          the mapping in a database: draft, plan, apply; the API, the page
cli/            arguments of the commands
postgres/       shared by both sides: quoting, sessions, connection strings, SQLSTATE, origins

lsn.py errors.py error_reports.py hints.py remedies.py quantities.py backoff.py containment.py
waiting.py batched.py failpoints.py migrations.py owned_directory.py   used by all
"""

__version__ = "0.1.0"
