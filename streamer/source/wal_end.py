"""SQL about the end of a source's WAL.

Spark ships this module to executors, so the module imports only the standard library.
"""

from typing import Final

FLUSH_LSN_SQL: Final = (
    "case when pg_catalog.pg_is_in_recovery() then greatest(pg_catalog.pg_last_wal_receive_lsn(),"
    " pg_catalog.pg_last_wal_replay_lsn()) else pg_catalog.pg_current_wal_flush_lsn() end"
)
"""The end of the WAL that a server flushed, or that a standby received. A standby shows the
effect of a commit slightly before it counts the record as replayed.
"""

INSERT_LSN_SQL: Final = (
    f"case when pg_catalog.pg_is_in_recovery() then {FLUSH_LSN_SQL}"
    " else pg_catalog.pg_current_wal_insert_lsn() end"
)

COMMIT_SQL: Final = (
    "select pg_catalog.set_config('synchronous_commit', 'local', true),"
    " pg_catalog.pg_logical_emit_message(true, 'streamer'::text, ''::text)::text as lsn"
)
"""Commits a transaction that contains only a message, and flushes the WAL; ``lsn`` is the position
of the message.

No reader uses the message. Without a message, the server would leave the flush to the WAL writer,
because the transaction would write no WAL before its commit. The commit does not wait for a
synchronous standby.
"""

COMMIT_LATER_SQL: Final = "select pg_catalog.txid_current()"
"""Commits an empty transaction, which the WAL writer flushes after ``wal_writer_delay``, for a role
that may not write messages.
"""
WRITER_SECONDS: Final = 15.0
"""The time to wait for the WAL writer; ``wal_writer_delay`` is at most 10 seconds."""
WRITER_POLL_SECONDS: Final = 0.05
