"""Queries of the databases of a configuration, as by `streamer status` and `streamer wait`."""

import asyncio
import atexit
import math
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from streamer.admin.mapping.applied_mapping import load_applied
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import is_installed
from streamer.bookkeeping.relation_records import RelationRecord, read_relation_records
from streamer.commands import wait as wait_command
from streamer.commands.status import SourceStatus, read_status
from streamer.config import static_mapping
from streamer.config.settings import Settings
from streamer.errors.error_classes import StreamerError, TargetConnectionError
from streamer.mapping.rules import Mapping, SourceMapping
from streamer.mapping.scope import ALL, Scope
from streamer.postgres.secret import Secret
from streamer.runtime.session_needs import address_of_target
from streamer.source.server.idle_connections import IdleConnections
from streamer.source.server.primary_of_standby import flush_source
from streamer.util.lsn import Lsn

T = TypeVar("T")


class Observer:
    """Keeps connections open: a test queries many times, and a connection costs more than the rest
    of a query.
    """

    def __init__(self, settings: Settings) -> None:
        self.address = address_of_target(settings)
        self.bookkeeping = Bookkeeping(self.address, "streamer wait")
        self._sources = IdleConnections(math.inf)
        self.questions = 0
        """The number of questions that wait for an answer."""

    async def wait(self, mapping: Mapping, seconds: float, scope: Scope = ALL) -> str | None:
        """Wait until all present commits are visible; return the remaining obstacle."""
        return await wait_command.wait_over(
            self.bookkeeping, mapping, seconds, scope, self._read_end
        )

    async def _read_end(self, source: SourceMapping) -> Lsn:
        async with self._sources.connection(source) as plain:
            return await flush_source(source, plain)

    async def statuses(self, mapping: Mapping) -> list[dict[str, Any]]:
        """Return the status of each source, as JSON."""

        async def read() -> list[SourceStatus]:
            return await read_status(self.bookkeeping, mapping, self._sources.connection)

        return [status.to_json() for status in await self._asked(read)]

    async def tables(self) -> list[RelationRecord]:
        async def read() -> list[RelationRecord]:
            if not await is_installed(self.bookkeeping):
                return []
            return await read_relation_records(self.bookkeeping)

        return await self._asked(read)

    async def _asked(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the answer of the bookkeeping, whose connection may have ended since the last
        question.
        """
        try:
            return await ask()
        except TargetConnectionError:
            return await ask()

    async def close(self) -> None:
        """Let the next question open a new connection."""
        await self.bookkeeping.close()
        await self._sources.close()


Question = Callable[[Observer, Mapping], Coroutine[Any, Any, T]]
_observers: dict[Secret, Observer] = {}
"""The last observer, by the url of the target, and observers that wait for an answer."""


def ask(config: Path, question: Question[T]) -> T:
    """Query *config* from any thread, even in a running event loop. A separate process would take
    two seconds to start, many hundred times.
    """
    return asyncio.run_coroutine_threadsafe(_ask(config, question), _loop()).result()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="observer", daemon=True).start()
    atexit.register(lambda: asyncio.run_coroutine_threadsafe(_close_except(None), loop).result())
    return loop


async def _ask(config: Path, question: Question[T]) -> T:
    settings, mapping = static_mapping.load(config)
    if settings.mapping_database is not None:
        mapping = await load_applied(settings)
    target = settings.target.url
    observer = _observers.setdefault(target, Observer(settings))
    observer.questions += 1
    try:
        return await question(observer, mapping)
    except StreamerError:
        await observer.close()
        raise
    finally:
        observer.questions -= 1
        await _close_except(target)


async def _close_except(target: Secret | None) -> None:
    for url in [url for url, observer in _observers.items() if not observer.questions]:
        if url != target:
            await _observers.pop(url).close()
