"""The limit on queued bytes of changes for the workers, source by source.

The sources with queued changes share a budget equally. A source that used up its part stops
reading, so a full queue stops only the sources that filled the queue.
"""

import asyncio
from typing import Final, Protocol

SOURCE_BYTES_MIN: Final = 1024 * 1024
"""Bytes that each source may queue, regardless of the number of sources."""


class Queued(Protocol):
    """The attributes of a lane that the budget reads."""

    @property
    def owner(self) -> object: ...


class Budget:
    """Counts the queued bytes of each source."""

    def __init__(self, bytes_max: int, source_min: int = SOURCE_BYTES_MIN) -> None:
        self._bytes_max = bytes_max
        self._source_min = source_min
        self._by_source: dict[object, int] = {}
        self._freed = asyncio.Event()

    def add(self, lane: Queued, size: int) -> None:
        """Add *size* bytes of *lane*."""
        self._by_source[lane.owner] = self._by_source.get(lane.owner, 0) + size

    def subtract(self, lane: Queued, size: int) -> None:
        """Subtract *size* bytes of *lane*."""
        size_left = self._by_source.get(lane.owner, 0) - size
        if size_left > 0:
            self._by_source[lane.owner] = size_left
        else:
            self._by_source.pop(lane.owner, None)
        self._freed.set()

    def has_room(self, source: object) -> bool:
        """Whether *source* may dispatch more changes."""
        size = self._by_source.get(source, 0)
        if size < self._source_min:
            return True
        source_count = len(self._by_source.keys() - {source})
        return size < self._bytes_max // (source_count + 1)

    async def wait_for_room(self, source: object) -> None:
        while not self.has_room(source):
            self._freed.clear()
            await self._freed.wait()
