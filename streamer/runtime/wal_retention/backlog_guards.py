"""The backlog guards of a process, one for each source. The guards also run during an outage of the
target.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from streamer.config.settings import Settings
from streamer.mapping.rule_options import OnMaxRetainedWal
from streamer.mapping.rules import SourceMapping
from streamer.runtime.installation_id import Installation
from streamer.runtime.slot_owner import SlotOwner
from streamer.runtime.wal_retention.backlog_guard import BacklogGuard


class BacklogGuards:
    """Owns the guards and their tasks."""

    def __init__(self, settings: Settings, *, enforces_limits: bool) -> None:
        """*enforces_limits*: False if the sources run up to a point, and so have no WAL limits."""
        self.installation = Installation(settings.spool.path, settings.target.url.reveal())
        self._spool = settings.spool
        self._enforces_limits = enforces_limits
        self._running: dict[str, tuple[BacklogGuard, asyncio.Task[None]]] = {}
        self._group: asyncio.TaskGroup | None = None

    def __iter__(self) -> Iterator[BacklogGuard]:
        return (guard for guard, _ in self._running.values())

    @asynccontextmanager
    async def running(self, sources: Sequence[SourceMapping]) -> AsyncIterator[None]:
        """Guard *sources* during a block, and sources that join meanwhile."""
        async with asyncio.TaskGroup() as self._group:
            self.keep(sources)
            yield
            for _, task in self._running.values():
                task.cancel()

    def keep(self, sources: Sequence[SourceMapping]) -> None:
        """Guard *sources* by their newest settings; end the guards of all remaining sources."""
        if self._group is None:  # `running` later starts guards for the mapping of its start
            return
        for label in self._running.keys() - {source.label for source in sources}:
            self._running.pop(label)[1].cancel()
        for source in sources:
            self.add(source).change(self._limited(source))

    def add(self, source: SourceMapping) -> BacklogGuard:
        """Return the guard of a source; start the guard if necessary."""
        assert self._group is not None
        if source.label not in self._running:
            guard = BacklogGuard(
                self._limited(source),
                self._spool.path,
                SlotOwner(self.installation),
                is_lasting=self._spool.is_lasting,
            )
            task = self._group.create_task(guard.run(), name=f"guard {source.label}")
            self._running[source.label] = guard, task
        return self._running[source.label][0]

    async def remove(self, label: str) -> BacklogGuard:
        """End the guard of a removed source; return the guard, which still holds the journal."""
        guard, task = self._running.pop(label)
        await guard.journaling.stop_writing()
        task.cancel()
        await asyncio.wait([task])
        return guard

    def _limited(self, source: SourceMapping) -> SourceMapping:
        if self._enforces_limits:
            return source
        policy = OnMaxRetainedWal.WARN
        return replace(source, max_retained_wal_bytes=None, on_max_retained_wal=policy)
