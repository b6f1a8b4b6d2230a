"""The order in which sources copy, and the number of concurrent sources.

A source gets a turn before it creates the slot or the snapshot of a copy. So waiting sources retain
neither WAL nor old row versions. Sources with a higher priority come first, then sources with less
data to copy. A source that has a turn gets a second turn at once, because tables of a source do not
wait for each other.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from streamer.copy.turn_waits import TURN
from streamer.util.quantities import format_bytes

Report = Callable[[str], Awaitable[None]]


@dataclass(slots=True)
class _WaitingSource:
    source: str
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

    def __init__(self, turns: "CopyTurns", source: str) -> None:
        self._turns: CopyTurns | None = turns
        self.source = source

    def end(self) -> None:
        """End the turn and serve the next source; a repeated call has no effect."""
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.ended(self)


class CopyTurns:
    """Grants sources turns to copy."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._copying: Counter[str] = Counter()
        """The number of turns of each source."""
        self._waiting: list[_WaitingSource] = []
        self._numbers = itertools.count()

    def acquire_free(self, source: str) -> CopyTurn | None:
        """Return a turn for *source* if a turn is free; None otherwise."""
        if self._waiting or not self._has_room(source):
            return None
        self._copying[source] += 1
        return CopyTurn(self, source)

    async def acquire(
        self, source: str, priority: int, size_bytes: int, report: Report
    ) -> CopyTurn:
        """Wait for a turn of *source*; *report* receives each new reason."""
        waiting = _WaitingSource(source, priority, size_bytes, next(self._numbers))
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
                self.ended(CopyTurn(self, source))
            else:
                self._waiting.remove(waiting)
                self._serve()
            raise
        return CopyTurn(self, source)

    def ended(self, turn: CopyTurn) -> None:
        """Record the end of a turn, for `CopyTurn.end`."""
        self._copying[turn.source] -= 1
        self._copying += Counter()  # removes sources without a turn
        self._serve()

    def _serve(self) -> None:
        for waiting in sorted(self._waiting, key=lambda each: each.rank):
            if self._has_room(waiting.source):
                self._copying[waiting.source] += 1
                waiting.has_turn = True
                self._waiting.remove(waiting)
            waiting.changed.set()

    def _has_room(self, source: str) -> bool:
        return source in self._copying or len(self._copying) < self._at_once

    def _reason(self, waiting: _WaitingSource) -> str:
        earlier = [peer for peer in self._waiting if peer.rank < waiting.rank]
        count = len(self._copying) + len({peer.source for peer in earlier} - set(self._copying))
        size = sum(peer.size_bytes for peer in earlier)
        with_size = f", {format_bytes(size)} of them still wait" if size else ""
        sources = "1 source copies" if count == 1 else f"{count} sources copy"
        return f"{TURN}{sources} first (sync.sources_at_once: {self._at_once}){with_size}"
