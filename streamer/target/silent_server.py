"""Detects whether a server that has been silent for long still works on a statement.

A statement can take hours, for example because of a lock or a large index, so no timeout applies.
But a peer can vanish behind a firewall or a proxy, or an answer can get lost, and TCP detects only
some of these cases. So when a statement takes long, a second connection reads the activity of the
server's session. The connection is dead if the server does not answer, the session is gone, or the
session has waited for the client all along.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from streamer.errors.error_classes import StreamerError
from streamer.util.alarm import Alarm

CHECK_SECONDS: Final = 15.0
"""How long to wait for an answer before the first check, and between two checks."""


_ACTIVITY_SQL: Final = """
select state not in ('active', 'disabled')
       or state = 'active' and coalesce(wait_event_type, '') = 'Client' as is_waiting_for_us,
       pg_catalog.concat_ws(' ', state, state_change, {progress}) as since
from pg_catalog.pg_stat_activity where pid = $1 and usename = current_user
"""
# The bytes that COPY has read so far. On a slow network, only the server can tell how many bytes
# still wait in buffers.
_COPY_PROGRESS: Final = """
(select c.bytes_processed from pg_catalog.pg_stat_progress_copy c where c.pid = $1)
"""


def activity_sql(version: int) -> str:
    """Return the query for the `Activity` of a session at a server of a major *version*."""
    return _ACTIVITY_SQL.format(progress=_COPY_PROGRESS if version >= 14 else "null")


class Unreachable(StreamerError):
    """No server answers at the address."""


@dataclass(frozen=True, slots=True)
class Activity:
    """The activity of a session, from pg_stat_activity; ``since`` identifies a statement."""

    is_waiting_for_us: bool
    since: str


class ReadActivity(Protocol):
    """Returns the activity of the session; None if the session is gone.

    Raises Unreachable, or a StreamerError if the activity cannot be read now.
    """

    def __call__(self) -> Awaitable[Activity | None]: ...


class SilenceMonitor:
    """Monitors a connection; calls *sever* when the connection is dead."""

    def __init__(
        self,
        read_activity: ReadActivity,
        sever: Callable[[], None],
        unsent: Callable[[], int] = lambda: 0,
    ) -> None:
        """*unsent*: the bytes in the send buffer; while they decrease, the server reads."""
        self._unsent = unsent
        self._read_activity = read_activity
        self._sever = sever
        self._checking: asyncio.Task[None] | None = None
        self._alarm = Alarm(self._begin_checking)
        self.progress = 0
        """The sender of a statement's data increases this number, to show that the connection
        works.
        """

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Monitor the statement that runs in this block."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Monitor the statement that begins now, until `end`."""
        self._alarm.begin(CHECK_SECONDS)

    def end(self) -> None:
        self._alarm.end()
        if self._checking is not None:
            self._checking.cancel()
            self._checking = None

    def _begin_checking(self) -> None:
        if self._checking is None:
            self._checking = asyncio.create_task(self._check(), name="watch")

    async def _check(self) -> None:
        former: tuple[int, int, Activity] | None = None
        while True:
            now: tuple[int, int, Activity] | None = None
            try:
                activity = await self._read_activity()
            except Unreachable:
                break
            except StreamerError:
                pass  # the server answered, so it is alive
            else:
                if activity is None:
                    break
                if activity.is_waiting_for_us:
                    now = (self.progress, self._unsent(), activity)
                    if now == former:
                        break
            former = now
            await asyncio.sleep(CHECK_SECONDS)
        self._sever()
