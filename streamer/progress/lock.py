"""The right to run a source: an advisory lock in the target, held by a separate session.

A process that loses the session loses the right. So the process stores acknowledgements over this
session and no other, and the session never runs a slow statement. Its holder stores a token, with
which all other connections of this process prove that they are on the same server
(`streamer.target.claim`). Writes with an earlier token no longer count.
"""

import asyncio
import secrets
from datetime import datetime
from typing import Final

from streamer.errors import TargetConnectionError, TargetFencedError
from streamer.hot import choice
from streamer.lsn import Lsn
from streamer.mapping.rules import SourceMapping
from streamer.source.history import Landmark
from streamer.target.claim import LOCK_CLASS, Claim
from streamer.target.connection import TargetAddress, TargetConnection
from streamer.waiting import wait_for_event

CHECK_SECONDS: Final = 5.0
ENDING_SECONDS: Final = 0.2
"""How long to wait for one of our sessions to end after pg_terminate_backend."""

_REGISTER_SQL: Final = """
insert into streamer.source (database, sid, slot, publication)
values ($1, $2, $3, $4) on conflict do nothing
"""
_FIND_SQL: Final = """
select id, holder from streamer.source where database = $1 and sid is not distinct from $2
"""
_TAKE_SQL: Final = """
update streamer.source set lock_token = $2, holder = $3, implementation = $4 where id = $1
"""
_END_SESSION_SQL: Final = """
select pg_catalog.pg_terminate_backend(pid) from pg_catalog.pg_stat_activity
where pid = $1 and usename = current_user and application_name = pg_catalog.left($2, 63)
"""
_CHECK_SQL: Final = "select lock_token = $2 from streamer.source where id = $1"
_ACKNOWLEDGE_SQL: Final = """
update streamer.source set
    acknowledged_lsn = $4::text::pg_lsn,
    visible_time = greatest(visible_time, $5),
    last_transaction = coalesce($6::text::jsonb, last_transaction),
    heartbeat_seconds = $7
where id = $1 and lock_token = $2 and acknowledged_lsn = $3::text::pg_lsn
"""


class SourceLock:
    """The lock on one source: taken and released for each attempt to stream it."""

    def __init__(self, address: TargetAddress, source: SourceMapping, holder: str) -> None:
        self._address = address
        self.source = source
        self._holder = holder
        self._session: TargetConnection | None = None
        self._former_pid: int | None = None
        """The session of the attempt before. The server may not know yet that it has ended."""
        self._claim: Claim | None = None
        self._lost = asyncio.Event()
        self._using = asyncio.Lock()

    @property
    def claim(self) -> Claim:
        """The rights of the lock's holder; they exist from `try_acquire` on."""
        if self._claim is None:
            raise TargetConnectionError("target: the lock on this source is not held")
        return self._claim

    @property
    def is_held(self) -> bool:
        return self._session is not None

    async def try_acquire(self) -> str | None:
        """Register the source and take its lock; return None, or the process that holds it."""
        source = self.source
        name = f"streamer lock {source.label} {self._holder}"
        session = await TargetConnection.connect(self._address, name)
        try:
            await session.execute(
                _REGISTER_SQL, source.database, source.sid, source.slot, source.publication
            )
            (row,) = await session.fetch(_FIND_SQL, source.database, source.sid)
            is_ours = await self._try_lock(session, row["id"])
            if not is_ours and self._former_pid is not None:
                await session.execute(_END_SESSION_SQL, self._former_pid, name)
                await asyncio.sleep(ENDING_SECONDS)
                is_ours = await self._try_lock(session, row["id"])
            if is_ours:
                token = secrets.token_hex(8)
                await session.execute(_TAKE_SQL, row["id"], token, self._holder, choice.name())
                self._lost = asyncio.Event()
                session.on_lost(self._lost.set)
                self._claim = Claim(row["id"], token, session.backend_pid)
                self._session = session
                self._former_pid = session.backend_pid
                return None
        except BaseException:
            session.terminate()
            raise
        await session.close()
        return str(row["holder"] or "another process")

    @staticmethod
    async def _try_lock(session: TargetConnection, source_id: int) -> bool:
        signed = LOCK_CLASS - (1 << 32) if LOCK_CLASS >= 1 << 31 else LOCK_CLASS
        return bool(
            await session.fetch_value(
                "select pg_catalog.pg_try_advisory_lock($1::int4, $2::int4)", signed, source_id
            )
        )

    def _held(self) -> TargetConnection:
        if self._session is None or self._session.is_closed:
            raise TargetConnectionError("target: the session that held the source's lock was lost")
        return self._session

    async def guard(self) -> None:
        """Raise TargetConnectionError or TargetFencedError as soon as the lock is lost."""
        while True:
            await wait_for_event(self._lost, CHECK_SECONDS)
            async with self._using:
                is_ours = await self._held().fetch_value(
                    _CHECK_SQL, self.claim.source_id, self.claim.token
                )
            if not is_ours:
                raise TargetFencedError("target: another process has the lock on this source")

    async def acknowledge(
        self,
        stored_lsn: Lsn,
        lsn: Lsn,
        visible_time: datetime | None,
        landmark: Landmark | None,
        heartbeat_seconds: float | None,
    ) -> None:
        """Store the next position to acknowledge, before streamer reports it to the source.

        *stored_lsn*: the position in the bookkeeping. *landmark*: a transaction up to *lsn*, newer
        than the stored one. After a TargetConnectionError *lsn* may or may not be stored, so the
        attempt has to end. Raises TargetFencedError if the bookkeeping has another position than
        *stored_lsn*.
        """
        async with self._using:
            updated = await self._held().execute(
                _ACKNOWLEDGE_SQL,
                self.claim.source_id,
                self.claim.token,
                str(stored_lsn),
                str(lsn),
                visible_time,
                landmark.to_json() if landmark is not None else None,
                heartbeat_seconds,
            )
        if not updated:
            raise TargetFencedError(
                "target: another process has moved the acknowledged position, or the target was "
                "restored to an earlier time"
            )

    async def release(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
