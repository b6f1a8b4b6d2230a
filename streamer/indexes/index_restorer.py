"""Restores deferred indexes that no copy will restore.

A copy restores the indexes of its target at its end, unless a second source still fills that table.
If streamer then gives up the copy of the second source, because its table was dropped or unmapped,
no copy restores the indexes. Without indexes, the stream of the first source would read the whole
table for each row.
"""

import asyncio
from typing import Final

import structlog

from streamer.bookkeeping.deferred_indexes import read_abandoned_targets, restore_indexes
from streamer.errors.error_classes import Retry, StreamerError
from streamer.mapping.relation_names import parse_name
from streamer.observability.metrics import Metrics
from streamer.target.connection import TargetAddress, TargetConnection, target_connection
from streamer.util.backoff import Backoff

log = structlog.get_logger()

CHECK_SECONDS: Final = 30.0
LOCK_SECONDS: Final = 5
"""The time for which the restorer waits for a lock at the target, while statements on the table
queue behind it.
"""


class IndexRestorer:
    """Checks periodically for such indexes. The owner calls `run`."""

    def __init__(self, address: TargetAddress, metrics: Metrics) -> None:
        self._address = address
        self._metrics = metrics
        self._backoff = Backoff()
        self._refused: set[str] = set()
        """The targets for which the server refused an index, until the next start or copy."""

    async def run(self) -> None:
        """Check and restore abandoned indexes, repeatedly."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)  # a copy restores its own indexes
            try:
                async with target_connection(self._address, "streamer indexes") as target:
                    await self._restore(target)
            except StreamerError as exc:
                self._metrics.count_error(exc)
                self._backoff.log(log, "deferred indexes cannot be restored yet", exc)

    async def _restore(self, target: TargetConnection) -> None:
        abandoned = await read_abandoned_targets(target)
        self._refused.intersection_update(abandoned)
        names = [name for name in abandoned if name not in self._refused]
        if names:
            await target.execute(f"set lock_timeout = '{LOCK_SECONDS}s'")
        for name in names:
            try:
                count = await restore_indexes(target, parse_name(name), is_start=True)
            except StreamerError as exc:
                if exc.retry is Retry.TIMED:
                    raise
                self._refused.add(name)
                log.error("an index cannot be restored", target=name, error=str(exc))
            else:
                log.info("indexes of an abandoned copy restored", target=name, indexes=count)
