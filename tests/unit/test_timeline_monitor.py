"""The watch of a standby's timeline, with a model of the standby."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from streamer.errors.error_classes import SourceConnectionError
from streamer.mapping.rules import SourceMapping
from streamer.postgres.secret import Secret
from streamer.runtime.guards import timeline_monitor
from streamer.runtime.guards.timeline_monitor import TimelineMonitor
from streamer.source.timeline_branches import Branch
from streamer.target.fencing_token import FencingToken
from streamer.util.lsn import Lsn
from tests.unit.test_capacity_findings import SERVER

FORK = Lsn.parse("0/5000098")
HISTORY = f"1\t{FORK}\tno recovery target specified\n"


class Standby:
    """A server that replays *timeline*."""

    def __init__(self, timeline: int, history: str = HISTORY) -> None:
        self.timeline = timeline
        self.history = history

    async def execute(self, sql: str, _parameters: object = None, **_: object) -> Any:
        row: dict[str, object] = {"timeline": self.timeline}
        if sql != "IDENTIFY_SYSTEM":
            assert sql == f"TIMELINE_HISTORY {self.timeline}"
            row = {"content": self.history}

        async def fetchall() -> list[dict[str, object]]:
            return [row]

        return SimpleNamespace(fetchall=fetchall)


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The stored timelines, each after the timeline that was known."""
    steps: list[tuple[int, int]] = []

    async def store(
        _bookkeeping: object, _fence: FencingToken, known: int, now: int, _text: str
    ) -> None:
        steps.append((known, now))

    monkeypatch.setattr(timeline_monitor, "follow_timeline", store)
    return steps


def watch(standby: Standby, held_lsn: Lsn) -> TimelineMonitor:
    connection: Any = standby
    bookkeeping: Any = None
    source = SourceMapping("shop", None, Secret(""), ())
    server = replace(SERVER, timeline=1)
    return TimelineMonitor(
        source, server, Branch(1), connection, bookkeeping, FencingToken(1, "", 0, ""), held_lsn
    )


async def test_a_timeline_that_has_everything_is_stored_before_the_attempt_ends(
    stored: list[tuple[int, int]],
) -> None:
    standby = Standby(1)
    looks = watch(standby, FORK)
    await looks.check()
    assert stored == []
    standby.timeline = 2
    with pytest.raises(SourceConnectionError, match="from timeline 1 to 2"):
        await looks.check()
    assert stored == [(1, 2)]


@pytest.mark.parametrize(
    ("history", "held_lsn"), [(HISTORY, Lsn(FORK + 1)), ("", Lsn(1))], ids=["lost", "stranger"]
)
async def test_a_timeline_that_lacks_changes_of_the_target_is_not_stored(
    stored: list[tuple[int, int]], history: str, held_lsn: Lsn
) -> None:
    """The next attempt compares the positions with the fork, and stops."""
    with pytest.raises(SourceConnectionError):
        await watch(Standby(2, history), held_lsn).check()
    assert stored == []


async def test_the_end_of_an_attempt_looks_once_more(stored: list[tuple[int, int]]) -> None:
    running = asyncio.create_task(watch(Standby(2), FORK).run())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert stored == [(1, 2)]
