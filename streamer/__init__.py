"""Streams many PostgreSQL databases into one. The tree below follows a change on its way:

source/          1 READ the publisher: catalogs, publication, slot, stream of frames
decode/          2 DECODE bytes into changes, grouped by transaction            pure
mapping/         3 MAP: which relation goes to which target relation            pure
apply/           4 APPLY: lanes, windows of changes, folded, staged, written
                 5 COMMIT: changes and their progress rows in one transaction
drain/           steps 4 and 5 for held lanes
target/          the subscriber: connections, catalogs, columns added there
control/         6 ACKNOWLEDGE durable changes; the state of a table            pure
bookkeeping/     the tables of the schema `streamer` in the target
schema/          what a table is: definitions, their difference, their SQL      pure
schema_changes/  changed definitions, made at the target
copy/            the bulk copy beside the stream, on Spark
indexes/         indexes that foreign keys need, and deferred ones
compare/         the rows of sources and target compared while both change
runtime/         the tasks: session/pipeline.py puts 1 to 6 together (start there), engine, guards
report/          the facts of a fleet, and the one list of problems among them
config/          settings, and the mapping of the configuration file
observability/   metrics, logs, HTTP
commands/        the work of the commands
admin/           the mapping in a database: draft, plan, apply; the API, the page
cli/             arguments of the commands
postgres/        shared by both sides: quoting, sessions, connection strings, SQLSTATE, origins
errors/          errors, their stored form, and their remedies
util/            delays, waits, directories, positions, failpoints
compiled/        the work per change, compiled
"""

__version__ = "0.1.0"
