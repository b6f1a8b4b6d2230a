"""Builds the indexes that foreign keys lack at the target, beside the stream.

The task builds indexes in turn, on separate connections. The task logs every failure and retries
later; the stream is not affected.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.errors.error_classes import Retry, StreamerError
from streamer.indexes.foreign_key_indexes import (
    ForeignKeyFacts,
    MissingIndex,
    build,
    drop_leftovers,
    find_missing_indexes,
    read_foreign_key_facts,
)
from streamer.mapping.rules import Mapping
from streamer.observability.metrics import Metrics
from streamer.target.connection import TargetAddress
from streamer.util.backoff import Backoff

log = structlog.get_logger()

CHECK_SECONDS: Final = 30.0
"""The time to wait for tables that are not ready, or until the next attempt."""
IDLE_SECONDS: Final = 300.0
"""The time to wait when no index is missing."""


class IndexBuilder:
    """Checks periodically for missing indexes on foreign keys. The owner calls `run`."""

    def __init__(
        self,
        address: TargetAddress,
        read_mapping: Callable[[], Mapping],
        target_namespace: str,
        metrics: Metrics,
    ) -> None:
        self._address = address
        self._read_mapping = read_mapping
        self._target_namespace = target_namespace
        self._metrics = metrics
        self._bookkeeping = Bookkeeping(address, "streamer indexes")
        self._backoff = Backoff()
        self._refused: set[str] = set()
        self._is_tidy = False

    async def run(self) -> None:
        """Check and build missing indexes, repeatedly."""
        try:
            while True:
                seconds = CHECK_SECONDS
                try:
                    while (missing := await self._next()) is not None:
                        await self._build(missing)
                    if not await self._find_missing():
                        seconds = IDLE_SECONDS
                except StreamerError as exc:
                    self._report(exc)
                await asyncio.sleep(seconds)
        finally:
            await self._bookkeeping.close()

    async def _next(self) -> MissingIndex | None:
        """Return an index to build now that has not failed before."""
        indexes = await self._find_missing()
        if not self._is_tidy:
            tables = {table for missing in indexes for table, _ in missing.statements}
            await drop_leftovers(self._address, tables)
            self._is_tidy = True
        for missing in indexes:
            if missing.state == "missing" and missing.name not in self._refused:
                return missing
        return None

    async def _find_missing(self) -> list[MissingIndex]:
        sources: list[ForeignKeyFacts] = []
        for source in self._read_mapping().sources:
            try:
                sources.append(
                    await read_foreign_key_facts(source, self._bookkeeping, self._target_namespace)
                )
            # the tables of the remaining sources do not depend on this source
            except StreamerError as exc:
                self._report(exc)
        return await find_missing_indexes(self._address, self._bookkeeping, sources)

    async def _build(self, missing: MissingIndex) -> None:
        log.info("building an index", table=str(missing.target), index=missing.name)
        try:
            await build(self._address, missing)
        except StreamerError as exc:
            if exc.retry is Retry.TIMED:
                raise
            self._refused.add(missing.name)  # until the next start: an operator must act
            self._report(exc)
        else:
            log.info("index built", table=str(missing.target), index=missing.name)

    def _report(self, error: StreamerError) -> None:
        self._metrics.count_error(error)
        self._backoff.log(log, "indexes under foreign keys cannot be built yet", error)
