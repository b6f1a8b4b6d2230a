"""When a backlog is bad, when a journal is valid, and the speed of copies meanwhile."""

import itertools
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from streamer.commands.check.findings import Place
from streamer.commands.check.source_findings import check_backlog
from streamer.config.size_setting import parse_size
from streamer.copy.parts.part_copier import Pace
from streamer.mapping.rule_options import OnMaxRetainedWal
from streamer.runtime.wal_retention.backlog_level import Level, level_of, limit_of
from streamer.runtime.wal_retention.journaling import Verdict, judge
from streamer.source.slot_and_publications.retained_wal import RetainedWal
from streamer.util.lsn import Lsn
from tests.unit.build import source_mapping


@pytest.mark.parametrize(
    ("ratio", "before", "level"),
    [
        (0.0, Level.OK, Level.OK),
        (0.5, Level.OK, Level.WARNING),
        (0.45, Level.OK, Level.OK),
        (0.45, Level.WARNING, Level.WARNING),
        (0.39, Level.WARNING, Level.OK),
        (0.8, Level.WARNING, Level.THROTTLED),
        (0.75, Level.THROTTLED, Level.THROTTLED),
        (0.69, Level.THROTTLED, Level.WARNING),
        (1.0, Level.OK, Level.OVER),
        (0.95, Level.OVER, Level.OVER),
        (0.85, Level.OVER, Level.THROTTLED),
        (0.1, Level.OVER, Level.OK),
    ],
)
def test_levels_are_left_below_where_they_begin(ratio: float, before: Level, level: Level) -> None:
    assert level_of(ratio, before) is level


def test_a_journal_is_read_exactly_if_it_leaves_no_hole() -> None:
    """Compared with sets of positions: those of the target, of the journal and of the slot."""
    for acknowledged, start, end, confirmed in itertools.product(range(1, 6), repeat=4):
        if end < start:
            continue
        has = set(range(1, acknowledged))
        by_journal = set(range(start, end))
        by_slot = set(range(confirmed, 10))
        everything = set(range(1, 10))
        verdict = judge(Lsn(acknowledged), Lsn(start), Lsn(end), Lsn(confirmed))
        # The slot is read from the journal's end, so it must still be able to begin there.
        is_whole = has | by_journal >= set(range(1, end)) and by_slot >= set(range(end, 10))
        match verdict:
            case Verdict.READ:
                assert is_whole
            case Verdict.NOT_NEEDED:
                assert has | by_slot >= everything
            case Verdict.HOLE:
                assert not is_whole or start > acknowledged
                assert not has | by_slot >= everything


def test_a_target_that_has_nothing_begins_with_the_journal() -> None:
    assert judge(Lsn(0), Lsn(5), Lsn(9), Lsn(8)) is Verdict.READ
    assert judge(Lsn(0), Lsn(5), Lsn(9), Lsn(10)) is Verdict.HOLE


@pytest.mark.parametrize(
    ("limit", "kept", "policy", "expected"),
    [
        (None, None, OnMaxRetainedWal.SPOOL, None),
        (None, 700, OnMaxRetainedWal.SPOOL, 350),
        (100, 700, OnMaxRetainedWal.SPOOL, 100),
        (500, 700, OnMaxRetainedWal.SPOOL, 350),
        (500, None, OnMaxRetainedWal.SPOOL, 500),
        (None, 0, OnMaxRetainedWal.SPOOL, 1),
        (None, 700, OnMaxRetainedWal.WARN, None),
        (500, 700, OnMaxRetainedWal.WARN, 500),
        (500, 700, OnMaxRetainedWal.DROP, 500),
    ],
)
def test_a_journal_begins_at_half_of_the_servers_limit_at_the_latest(
    limit: int | None, kept: int | None, policy: OnMaxRetainedWal, expected: int | None
) -> None:
    """All sizes in megabytes."""

    def size(megabytes: int | None) -> int | None:
        return None if megabytes is None else megabytes << 20

    source = replace(
        source_mapping(), max_retained_wal_bytes=size(limit), on_max_retained_wal=policy
    )
    assert limit_of(source, RetainedWal(0, 0, True, size(kept))) == size(expected)
    assert limit_of(source, None) == size(limit), "without a slot"


@pytest.mark.parametrize(
    ("text", "size"), [("10GB", 10 << 30), (" 16 MB ", 16 << 20), ("1kB", 1024), ("7", 7)]
)
def test_sizes_are_written_as_postgresql_writes_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["10gb", "1.5GB", "-1MB", "GB", "", "10 Gb", "1_000"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        parse_size(text)


def test_a_throttled_copy_takes_four_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = 0.0

    def sleep(seconds: float) -> None:
        nonlocal slept
        slept += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    pace = Pace(None)
    pace.begin(is_throttled=True)
    for worked in (1.0, 2.0, 3.0):
        pace.wait(1000, worked + slept)
    assert slept == pytest.approx(9.0)
    pace.begin(is_throttled=False)
    slept = 0.0
    pace.wait(1000, 1.0)
    assert slept == 0


@pytest.mark.parametrize(
    ("limits", "seconds"),
    [
        ((None, None, None), 0),
        ((100.0, None, None), 20),  # two rounds share the limit of their source
        ((None, 100.0, None), 50),  # five tasks share the totals
        ((None, None, 1000.0), 30),
        ((100.0, 1000.0, 1000.0), 30),
    ],
)
def test_the_strictest_limit_paces_a_part(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[float | None, ...], seconds: float
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    pace = Pace(*limits)
    pace.begin(is_throttled=False, rounds=2)
    pace.share(5)
    pace.share(3)  # the part began with more tasks
    pace.wait(1000, 0.0, 6000)
    assert sum(slept) == seconds


@pytest.mark.parametrize(
    ("limit", "kept", "policy", "is_pointless"),
    [
        (64 << 20, "64", OnMaxRetainedWal.WARN, True),
        (63 << 20, "64", OnMaxRetainedWal.WARN, False),
        (64 << 20, "64", OnMaxRetainedWal.DROP, True),
        (64 << 20, "64", OnMaxRetainedWal.SPOOL, False),
        (1 << 40, "-1", OnMaxRetainedWal.WARN, False),
        (None, "64", OnMaxRetainedWal.WARN, False),
        (1 << 20, "0", OnMaxRetainedWal.WARN, True),
    ],
)
def test_check_reports_a_limit_that_the_server_never_lets_a_slot_reach(
    limit: int | None, kept: str, policy: OnMaxRetainedWal, is_pointless: bool
) -> None:
    server: Any = SimpleNamespace(settings={"max_slot_wal_keep_size": kept})
    source = replace(source_mapping(), max_retained_wal_bytes=limit, on_max_retained_wal=policy)
    assert bool(list(check_backlog(Place("shop"), server, source))) is is_pointless
