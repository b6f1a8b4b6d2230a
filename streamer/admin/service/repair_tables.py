"""Repairs of tables that operators begin on the page: see `streamer.commands.repair`.

A repair runs as a task of this process, because its comparisons can take long. A process makes one
repair at a time, because each may start Spark; further repairs wait. A repair that ends with the
process leaves a correct target, and the next repair begins again.
"""

import asyncio
from io import StringIO
from typing import TYPE_CHECKING

import structlog
from rich.console import Console

from streamer.bookkeeping.bookkeeping_schema import installed
from streamer.commands.repair import repair
from streamer.commands.table_requests import read_matching
from streamer.compare.comparison import ComparisonScope, Options
from streamer.errors.error_classes import NotFoundError, StreamerError
from streamer.mapping.relation_names import RelationPattern, parse_name
from streamer.mapping.rules import SourceLabel
from streamer.observability.logs import redact
from streamer.target.connection import TargetAddress
from streamer.util.containment import contained

if TYPE_CHECKING:
    from streamer.admin.service.admin_service import AdminService

log = structlog.get_logger()

TableKey = tuple[str, str | None, str]
"""Database, sid and name of a table at its source."""


class Repairs:
    """The repairs of this process."""

    def __init__(self, service: "AdminService") -> None:
        self._service = service
        self._running: dict[TableKey, asyncio.Task[None]] = {}
        self._turn = asyncio.Semaphore(1)
        self._current: TableKey | None = None
        self._failures: dict[TableKey, str] = {}

    async def start(self, key: TableKey, actor: str) -> None:
        """Begin to repair a table, unless a repair of the table runs or waits.

        Raises NotFoundError, TargetError.
        """
        database, sid, table = key
        self._service.source(database, sid)
        await self._require_table(key)
        if key not in self._running:
            self._failures.pop(key, None)
            name = f"repair {SourceLabel(database, sid)} {table}"
            self._running[key] = asyncio.create_task(self._repair(key, actor), name=name)

    async def _require_table(self, key: TableKey) -> None:
        """Raise NotFoundError if the source does not stream the table."""
        database, sid, table = key
        name = parse_name(table)
        exact = RelationPattern(name.namespace, name.name)
        address = TargetAddress.parse(self._service.settings.target.url)
        async with installed(address, "streamer page") as bookkeeping:
            matching = await read_matching(bookkeeping, exact, database, sid)
        if all(source.sid != sid for source, _ in matching):
            raise NotFoundError(
                f'"{SourceLabel(database, sid)}" streams no table "{table}"',
                hint="the overview lists its tables",
            )

    def state(self, key: TableKey) -> str | None:
        """Return ``running`` or ``waiting``; None without a repair of the table."""
        if key == self._current:
            return "running"
        return "waiting" if key in self._running else None

    def failure(self, key: TableKey) -> str | None:
        """Return why the last repair of a table in this process failed; None without a failure."""
        return self._failures.get(key)

    async def _repair(self, key: TableKey, actor: str) -> None:
        """Repair a table once no other repair runs, and keep the reason of a failure."""
        database, sid, table = key
        subject = {"source": SourceLabel(database, sid), "table": table}
        try:
            async with self._turn:
                self._current = key
                with contained(f"the repair of {table}"):
                    error = await self._repair_now(key, actor, subject)
        except StreamerError as exc:
            error = str(exc)
            log.error("repair failed", error=error, **exc.log_fields, **subject)
        finally:
            if self._current == key:
                self._current = None
            del self._running[key]
        if error is not None:
            self._failures[key] = redact(error)

    async def _repair_now(self, key: TableKey, actor: str, subject: dict[str, str]) -> str | None:
        """Repair a table; return the error of its last comparison."""
        database, sid, table = key
        sync = self._service.settings.sync
        options = Options(jobs=sync.jobs, rows_per_second=sync.rows_per_second, definitions=True)
        log.info("repair began", actor=actor, **subject)
        results = await repair(
            self._service.settings,
            self._service.mapping,
            ComparisonScope((table,), database, sid),
            options,
            actor=actor,
            console=Console(file=StringIO()),
        )
        log.info("repair ended", rows=sum(r.repaired or 0 for r in results), **subject)
        return next((result.error for result in results if result.error), None)

    async def close(self) -> None:
        """End the repairs of this process."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
