"""Repairs of tables that operators begin on the page: see `streamer.commands.repair`.

A repair runs as a task of this process, because its comparisons can take long. A repair that ends
with the process leaves a correct target, and the next repair begins again.
"""

import asyncio
from io import StringIO
from typing import TYPE_CHECKING

import structlog
from rich.console import Console

from streamer.commands.repair import repair
from streamer.compare.comparison import ComparisonScope, Options
from streamer.errors.error_classes import StreamerError
from streamer.mapping.rules import SourceLabel
from streamer.observability.logs import redact

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
        self._failures: dict[TableKey, str] = {}

    def start(self, key: TableKey, actor: str) -> None:
        """Begin to repair a table, unless a repair of the table runs. Raises NotFoundError."""
        database, sid, table = key
        self._service.source(database, sid)
        if key not in self._running:
            self._failures.pop(key, None)
            name = f"repair {SourceLabel(database, sid)} {table}"
            self._running[key] = asyncio.create_task(self._repair(key, actor), name=name)

    def is_running(self, key: TableKey) -> bool:
        return key in self._running

    def failure(self, key: TableKey) -> str | None:
        """Return the reason why the last repair of a table failed here."""
        return self._failures.get(key)

    async def _repair(self, key: TableKey, actor: str) -> None:
        database, sid, table = key
        subject = {"source": SourceLabel(database, sid), "table": table}
        sync = self._service.settings.sync
        options = Options(jobs=sync.jobs, rows_per_second=sync.rows_per_second, definitions=True)
        log.info("repair began", actor=actor, **subject)
        try:
            results = await repair(
                self._service.settings,
                self._service.mapping,
                ComparisonScope((table,), database, sid),
                options,
                actor=actor,
                console=Console(file=StringIO()),
            )
            errors = [result.error for result in results if result.error]
        except StreamerError as exc:
            errors = [redact(str(exc))]
            log.error("repair failed", error=str(exc), **exc.log_fields, **subject)
        else:
            log.info("repair ended", rows=sum(r.repaired or 0 for r in results), **subject)
        finally:
            del self._running[key]
        if errors:
            self._failures[key] = redact(errors[0])

    async def close(self) -> None:
        """End the repairs of this process."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
