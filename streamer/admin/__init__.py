"""The mapping in an SQLite database: stored, edited, planned, applied, and served under ``/api``.

keyring.py       encrypts the passwords
models.py        requests and answers of the API
mapping_file.py  the file of the SQLite database: deleted, replaced or damaged
rows.py          the rows in SQL: read, written, audited
store.py         the SQLite database: a single writer, migrations, revisions
draft.py         rows to a mapping and back, and the differences                    pure
transfer.py      YAML in and out, also that of kuvasz-streamer                      pure
plan.py          the effect of applying
applied.py       the applied mapping: of the newest revision, or of the file
discovery.py     the tables of a database, for the API                              pure
sides.py         a table as source and target define it
service.py       the work of the API: draft, plan, apply, requests
events.py        events for listeners
series.py        lag, rate and retained WAL of each source over the last day        pure
source_history.py  the task that samples these figures, and stores them in the database
minute_exchange.py the figures of the sibling processes, through the target
status_reader.py the status, read once for all pages
fleet.py         all sources in a line each: health, order, filters                 pure
bulk.py          acts on the tables of many sources
access.py        authentication and roles
api/             the gate before the routes, and the routes
page/            the pages for a browser
server.py        the admin's part of `streamer run`
local_client.py  the service for the command line and tenants
tenants.py       list, add, remove, purge, drift
client.py        the service for the command line: over HTTP, or in the file
edit.py          the command line's edits
"""
