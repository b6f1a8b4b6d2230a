"""Processes exchange the history of their sources through the target."""

import asyncio
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from streamer.admin.live import minute_exchange
from streamer.admin.live.minute_series import COARSE_SECONDS, FINE_SECONDS, KEPT_SECONDS
from streamer.admin.live.source_history import SourceHistory
from streamer.bookkeeping.minutes import Minute
from streamer.errors.error_classes import TargetConnectionError
from streamer.observability.metrics import Metrics

START = 1_800_000_000
"""The beginning of a minute."""
LABELS = ["shop", "other"]


class Target:
    """The table of minutes, and whether the target answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[tuple[int, str], Minute] = {}
        self.is_away = False
        self.statements = 0
        monkeypatch.setattr(minute_exchange, "add_minutes", self.add)
        monkeypatch.setattr(minute_exchange, "read_minutes", self.read)

    async def add(self, _: object, minutes: Sequence[Minute], kept_seconds: float) -> None:
        self._answer()
        new = {(minute.at, minute.source): minute for minute in minutes}
        assert len(new) == len(minutes), "PostgreSQL upserts a row once in a statement"
        self.rows |= new

    async def read(self, _: object, since: float, until: float) -> list[Minute]:
        self._answer()
        return [row for (at, _), row in self.rows.items() if since <= at < until]

    def _answer(self) -> None:
        self.statements += 1
        if self.is_away:
            raise TargetConnectionError("no answer")


class OneProcess:
    """A process with two mapped sources that runs those in ``runs``; each source has two changes a
    second.
    """

    def __init__(self, clock: "Clock", *runs: str) -> None:
        self.clock = clock
        self.runs = set(runs)
        self.applied: dict[str, int] = {}
        metrics = Metrics()
        metrics.changes_of_sources = self.applied
        engine: Any = SimpleNamespace(bookkeeping=object(), metrics=metrics)
        engine.supervisors = [self._supervisor(label) for label in LABELS]
        self.history = SourceHistory(engine, lambda: LABELS, clock)
        clock.processes.append(self)

    def _supervisor(self, label: str) -> Any:
        process = self

        class Fake:
            source = SimpleNamespace(label=label)
            pipeline = SimpleNamespace(lag_seconds=lambda: 0.25)
            retained_wal_bytes = 7

            @property
            def runs_elsewhere(self) -> bool:
                return label not in process.runs

        return Fake()

    async def turn(self) -> None:
        self.history.sample()
        for label in self.runs:
            self.applied[label] = self.applied.get(label, 0) + 2 * FINE_SECONDS

    def times(self, label: str = "shop") -> list[float]:
        """Return the times of known rates."""
        columns = self.history.columns(label)
        pairs = zip(columns["times"], columns["changes_per_second"], strict=True)
        return [float(at or 0) for at, rate in pairs if rate is not None]

    def has_hole(self, label: str = "shop") -> bool:
        return None in self.history.columns(label)["lag_seconds"]


class Clock:
    """Lets all processes sample each 10 s, store after the end of a minute, and then read."""

    def __init__(self) -> None:
        self.now = float(START)
        self.processes: list[OneProcess] = []

    def __call__(self) -> float:
        return self.now

    async def run(self, seconds: int) -> None:
        for _ in range(seconds // FINE_SECONDS):
            for process in self.processes:
                await process.turn()
            if self.now % COARSE_SECONDS == 0:
                for act in ("store", "read"):
                    for process in self.processes:
                        try:
                            await getattr(process.history.exchange, act)()
                        except TargetConnectionError:
                            continue
            self.now += FINE_SECONDS


def are_increasing(times: list[float]) -> bool:
    return times == sorted(set(times))


async def test_a_page_shows_the_sources_of_other_processes_by_the_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, clock = Target(monkeypatch), Clock()
    first, second = OneProcess(clock, "shop"), OneProcess(clock, "other")
    await clock.run(600)
    assert {source for _, source in target.rows} == {"shop", "other"}
    for process, foreign in ((first, "other"), (second, "shop")):
        assert process.times(foreign) == [START + 60 * minute for minute in range(9)]
        assert process.history.spark(foreign)
    before = target.statements
    await clock.run(60)
    assert target.statements - before <= 6, "two statements a process and minute, three for a part"


async def test_a_source_that_moves_and_comes_back_keeps_a_history_without_hole_or_double_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, clock = Target(monkeypatch), Clock()
    first, second = OneProcess(clock, "shop"), OneProcess(clock)
    for runner, other in ((second, first), (first, second)):
        await clock.run(320)  # the source moves within a minute
        other.runs.discard("shop")
        runner.runs.add("shop")
    await clock.run(300)
    for process in (first, second):
        times = process.times()
        assert are_increasing(times)
        assert not process.has_hole()
        known = [at for at in times if START + 60 < at < clock.now - 120]
        gaps = [after - at for at, after in itertools.pairwise(known)]
        assert max(gaps) <= COARSE_SECONDS
        rates = process.history.columns("shop")["changes_per_second"]
        assert {rate for rate in rates if rate is not None} == {2.0}
    # AND a process that begins later has the whole history, and answers with newer minutes only
    third = OneProcess(clock)
    await third.history.exchange.read()
    assert third.times() == sorted({at for at, source in target.rows if source == "shop"})
    assert third.history.columns("shop", START + 600)["times"][0] == START + 660


async def test_minutes_wait_in_memory_for_a_target_that_is_away_at_most_a_day(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, clock = Target(monkeypatch), Clock()
    first, second = OneProcess(clock, "shop"), OneProcess(clock)
    await clock.run(120)
    target.is_away = True
    await clock.run(3600)
    assert len(first.times()) > 300, "the process itself has them"
    target.is_away = False
    await clock.run(180)
    assert len(target.rows) == 64
    assert len(second.times()) == 64
    target.is_away = True
    minutes = [Minute(START + 60 * n, "shop", (1.0, 1.0, 1.0)) for n in range(3000)]
    for minute in minutes:
        clock.now = minute.at
        first.history.exchange.enqueue([minute])
    assert len(first.history.exchange._waiting) <= KEPT_SECONDS // COARSE_SECONDS + 1


async def test_a_clock_that_is_set_back_costs_no_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    target, clock = Target(monkeypatch), Clock()
    process = OneProcess(clock, "shop")
    await clock.run(600)
    target.is_away = True
    await clock.run(120)
    clock.now -= 70
    await clock.run(190)
    target.is_away = False
    await clock.run(300)
    assert [at for at, _ in sorted(target.rows)] == [START + 60 * minute for minute in range(18)]
    assert not process.has_hole()


async def test_the_exchange_goes_on_beside_the_samples_after_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, clock = Target(monkeypatch), Clock()
    target.rows[START, "shop"] = Minute(START, "shop", (1.0, 2.0, 3.0))
    target.is_away = True
    process = OneProcess(clock)
    own = Minute(START - 60, "other", (1.0, 2.0, 3.0))
    process.history._series.merge([own], START)
    process.history.exchange.enqueue([own])
    slept: list[float] = []
    done = asyncio.Event()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now += seconds
        if len(slept) == 3:
            target.is_away = False
        if process.times() and own in target.rows.values():
            done.set()
            await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "sleep", sleep)
    running = asyncio.create_task(process.history.exchange.run())
    await asyncio.wait_for(done.wait(), 30)
    running.cancel()
    await asyncio.wait([running])
    assert slept == [1.0, 24.0, 36.0, 24.0, 36.0]
