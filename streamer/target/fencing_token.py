"""Fencing tokens: only sessions of the process with a source's lock write the source's changes.

The holder of a source's advisory lock stores a token in ``streamer.source``. A session is on the
same server if and only if it sees that token, and that lock held by that backend. A promoted
standby may have the token, but never the lock; a restored server has neither. Any role can read
token and lock, on every version and on managed servers. System identifier and timeline are not
readable everywhere.

Reading all locks of a server takes milliseconds, so a session reads the locks once for each session
that holds locks. Both sessions stay on their server. So for further sources of that holder, the
token suffices.

A session that checks a token takes a shared lock, which marks it as a session of the process that
stored the token. If that process freezes, another process ends these sessions
(`streamer.bookkeeping.replicas`).
"""

import zlib
from dataclasses import dataclass
from typing import Final

LOCK_CLASS: Final = zlib.crc32(b"streamer.source")
MEMBER_CLASS: Final = zlib.crc32(b"streamer.member")
"""Shared locks of this class mark the sessions of a process. The second half of the key is the PID
of the backend that holds the process's locks.
"""

LOCKS_SQL: Final = """(
    select l.pid, l.classid::int8 as class, l.objid::int8 as id from pg_catalog.pg_locks l
    where l.locktype = 'advisory' and l.objsubid = 2 and l.granted
      and l.database = (select d.oid from pg_catalog.pg_database d
                        where d.datname = pg_catalog.current_database()))"""
"""The advisory locks of all sessions in the database, as a table expression."""
LOCK_SQL: Final = "select pg_catalog.pg_try_advisory_lock($1::int4, $2::int4)"


def signed(lock_class: int) -> int:
    """Return a class in the form that lock functions require. Pure."""
    return lock_class - (1 << 32) if lock_class >= 1 << 31 else lock_class


FENCE_SQL: Final = f"""
select pg_catalog.pg_try_advisory_lock_shared({signed(MEMBER_CLASS)}, $3::int4)
  and exists (select from {LOCKS_SQL} l where l.class = $1 and l.id = $2 and l.pid = $3)
  and exists (select from streamer.source s where s.id = $2 and s.lock_token = $4)
"""
TOKEN_SQL: Final = "select exists (select from streamer.source where id = $1 and lock_token = $2)"
"""The part of `FENCE_SQL` whose answer may change, and differs between the sources of a holder."""


@dataclass(frozen=True, slots=True)
class FencingToken:
    """The lock and token of an attempt to stream a source.

    ``lock_session``: a value of the session that holds the lock; no other session has this value.
    """

    source_id: int
    token: str
    backend_pid: int
    lock_session: str

    @property
    def parameters(self) -> tuple[int, int, int, str]:
        """The parameters of `FENCE_SQL`."""
        return LOCK_CLASS, self.source_id, self.backend_pid, self.token
