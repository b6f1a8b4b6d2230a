"""The limit on queued bytes of changes for the workers, source by source.

All sources share one budget, divided by those that have something queued. A source that has used
its part stops reading, and the others continue. So a worker that is full stops only the sources
that have filled it.
"""

import asyncio
from typing import Final, Protocol

SOURCE_BYTES_MIN: Final = 1024 * 1024
"""Bytes that each source may queue, regardless of the number of sources."""


class Queued(Protocol):
    """A lane, as far as the budget knows it."""

    @property
    def owner(self) -> object: ...


class Budget:
    """Counts queued bytes. `take` and `give` never wait."""

    def __init__(self, bytes_max: int, source_min: int = SOURCE_BYTES_MIN) -> None:
        self._bytes_max = bytes_max
        self._source_min = source_min
        self._by_source: dict[object, int] = {}
        self._given = asyncio.Event()

    def take(self, lane: Queued, size: int) -> None:
        """Count *size* more bytes of *lane*."""
        self._by_source[lane.owner] = self._by_source.get(lane.owner, 0) + size

    def give(self, lane: Queued, size: int) -> None:
        """Count *size* bytes less of *lane*."""
        left = self._by_source.get(lane.owner, 0) - size
        if left > 0:
            self._by_source[lane.owner] = left
        else:
            self._by_source.pop(lane.owner, None)
        self._given.set()

    def has_room(self, source: object) -> bool:
        """Whether *source* may dispatch more."""
        others = len(self._by_source.keys() - {source})
        limit = max(self._source_min, self._bytes_max // (others + 1))
        return self._by_source.get(source, 0) < limit

    async def wait_for_room(self, source: object) -> None:
        """Wait until *source* may dispatch more."""
        while not self.has_room(source):
            self._given.clear()
            await self._given.wait()
