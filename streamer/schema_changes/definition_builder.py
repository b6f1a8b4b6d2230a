"""Creates the definitions of ready tables at the target, beside the stream.

The task creates definitions in turn, on a connection that lives only while definitions wait. A
stored failure stops no table.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import Final

import structlog

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.planned_definitions import read_given_up, read_pending, read_unwanted
from streamer.errors.error_classes import StreamerError
from streamer.mapping.rules import Mapping
from streamer.observability.metrics import Metrics
from streamer.schema_changes.target_definitions import make_online, mark_made
from streamer.target.connection import TargetAddress, target_connection
from streamer.util.backoff import Backoff

log = structlog.get_logger()

CHECK_SECONDS: Final = 2.0
CHECKS_UNTIL_FULL_CHECK: Final = 15
"""Every fifteenth check also reads the definitions that an operator must create."""


class DefinitionBuilder:
    """Checks from time to time for definitions to create. `run` until cancelled."""

    def __init__(
        self,
        address: TargetAddress,
        bookkeeping: Bookkeeping,
        read_mapping: Callable[[], Mapping],
        metrics: Metrics,
    ) -> None:
        self._address = address
        self._bookkeeping = bookkeeping
        self._read_mapping = read_mapping
        self._metrics = metrics
        self._backoff = Backoff()

    async def run(self) -> None:
        """Create pending definitions every two seconds."""
        for number in itertools.count(1):
            if self._creates_definitions:
                try:
                    await self._create(reads_given_up=number % CHECKS_UNTIL_FULL_CHECK == 0)
                except StreamerError as exc:
                    self._metrics.count_error(exc)
                    self._backoff.log(log, "definitions cannot be created yet", exc)
            await asyncio.sleep(CHECK_SECONDS)

    async def _create(self, *, reads_given_up: bool) -> None:
        books = self._bookkeeping
        waiting = await read_unwanted(books) or await read_pending(books)
        given_up = reads_given_up and await read_given_up(books)
        if not waiting and not given_up:
            return
        async with target_connection(self._address, "streamer definitions") as target:
            await make_online(target)
            if given_up:
                await mark_made(target)

    @property
    def _creates_definitions(self) -> bool:
        return any(source.makes_definitions for source in self._read_mapping().sources)
