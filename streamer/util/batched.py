"""Batches the reads of many callers: requests that arrive during a read share the next read."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class _Gathered(Generic[K, V]):
    keys: dict[K, None] = field(default_factory=dict)
    values: Mapping[K, V] | None = None


class Batched(Generic[K, V]):
    """Reads keys by *read*, which takes several keys and omits missing keys.

    A single call of *read* runs at a time, and begins after the requests that it serves. A failure
    or a cancellation ends only the request that made the call; the other requests read again.
    """

    def __init__(self, read: Callable[[list[K]], Awaitable[Mapping[K, V]]]) -> None:
        self._read = read
        self._lock = asyncio.Lock()
        self._open: _Gathered[K, V] = _Gathered()

    async def get(self, key: K) -> V | None:
        """Return the value of *key*, or None. Passes on the errors of *read*."""
        batch = self._open
        batch.keys[key] = None
        async with self._lock:
            if batch.values is None:
                await asyncio.sleep(0)  # more requests may come in this turn of the event loop
                if self._open is batch:
                    self._open = _Gathered()
                batch.values = await self._read(list(batch.keys))
        return batch.values.get(key)
