"""A process among replicas: how it judges peers, and how long it waits for peers."""

import dataclasses
import os
import socket
import subprocess
from datetime import UTC, datetime
from typing import Any

import pytest

from streamer.bookkeeping.replicas import FleetRecord, ReplicaRecord
from streamer.mapping.rules import SourceMapping
from streamer.postgres.secret import Secret
from streamer.runtime.replicas import replica as replica_module
from streamer.runtime.replicas.replica import (
    FOLLOW_SECONDS,
    FROZEN_CHECKS,
    FROZEN_SECONDS,
    Replica,
    may_return,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def record(
    number: int = 2, *, beat: int = 1, is_alive: bool = True, name: str = "host:2"
) -> ReplicaRecord:
    sources: frozenset[str] = frozenset()
    return ReplicaRecord(
        number,
        name,
        100,
        "0.1.0",
        None,
        sources,
        None,
        False,
        sources,
        sources,
        None,
        None,
        None,
        beat,
        NOW,
        NOW,
        is_alive,
    )


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(replica_module, "time", made)
    return made


def make() -> Any:
    nothing: Any = None
    return Replica(nothing, nothing, list, lambda error: None, nothing)


def test_a_replica_without_beats_is_frozen_after_a_while(clock: Clock) -> None:
    replica = make()
    for second in range(int(FROZEN_SECONDS)):
        clock.seconds = 1000.0 + second
        assert replica._find_frozen([record()]) == []
    clock.seconds = 1000.0 + FROZEN_SECONDS
    assert [each.number for each in replica._find_frozen([record()])] == [2]


def test_a_beat_begins_the_time_anew(clock: Clock) -> None:
    replica = make()
    for second in range(3 * int(FROZEN_SECONDS)):
        clock.seconds = 1000.0 + second
        assert replica._find_frozen([record(beat=second // 9)]) == []


def test_a_replica_that_could_not_read_the_fleet_judges_no_peer(clock: Clock) -> None:
    replica = make()
    assert replica._find_frozen([record()]) == []
    for look in range(FROZEN_CHECKS - 1):
        clock.seconds += 10 * FROZEN_SECONDS  # the target was away
        assert replica._find_frozen([record()]) == [], look
    assert replica._find_frozen([record()]) != []


def test_a_replica_that_lost_its_session_is_waited_for() -> None:
    here = f"{socket.gethostname()}:{os.getpid()}"
    assert may_return([record(is_alive=False)], here)
    assert not may_return([record(is_alive=True)], here)
    assert not may_return([record(is_alive=False, name=here)], here)


def test_a_dead_process_of_this_machine_is_not_waited_for() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead = record(is_alive=False, name=f"{socket.gethostname()}:{ended.pid}")
    assert not may_return([dead], "here:1")


async def test_a_source_that_answers_again_is_no_longer_left_to_others() -> None:
    class Source:
        source = SourceMapping("shop", None, Secret(""), ())
        is_assigned, is_out_of_reach, is_there = True, True, False

        async def answers(self) -> bool:
            return self.is_there

    source: Any = Source()
    replica = make()
    assert replica._find_unreached([source]) == ["shop"]
    source.is_assigned = False
    await replica._connect([source])
    assert replica._find_unreached([source]) == ["shop"]
    source.is_there = True
    await replica._connect([source])
    assert replica._find_unreached([source]) == []
    # A replica that reaches the source again, as no peer could, reports so at once.
    source.is_assigned = True
    assert replica._find_unreached([source]) == ["shop"]
    source.is_out_of_reach = False
    assert replica._find_unreached([source]) == []


async def test_free_sources_go_past_a_replica_that_keeps_another_mapping(clock: Clock) -> None:
    replica = make()
    replica._number = 1
    labels = frozenset({"shop:a"})
    others = [
        dataclasses.replace(record(number), sources=labels, mapping=mapping)
        for number, mapping in ((1, "new"), (2, "old"))
    ]
    fleet = FleetRecord(others, {}, ["new", "old"])
    replica._update_fleet(fleet)
    assert [member.has_newest_mapping for member in replica._members] == [True, False]
    assert replica._find_refused(clock.seconds) == set(), "it may be about to read the new mapping"
    clock.seconds += FOLLOW_SECONDS
    replica._update_fleet(fleet)
    assert replica._find_refused(clock.seconds) == {(2, "shop:a")}
