"""The position that streamer may acknowledge to a source: stored in the target first.

Apart from changes in a journal, streamer acknowledges only stored positions. So without a journal,
a slot ahead of the target means that another program moved the slot, or that the target went back
in time.
"""

import asyncio
import time
from typing import Final

from streamer.bookkeeping.positions import AcknowledgedPosition, AcknowledgedPositions
from streamer.bookkeeping.sources import SourceRecord
from streamer.control.progress_tracker import ProgressTracker
from streamer.runtime.heartbeat import Heartbeat
from streamer.source.history_check import HistoryCheck
from streamer.source.stream.feedback import FAR_BYTES
from streamer.target.fencing_token import FencingToken
from streamer.util.failpoints import failpoint
from streamer.util.lsn import Lsn
from streamer.util.waiting import wait_for_event

STORE_SECONDS: Final = 15.0
"""The interval for storing a position after a small move without changes of mapped tables.

A shorter interval would cost an idle target a commit for each heartbeat.
"""
SMALL_BYTES: Final = 64 * 1024
"""A move by less WAL than this is small."""
QUIET_SECONDS: Final = 1.0
"""The interval for storing a position after a larger move.

Storing the position writes WAL, which moves the position again where source and target are the same
server.
"""
PAUSE_SECONDS: Final = 0.25
"""The pause between two positions, unless a client waits for the next.

Each position is a commit at the target with a flush of its WAL. Workers commit far more often.
"""

REQUEST_SECONDS: Final = 1.5
"""How long a request for positions is valid; a client that waits repeats the request every second.

Several positions may precede the awaited position, which may need the next keepalive.
"""


class StoredPosition:
    """The stored position of a source, for one attempt to stream the source."""

    def __init__(
        self,
        positions: AcknowledgedPositions,
        fence: FencingToken,
        record: SourceRecord,
        tracker: ProgressTracker,
        history: HistoryCheck,
        heartbeat: Heartbeat,
        due: asyncio.Event,
    ) -> None:
        """*due* is set when the position is to be stored."""
        self.stored_lsn = tracker.flush_lsn
        """The position that streamer may acknowledge now."""
        self.tried_at = 0.0
        """The monotonic time at which the last store began."""
        self.stored_at = 0.0
        """The monotonic time at which the last store ended."""
        self.is_requested = False
        """A table has advanced, or the pipeline needs the position."""
        self.is_urgent = asyncio.Event()
        """An operator or the source waits for the position."""
        self.is_awaited = False
        """Commits at the source wait for every position, see `streamer.source.synchronous_commit`.
        """
        self._positions = positions
        self._fence = fence
        self._tracker = tracker
        self._history = history
        self._heartbeat = heartbeat
        self._due = due
        self._alarm: asyncio.TimerHandle | None = None
        """The timer that sets *due* later; None without such a timer."""
        self._acknowledged_lsn = record.acknowledged_lsn
        """The position in the bookkeeping, which is certain: a lost answer ends the attempt."""
        self._visible_at: float | None = None
        self._storing = asyncio.Lock()
        self._urgent_until = 0.0

    async def store(self, visible_at: float | None) -> None:
        """Store the position that streamer may acknowledge.

        *visible_at*: commits before that monotonic time are visible; None if unknown. Raises
        TargetConnectionError, TargetFencedError.
        """
        async with self._storing:  # at the end, two tasks may store the position
            flush_lsn = self._history.position_through(self._tracker.flush_lsn)
            if not self._is_worth_storing(flush_lsn, visible_at):
                return
            failpoint("acknowledge.before_store")
            self.tried_at = time.monotonic()
            acknowledged_lsn = max(flush_lsn, self._acknowledged_lsn)
            position = AcknowledgedPosition(
                self._acknowledged_lsn,
                acknowledged_lsn,
                None if visible_at is None else max(0.0, self.tried_at - visible_at),
                self._history.newest_through(acknowledged_lsn),
                self._heartbeat.arrived_seconds,
            )
            await self._positions.acknowledge(self._fence, position)
            self._acknowledged_lsn = acknowledged_lsn
            self.stored_at = time.monotonic()
            self.is_requested = False
            failpoint("acknowledge.after_store")
            self.stored_lsn = max(self.stored_lsn, flush_lsn)
            self._visible_at = visible_at

    def store_soon(self) -> None:
        """Store the next positions at once: an operator or the source waits for a position."""
        self.is_requested = True
        self._urgent_until = time.monotonic() + REQUEST_SECONDS
        self.is_urgent.set()

    @property
    def is_due_soon(self) -> bool:
        """Whether an operator, the source or the pipeline waits for the position."""
        return self.is_requested or self.is_awaited or time.monotonic() < self._urgent_until

    def moved(self) -> None:
        """Request to store a position that moved without changes of mapped tables."""
        seconds = self.tried_at + QUIET_SECONDS - time.monotonic()
        moved_bytes = self._tracker.flush_lsn - self.stored_lsn
        if seconds <= 0 or moved_bytes >= FAR_BYTES or self.is_due_soon:
            self._set_due()
        elif moved_bytes >= SMALL_BYTES and self._alarm is None:
            self._alarm = asyncio.get_running_loop().call_later(seconds, self._set_due)

    def _set_due(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._due.set()

    async def pause(self) -> None:
        """Gather positions for a while; an urgent position ends the pause."""
        seconds = self.stored_at + PAUSE_SECONDS - time.monotonic()
        if seconds > 0 and not self.is_awaited:
            await wait_for_event(self.is_urgent, seconds)
        self.is_urgent.clear()

    def _is_worth_storing(self, flush_lsn: Lsn, visible_at: float | None) -> bool:
        if flush_lsn <= self.stored_lsn and visible_at == self._visible_at:
            return False
        is_due = time.monotonic() - self.stored_at >= STORE_SECONDS
        is_urgent = time.monotonic() < self._urgent_until
        is_far = flush_lsn - self.stored_lsn >= SMALL_BYTES
        return self.is_requested or is_urgent or is_due or is_far
