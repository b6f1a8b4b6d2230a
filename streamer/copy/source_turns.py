"""The order in which sources copy, and the number of concurrent sources.

A source gets a turn before it creates the slot or the snapshot of a copy. So waiting sources retain
neither WAL nor old row versions. Sources with a higher priority come first, then sources with less
data to copy. A source with a turn gets a second turn at once, because tables of a source do not
wait for each other.

First copies and later copies each have a limit. For a server with several sources, a further limit
applies to both together, because all these copies read the same disks.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from streamer.copy.automatic_waits import AUTOMATIC_WAIT
from streamer.source.reached_server import ServerIdentity
from streamer.util.quantities import format_bytes

Report = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class CopyingSource:
    """A source that has a turn, or requests a turn.

    ``server``: the running server; two host names may lead to one server. ``is_first``: the source
    begins to stream; otherwise tables join later, or get a resync.
    """

    source: str
    server: ServerIdentity
    is_first: bool


@dataclass(slots=True)
class _WaitingSource:
    copying: CopyingSource
    priority: int
    size_bytes: int
    number: int
    has_turn: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def rank(self) -> tuple[int, int, int]:
        return -self.priority, self.size_bytes, self.number


class CopyTurn:
    """The right of a source to copy, until `end`."""

    def __init__(self, turns: "CopyTurns", copying: CopyingSource) -> None:
        self._turns: CopyTurns | None = turns
        self.copying = copying

    def end(self) -> None:
        """End the turn and serve the next source; a repeated call has no effect."""
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.ended(self)


class CopyTurns:
    """Grants sources turns to copy."""

    def __init__(self, at_once: int, per_server: int | None = None) -> None:
        """*at_once*: the limit on first copies, and on later copies. *per_server*: the limit on
        both, for the sources of a server; None for no limit.
        """
        self._at_once = at_once
        self._per_server = per_server
        self._copying: Counter[CopyingSource] = Counter()
        """The number of turns of each source."""
        self._waiting: list[_WaitingSource] = []
        self._numbers = itertools.count()

    def acquire_free(self, copying: CopyingSource) -> CopyTurn | None:
        """Return a turn for *copying* if a turn is free; None otherwise."""
        if any(waiting.copying.is_first == copying.is_first for waiting in self._waiting):
            return None
        if not self._has_room(copying):
            return None
        self._copying[copying] += 1
        return CopyTurn(self, copying)

    async def acquire(
        self, copying: CopyingSource, priority: int, size_bytes: int, report: Report
    ) -> CopyTurn:
        """Wait for a turn of *copying*; *report* receives each new reason."""
        waiting = _WaitingSource(copying, priority, size_bytes, next(self._numbers))
        self._waiting.append(waiting)
        self._serve()
        reported = ""
        try:
            while not waiting.has_turn:
                waiting.changed.clear()
                if (reason := self._reason(waiting)) != reported:
                    reported = reason
                    await report(reason)
                if not waiting.has_turn:
                    await waiting.changed.wait()
        except BaseException:
            if waiting.has_turn:
                self.ended(CopyTurn(self, copying))
            else:
                self._waiting.remove(waiting)
                self._serve()
            raise
        return CopyTurn(self, copying)

    def ended(self, turn: CopyTurn) -> None:
        """Record the end of a turn, for `CopyTurn.end`."""
        self._copying[turn.copying] -= 1
        self._copying += Counter()  # removes sources without a turn
        self._serve()

    def _serve(self) -> None:
        for waiting in sorted(self._waiting, key=lambda item: item.rank):
            if self._has_room(waiting.copying):
                self._copying[waiting.copying] += 1
                waiting.has_turn = True
                self._waiting.remove(waiting)
            waiting.changed.set()

    def _has_room(self, copying: CopyingSource) -> bool:
        if copying in self._copying:
            return True
        is_free = len(self._counted_with(copying)) < self._at_once
        return is_free and not self._is_server_busy(copying)

    def _is_server_busy(self, copying: CopyingSource) -> bool:
        limit = self._per_server
        return limit is not None and len(self._peers_at_server(copying)) >= limit

    def _counted_with(self, copying: CopyingSource) -> set[str]:
        """Return the copying sources that count against the same limit as *copying*."""
        return {c.source for c in self._copying if c.is_first == copying.is_first}

    def _peers_at_server(self, copying: CopyingSource) -> set[str]:
        """Return the peer sources that copy from the server of *copying*."""
        return {c.source for c in self._copying if c.server == copying.server} - {copying.source}

    def _reason(self, waiting: _WaitingSource) -> str:
        copying, is_busy = waiting.copying, self._is_server_busy(waiting.copying)
        earlier = [peer for peer in self._waiting if peer.rank < waiting.rank]
        if is_busy:
            first, limit = self._peers_at_server(copying), f"sources_per_server: {self._per_server}"
            earlier = [peer for peer in earlier if peer.copying.server == copying.server]
        else:
            first, limit = self._counted_with(copying), f"sources_at_once: {self._at_once}"
            earlier = [peer for peer in earlier if peer.copying.is_first == copying.is_first]
        count = len(first | {peer.copying.source for peer in earlier})
        size = sum(peer.size_bytes for peer in earlier)
        with_size = f"; earlier waiting sources have {format_bytes(size)}" if size else ""
        sources = "1 source copies" if count == 1 else f"{count} sources copy"
        place = " at this server" if is_busy else ""
        return f"{AUTOMATIC_WAIT}{sources}{place} first (sync.{limit}){with_size}"
