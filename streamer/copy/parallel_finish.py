"""Finishes the copies of a round in parallel, over a few connections that the round keeps.

A large index must not delay the switch of small tables to streaming. But a connection for each
small table would cost more than copying its rows.
"""

import asyncio
from typing import Self

from streamer.copy.copy_context import CopyContext
from streamer.copy.finish_copies import Finisher
from streamer.copy.prepare_copy import TableCopy
from streamer.target.persistent_connection import PersistentConnection
from streamer.target.session_counts import FINISHING_MAX


class Finishing:
    """Finishes copies in parallel. A round enters this context, and calls `check` regularly."""

    def __init__(self, context: CopyContext, finisher: Finisher) -> None:
        self._context = context
        self._finisher = finisher
        self._tasks: dict[TableCopy, asyncio.Task[None]] = {}
        self._free: list[PersistentConnection] = []
        self._places = asyncio.Semaphore(FINISHING_MAX)

    def begin(self, copy: TableCopy, rows: int, size: int) -> None:
        """Finish *copy*, whose parts are all copied."""
        if copy not in self._tasks:
            self._tasks[copy] = asyncio.create_task(
                self._finish(copy, rows, size), name=f"finish {copy.name}"
            )

    async def wait(self, seconds: float | None = None) -> None:
        """Wait until all copies are finished, or for *seconds*.

        Raises the StreamerError that ends the round.
        """
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=seconds)
        elif seconds is not None:
            await asyncio.sleep(seconds)
        self.check()

    def check(self) -> None:
        """Remove the tasks that ended. Raises the StreamerError that ends the round."""
        for copy, task in list(self._tasks.items()):
            if task.done():
                del self._tasks[copy]
                task.result()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the tasks and the connections.

        A copy whose parts are all copied no longer needs the round. So such a copy is finished even
        if the round failed, unless the round was cancelled.
        """
        tasks = list(self._tasks.values())
        if kind is asyncio.CancelledError:
            for task in tasks:
                task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
            for session in self._free:
                await session.close()
        finally:  # a cancelled close would leave a session behind
            for session in self._free:
                session.terminate()

    async def _finish(self, copy: TableCopy, rows: int, size: int) -> None:
        async with self._places:
            session = (
                self._free.pop()
                if self._free
                else PersistentConnection(self._context.address, self._context.task_name)
            )
            try:
                await self._finisher.finish(copy, rows, size, session)
            finally:
                self._free.append(session)
