"""How long the present heartbeat has been in flight."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from streamer.control.progress_tracker import LanePending, ProgressTracker
from streamer.mapping.rules import SourceMapping
from streamer.postgres.secret import Secret
from streamer.runtime import heartbeat as module
from streamer.runtime.heartbeat import Heartbeat, ServerBeats
from streamer.runtime.session.supervisor import Supervisor
from streamer.runtime.tables.lag import Lag
from streamer.runtime.target_health import TargetHealth
from streamer.source.server.source_clock import SourceClock
from streamer.util.lsn import Lsn

SOURCE = SourceMapping("shop", None, Secret("postgresql://"), (), heartbeat_interval=5)


class Beating:
    """A heartbeat whose source writes the bytes that the test gives, at the given times."""

    def __init__(self) -> None:
        self.target = TargetHealth()
        services: Any = mock.Mock(heartbeat_interval=0, target=self.target)
        self.heartbeat = Heartbeat(SOURCE, services)
        self.tracker = ProgressTracker(Lsn(1))
        self.server = ServerBeats()
        self.lag = Lag(self.tracker, SourceClock())
        self.server.receivers[self.heartbeat] = self.lag
        self.now = 100.0
        self.beats: list[Lsn] = []

    async def beat(self, message: int) -> None:
        self.beats.append(Lsn(message))
        await self.heartbeat._beat(None, self.server)  # type: ignore[arg-type]


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
    beating.heartbeat.check_arrival(beating.tracker)
    assert beating.heartbeat.arrived_seconds is None, "a lane has not committed what came before"
    beating.now += 7
    assert beating.heartbeat.seconds == 7
    assert beating.heartbeat.overdue_seconds == 7

    beating.tracker.durable(lane, Lsn(900))
    beating.heartbeat.check_arrival(beating.tracker)

    assert beating.heartbeat.arrived_seconds == 7
    assert beating.heartbeat.overdue_seconds is None
    beating.now += 60
    assert beating.heartbeat.seconds == 7, "none is on its way"


async def test_a_position_at_its_message_is_not_yet_past_its_commit(beating: Beating) -> None:
    await beating.beat(1064)
    beating.tracker.keepalive(Lsn(1064))
    beating.heartbeat.check_arrival(beating.tracker)
    assert beating.heartbeat.arrived_seconds is None


async def test_a_beat_shows_whether_the_stream_of_its_source_is_behind(beating: Beating) -> None:
    """So the guard of an idle source may check the end of WAL rarely."""
    await beating.beat(1064)
    beating.now += 10
    assert beating.lag.seconds(beating.now) == 10
    assert beating.lag.is_stalled(beating.now)
    beating.tracker.keepalive(Lsn(1112))
    assert beating.lag.seconds(beating.now) == 0
    assert beating.lag.visible_at == 100, "commits before the beat are visible"


def _server(name: Any) -> Any:
    """A server with a start time of its own."""
    return SimpleNamespace(identity=("7301", 1, sum(name.encode())), in_recovery=False)


class Fleet:
    """Sources of a process; each source is a database of a server."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.services: Any = mock.Mock(heartbeats={}, target=TargetHealth(), heartbeat_interval=0)

    async def beat(self, servers: list[str], *, stalled: frozenset[int] = frozenset()) -> list[str]:
        """Run a heartbeat for each of *servers*; return the servers that got a message."""

        async def emit(plain: str, label: str) -> Lsn:
            self.sent.append(plain)
            await asyncio.sleep(0)  # lets the remaining tasks run
            return Lsn(500)

        beats = [Heartbeat(SOURCE, self.services) for _ in servers]
        trackers = [ProgressTracker(Lsn(1)) for _ in servers]
        for number in stalled:
            beats[number].sent(Lsn(300), 1.0, trackers[number])
        with (
            mock.patch.object(module, "emit_heartbeat", emit),
            mock.patch.object(module, "heartbeat_obstacle", mock.AsyncMock(return_value=None)),
        ):
            plains: Any = servers
            tasks = [
                asyncio.create_task(
                    heartbeat.run(plain, _server(plain), Lag(tracker, SourceClock()))
                )
                for heartbeat, plain, tracker in zip(beats, plains, trackers, strict=True)
            ]
            for _ in range(20):
                await asyncio.sleep(0)
            for number, (heartbeat, tracker) in enumerate(zip(beats, trackers, strict=True)):
                tracker.keepalive(Lsn(400 if number in stalled else 600))
                heartbeat.check_arrival(tracker)
                assert heartbeat.arrived_seconds is not None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert self.services.heartbeats == {}
        return sorted(self.sent)


async def test_databases_of_one_server_share_a_heartbeat() -> None:
    assert await Fleet().beat(["eu", "eu", "eu"]) == ["eu"]


async def test_clones_of_one_server_share_none() -> None:
    assert await Fleet().beat(["eu", "us", "us"]) == ["eu", "us"]


async def test_a_stalled_source_writes_none_and_waits_for_its_own() -> None:
    assert await Fleet().beat(["eu", "eu"], stalled=frozenset({0})) == ["eu"]
    assert await Fleet().beat(["eu"], stalled=frozenset({0})) == []


def test_a_source_of_another_replica_has_its_heartbeats_there() -> None:
    """Otherwise the time since the move would look like a commit that does not become visible."""
    handed_over = Supervisor.__new__(Supervisor)
    handed_over.pipeline, handed_over._confirmed_at = None, 1.0
    handed_over._assigned = asyncio.Event()  # clear: a peer replica is to run the source
    assert handed_over.heartbeat_seconds is None
