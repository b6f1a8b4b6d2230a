"""Creates the definitions of ready tables at the target, beside the stream.

The task creates one definition after the next, on a separate connection. A failure is stored, and
stops no table.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import Final

import structlog

from streamer.errors.error_classes import StreamerError
from streamer.mapping.rules import Mapping
from streamer.observability.metrics import Metrics
from streamer.schema_changes.target_definitions import make_online, mark_made
from streamer.target.connection import TargetAddress, target_connection
from streamer.util.backoff import Backoff

log = structlog.get_logger()

CHECK_SECONDS: Final = 2.0
CHECKS_UNTIL_FULL_CHECK: Final = 15
"""Every fifteenth check also reads the definitions that an operator has to create."""


class DefinitionBuilder:
    """Checks from time to time for definitions to create. `run` until cancelled."""

    def __init__(
        self, address: TargetAddress, read_mapping: Callable[[], Mapping], metrics: Metrics
    ) -> None:
        self._address = address
        self._read_mapping = read_mapping
        self._metrics = metrics
        self._backoff = Backoff()

    async def run(self) -> None:
        """Create pending definitions every two seconds."""
        for number in itertools.count(1):
            if self._creates_definitions:
                try:
                    async with target_connection(self._address, "streamer definitions") as target:
                        await make_online(target)
                        if number % CHECKS_UNTIL_FULL_CHECK == 0:
                            await mark_made(target)
                except StreamerError as exc:
                    self._metrics.count_error(exc)
                    self._backoff.log(log, "definitions have to wait", exc)
            await asyncio.sleep(CHECK_SECONDS)

    @property
    def _creates_definitions(self) -> bool:
        return any(source.makes_definitions for source in self._read_mapping().sources)
