"""SQL about the end of a source's WAL.

Spark ships this module to executors, so the module imports only the standard library.
"""

from typing import Final

FLUSH_LSN_SQL: Final = (
    "case when pg_catalog.pg_is_in_recovery() then greatest(pg_catalog.pg_last_wal_receive_lsn(),"
    " pg_catalog.pg_last_wal_replay_lsn()) else pg_catalog.pg_current_wal_flush_lsn() end"
)
"""The end of the WAL that a server has flushed; of a standby, the end of what it has received. A
standby shows the effect of a commit slightly before it counts the record as replayed."""

INSERT_LSN_SQL: Final = (
    f"case when pg_catalog.pg_is_in_recovery() then {FLUSH_LSN_SQL}"
    " else pg_catalog.pg_current_wal_insert_lsn() end"
)

COMMIT_SQL: Final = (
    "select pg_catalog.set_config('synchronous_commit', 'local', true),"
    " pg_catalog.pg_logical_emit_message(true, 'streamer'::text, ''::text)::text as lsn"
)
"""Commits an empty transaction and flushes the WAL up to it; ``lsn`` is the place of its message.

No other reader of the WAL uses the message. Without a message, the server leaves the flush to the
WAL writer, because the transaction has written no WAL before the commit. The commit does not wait
for a synchronous standby.
"""

COMMIT_LATER_SQL: Final = "select pg_catalog.txid_current()"
"""Commits an empty transaction, which the WAL writer flushes after ``wal_writer_delay``. For a role
that may not write messages.
"""
WRITER_SECONDS: Final = 15.0
"""How long to wait for the WAL writer; ``wal_writer_delay`` is at most 10 seconds."""
WRITER_POLL_SECONDS: Final = 0.05
