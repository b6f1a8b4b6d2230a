"""How long the present heartbeat has been on its way."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from streamer.lsn import Lsn
from streamer.mapping.rules import SourceMapping
from streamer.postgres.secret import Secret
from streamer.progress.tracker import LanePending, ProgressTracker
from streamer.runtime import heartbeat as module
from streamer.runtime.heartbeat import Heartbeat
from streamer.runtime.target_watch import TargetHealth

SOURCE = SourceMapping("shop", None, Secret("postgresql://"), (), heartbeat_interval=5)


class Beating:
    """A heartbeat whose source writes the bytes that the test gives, at the given times."""

    def __init__(self) -> None:
        self.target = TargetHealth()
        services: Any = mock.Mock(heartbeat_interval=0, without_heartbeat=set(), target=self.target)
        self.heartbeat = Heartbeat(SOURCE, services)
        self.tracker = ProgressTracker(Lsn(1))
        self.now = 100.0
        self.beats: list[Lsn] = []

    async def beat(self, message: int) -> None:
        self.beats.append(Lsn(message))
        await self.heartbeat._beat(None, self.tracker)  # type: ignore[arg-type]


@pytest.fixture
def beating() -> Iterator[Beating]:
    made = Beating()

    async def emit(plain: object, label: str) -> Lsn:
        return made.beats.pop(0)

    with (
        mock.patch.object(module, "emit_heartbeat", emit),
        mock.patch.object(module, "time", SimpleNamespace(monotonic=lambda: made.now)),
    ):
        yield made


async def test_it_has_arrived_when_everything_before_it_is_durable(beating: Beating) -> None:
    lane = LanePending()
    beating.tracker.dispatched(Lsn(900), [lane])
    await beating.beat(1064)
    beating.tracker.keepalive(Lsn(1112))
    beating.heartbeat.look(beating.tracker)
    assert beating.heartbeat.arrived_seconds is None, "a lane has not committed what came before"
    beating.now += 7
    assert beating.heartbeat.seconds == 7
    assert beating.heartbeat.overdue_seconds == 7

    beating.tracker.durable(lane, Lsn(900))
    beating.heartbeat.look(beating.tracker)

    assert beating.heartbeat.arrived_seconds == 7
    assert beating.heartbeat.overdue_seconds is None
    beating.now += 60
    assert beating.heartbeat.seconds == 7, "none is on its way"


async def test_a_position_at_its_message_is_not_yet_past_its_commit(beating: Beating) -> None:
    await beating.beat(1064)
    beating.tracker.keepalive(Lsn(1064))
    beating.heartbeat.look(beating.tracker)
    assert beating.heartbeat.arrived_seconds is None
