"""The right to write what comes from one source, and the proof that a session can exercise it.

The holder of a source's advisory lock stores a token of its own in ``streamer.source``. Another
session is on the same server exactly if it sees there both the token and that lock in the hands of
that backend. A standby that was promoted has the token, if that was replicated, but never the
lock; a server that was restored has neither. Any role may see both, on every version and on managed
servers, which system identifier and timeline are not.
"""

import zlib
from dataclasses import dataclass
from typing import Final

LOCK_CLASS: Final = zlib.crc32(b"streamer.source")

PROOF_SQL: Final = """
select exists (
    select from pg_catalog.pg_locks l
    where l.locktype = 'advisory' and l.objsubid = 2 and l.granted
      and l.database = (select d.oid from pg_catalog.pg_database d
                        where d.datname = pg_catalog.current_database())
      and l.classid = $1::int8::oid and l.objid = $2::int8::oid and l.pid = $3)
  and exists (select from streamer.source s where s.id = $2 and s.lock_token = $4)
"""


@dataclass(frozen=True, slots=True)
class Claim:
    """What the holder of a source's lock has: for one attempt to stream that source."""

    source_id: int
    token: str
    backend_pid: int

    @property
    def proof(self) -> tuple[int, int, int, str]:
        """The parameters of `PROOF_SQL`."""
        return LOCK_CLASS, self.source_id, self.backend_pid, self.token
