"""The mapping in an SQLite database: kept, edited, planned, applied, and served under ``/api``.

keyring.py    encrypts them
models.py     what the API takes and gives
mapping_file.py  the file of the SQLite database: deleted, replaced or damaged
store.py      the SQLite database: one writer, its migrations, revisions, audit
draft.py      rows to a mapping and back; what changed                                     pure
transfer.py   YAML in and out, kuvasz-streamer's, too                                      pure
plan.py       what applying would do
sides.py      one table as source and target have it
service.py    what the API does, whoever asks: draft, plan, apply, requests
events.py     what happens, to whoever listens
access.py     who may ask
api/          the gate before the routes, and the routes
page/         the same for people in a browser
server.py     what `streamer run` has of it
client.py     the same for the command line: over HTTP, or in the file
edit.py       what the command line does with it
"""
