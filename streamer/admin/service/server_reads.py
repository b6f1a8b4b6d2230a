"""The reads of servers for the page and the API: few at a time, shared, and cached briefly.

A client with read access can send hundreds of requests at once. Each request may read a server, and
a server has few connections. So requests for the same facts share a read, and later requests get
the cached result. Reads of a server wait for earlier reads of that server.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

TARGET: Final = "the target"
ALL: Final = "all servers"
AT_ONCE: Final = 2
"""The limit of concurrent reads of a server."""
KEEP_SECONDS: Final = 2.0
KEPT_MAX: Final = 100


@dataclass(slots=True)
class _Read:
    task: "asyncio.Task[Any]"
    ended_at: float | None = None


class ServerReads:
    """The reads of a process."""

    def __init__(self) -> None:
        self._reads: OrderedDict[Hashable, _Read] = OrderedDict()
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def get(
        self,
        key: Hashable,
        server: str,
        read: Callable[[], Awaitable[T]],
        keep_seconds: float = KEEP_SECONDS,
    ) -> T:
        """Return the result of *read*, or the shared result of a request for the same *key*.

        *server*: the server whose limit applies. *keep_seconds*: the greatest age of a result.
        Raises the errors of *read*.
        """
        if (shared := self._reads.get(key)) is None or _is_old(shared, keep_seconds):
            name = f"read of {server}"
            shared = _Read(asyncio.create_task(self._read(server, read), name=name))
            shared.task.add_done_callback(lambda task: self._end(key, shared))
            self._reads[key] = shared
        result: T = await asyncio.shield(shared.task)
        return result

    def forget(self) -> None:
        """Discard the results, because an operator has changed the facts."""
        self._reads.clear()

    async def _read(self, server: str, read: Callable[[], Awaitable[T]]) -> T:
        turn = self._turns.setdefault(server, asyncio.Semaphore(AT_ONCE))
        async with turn:
            return await read()

    def _end(self, key: Hashable, read: _Read) -> None:
        read.ended_at = asyncio.get_running_loop().time()
        has_failed = read.task.cancelled() or read.task.exception() is not None
        if has_failed and self._reads.get(key) is read:
            del self._reads[key]
        while len(self._reads) > KEPT_MAX:
            self._reads.popitem(last=False)


def _is_old(read: _Read, keep_seconds: float) -> bool:
    if read.ended_at is None:
        return False
    return asyncio.get_running_loop().time() - read.ended_at > keep_seconds
