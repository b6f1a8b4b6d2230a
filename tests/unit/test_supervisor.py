"""When the supervisor of a source begins the next attempt."""

import asyncio
from typing import Any, cast

import pytest

from streamer.errors.error_classes import Retry, SlotMissingError, StreamerError, TransportError
from streamer.mapping.rules import SourceMapping
from streamer.postgres.secret import Secret
from streamer.runtime.session.supervisor import Supervisor

SHOP = SourceMapping("shop", None, Secret(""), ())


class Failing(Supervisor):
    """Each attempt fails with the next error, as an operator's request comes; the last stops."""

    def __init__(self, source: SourceMapping, *errors: StreamerError) -> None:
        super().__init__(source, cast("Any", None), cast("Any", None))
        self.errors = list(errors)
        self.obstacles: list[str | None] = []

    async def _attempt(self) -> bool:
        self.obstacles.append(self._binary_obstacle)
        if not self.errors:
            self.stop.set()
            return False
        self.wake_for_requests(was_requested=True)
        raise self.errors.pop(0)

    async def _report(self, error: StreamerError) -> None:
        assert error.retry is Retry.MANUAL


@pytest.mark.asyncio
async def test_a_request_during_a_failing_attempt_begins_the_next_attempt() -> None:
    supervisor = Failing(SHOP, SlotMissingError("the slot is gone"))
    async with asyncio.timeout(5):
        await supervisor.run()
    assert len(supervisor.obstacles) == 2


@pytest.mark.asyncio
async def test_text_transport_lasts_for_one_attempt() -> None:
    """The attempt after that decides again, because an operator may have changed the type."""
    gone = SlotMissingError("the slot is gone")
    supervisor = Failing(SHOP, TransportError("v is integer, and smallint"), gone)
    async with asyncio.timeout(5):
        await supervisor.run()
    assert supervisor.obstacles == [None, "v is integer, and smallint", None]
