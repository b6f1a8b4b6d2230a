"""The mapping in an SQLite database: kept, edited, planned, applied, and served under ``/api``.

keyring.py       encrypts its passwords
models.py        requests and answers of the API
mapping_file.py  the file of the SQLite database: deleted, replaced or damaged
rows.py          its rows in SQL: read, written, audited
store.py         the SQLite database: one writer, its migrations, revisions
draft.py         rows to a mapping and back, and their differences                  pure
transfer.py      YAML in and out, kuvasz-streamer's, too                            pure
plan.py          the effect of applying
applied.py       the applied mapping: of the newest revision, or of the file
discovery.py     the tables of a database, for the API                              pure
sides.py         one table as source and target have it
service.py       the work of the API: draft, plan, apply, requests
events.py        events for listeners
series.py        lag, rate and retained WAL of each source over the last day        pure
source_history.py  the task that samples them, and keeps them in the SQLite database
minute_exchange.py the same of other processes, through the target
status_reader.py the status, read once for all pages
fleet.py         all sources in a line each: health, order, filters                 pure
bulk.py          acts on the tables of many sources
access.py        authentication and roles
api/             the gate before the routes, and the routes
page/            the same in a browser
server.py        the admin's part of `streamer run`
local_client.py  the service as the command line and tenants use it
tenants.py       list, add, remove, purge, drift
client.py        the same for the command line: over HTTP, or in the file
edit.py          the command line's edits
"""
