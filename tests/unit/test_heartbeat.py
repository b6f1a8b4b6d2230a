"""What heartbeats alone have written, and how long the present one has been on its way."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from streamer.lsn import Lsn
from streamer.mapping.rules import Secret, SourceMapping
from streamer.progress.tracker import LanePending, ProgressTracker
from streamer.runtime import heartbeat as module
from streamer.runtime.heartbeat import Heartbeat
from streamer.runtime.target_watch import TargetHealth
from streamer.source.heartbeat import Beat

SOURCE = SourceMapping("shop", None, Secret("postgresql://"), (), heartbeat_interval=5)


class Beating:
    """A heartbeat whose source writes what the test says, at the times it says."""

    def __init__(self) -> None:
        self.target = TargetHealth()
        services: Any = mock.Mock(heartbeat_interval=0, without_heartbeat=set(), target=self.target)
        self.heartbeat = Heartbeat(SOURCE, services)
        self.tracker = ProgressTracker(Lsn(1))
        self.now = 100.0
        self.beats: list[Beat] = []

    async def beat(self, before: int, message: int, after: int) -> None:
        self.beats.append(Beat(Lsn(before), Lsn(message), Lsn(after)))
        await self.heartbeat._beat(None, self.tracker)  # type: ignore[arg-type]


@pytest.fixture
def beating() -> Iterator[Beating]:
    made = Beating()

    async def emit(plain: object, label: str) -> Beat:
        return made.beats.pop(0)

    with (
        mock.patch.object(module, "emit_heartbeat", emit),
        mock.patch.object(module, "time", SimpleNamespace(monotonic=lambda: made.now)),
    ):
        yield made


async def test_it_has_arrived_when_everything_before_it_is_durable(beating: Beating) -> None:
    lane = LanePending()
    beating.tracker.dispatched(Lsn(900), [lane])
    await beating.beat(1000, 1064, 1112)
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
    await beating.beat(1000, 1064, 1112)
    beating.tracker.keepalive(Lsn(1064))
    beating.heartbeat.look(beating.tracker)
    assert beating.heartbeat.arrived_seconds is None


async def test_heartbeats_in_a_row_are_alone_until_somebody_else_writes(beating: Beating) -> None:
    alone = beating.heartbeat.wrote_all
    assert not alone(Lsn(1000), Lsn(1112))
    await beating.beat(1000, 1064, 1112)
    await beating.beat(1112, 1176, 1224)
    assert alone(Lsn(1000), Lsn(1224))
    assert alone(Lsn(1112), Lsn(1224))
    assert not alone(Lsn(990), Lsn(1224)), "something lies before them"
    assert not alone(Lsn(1000), Lsn(1230)), "something lies behind them"

    await beating.beat(1300, 1364, 1412)

    assert not alone(Lsn(1224), Lsn(1412)), "something lies between them"
    assert alone(Lsn(1300), Lsn(1412))


async def test_until_its_end_is_known_what_comes_may_be_the_heartbeat(beating: Beating) -> None:
    seen: list[bool] = []

    async def emit(plain: object, label: str) -> Beat:
        seen.append(beating.heartbeat.wrote_all(Lsn(1000), Lsn(1112)))
        return Beat(Lsn(1000), Lsn(1064), Lsn(1112))

    with mock.patch.object(module, "emit_heartbeat", emit):
        await beating.beat(0, 0, 0)

    assert seen == [True]
    assert not beating.heartbeat.wrote_all(Lsn(1000), Lsn(1200))


async def test_who_commits_in_the_moment_of_a_heartbeat_is_not_made_to_wait(
    beating: Beating,
) -> None:
    await beating.beat(1000, 1064, 1112 + 40)
    assert not beating.heartbeat.wrote_all(Lsn(1000), Lsn(1152))
