"""When the supervisor of a source begins the next attempt."""

import asyncio
from typing import Any, cast

import pytest

from streamer.errors.error_classes import Retry, SlotMissingError, StreamerError
from streamer.mapping.rules import SourceMapping
from streamer.postgres.secret import Secret
from streamer.runtime.session.supervisor import Supervisor


class Failing(Supervisor):
    """Its first attempt fails as an operator's request comes, and its second attempt stops."""

    def __init__(self, source: SourceMapping) -> None:
        super().__init__(source, cast("Any", None), cast("Any", None))
        self.attempt_count = 0

    async def _attempt(self) -> bool:
        self.attempt_count += 1
        if self.attempt_count == 2:
            self.stop.set()
            return False
        self.wake_for_requests(was_requested=True)
        raise SlotMissingError("the slot is gone")

    async def _report(self, error: StreamerError) -> None:
        assert error.retry is Retry.MANUAL


@pytest.mark.asyncio
async def test_a_request_during_a_failing_attempt_begins_the_next_attempt() -> None:
    supervisor = Failing(SourceMapping("shop", None, Secret(""), ()))
    async with asyncio.timeout(5):
        await supervisor.run()
    assert supervisor.attempt_count == 2
