"""Reads for many callers at once: requests that come while one is served are served together."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class _Gathered(Generic[K, V]):
    keys: dict[K, None] = field(default_factory=dict)
    found: Mapping[K, V] | None = None


class Batched(Generic[K, V]):
    """Looks keys up by *read*, which takes several and leaves out those that it does not find.

    One call of *read* runs at a time, and begins after the requests that it serves. If it fails or
    is cancelled, that ends the request that made it alone; the others read again.
    """

    def __init__(self, read: Callable[[list[K]], Awaitable[Mapping[K, V]]]) -> None:
        self._read = read
        self._lock = asyncio.Lock()
        self._open: _Gathered[K, V] = _Gathered()

    async def get(self, key: K) -> V | None:
        """Return the value of *key*, or None. Raises what *read* raises."""
        batch = self._open
        batch.keys[key] = None
        async with self._lock:
            if batch.found is None:
                await asyncio.sleep(0)  # others may ask in this turn of the event loop
                if self._open is batch:
                    self._open = _Gathered()
                batch.found = await self._read(list(batch.keys))
        return batch.found.get(key)
