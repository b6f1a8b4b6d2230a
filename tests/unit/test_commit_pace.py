"""When a worker commits: at once, but not too often, and late for a backlog."""

from dataclasses import dataclass
from functools import partial

import pytest

from streamer.apply.write.commit_pace import CommitPace

KILOBYTE = 1024


@dataclass
class Facts:
    change_count: int
    size: int
    relation_count: int
    row_count: int


def pace(*, began_at: float = 100.0, commit_seconds: float = 0.004) -> CommitPace:
    return CommitPace(0.012, 0.2, began_at, commit_seconds)


def seconds_left(
    pace: CommitPace,
    now: float,
    *,
    opened_at: float,
    changes: int = 1,
    size: int = 100,
    relations: int = 1,
    rows: int | None = None,
    is_growing: bool = True,
) -> float:
    facts = Facts(changes, size, relations, changes if rows is None else rows)
    left = pace.seconds_left(now, opened_at, facts, is_growing=is_growing)
    return round(left, 6)


def test_the_first_change_is_committed_at_once() -> None:
    assert seconds_left(CommitPace(0.012, 0.2), 5.0, opened_at=5.0) == 0


def test_a_change_long_after_the_last_commit_is_committed_at_once() -> None:
    assert seconds_left(pace(), 100.5, opened_at=100.5) == 0


def test_commits_begin_the_least_interval_apart() -> None:
    assert seconds_left(pace(), 100.005, opened_at=100.003) == 0.007
    assert seconds_left(pace(), 100.012, opened_at=100.003) == 0


def test_a_commit_that_took_long_is_followed_at_once() -> None:
    long = pace(commit_seconds=0.05)
    assert seconds_left(long, 100.05, opened_at=100.001, changes=900) == 0


@pytest.mark.parametrize("interval_max", [0.0, 0.001])
def test_no_change_waits_longer_than_the_interval(interval_max: float) -> None:
    hasty = CommitPace(1.0, interval_max, 100.0, 0.001)
    assert seconds_left(hasty, 100.002, opened_at=100.002) == interval_max
    assert seconds_left(hasty, 100.002 + interval_max, opened_at=100.002) == 0


@pytest.mark.parametrize(("changes", "size"), [(5000, 100), (10, 1024 * KILOBYTE)])
def test_a_small_window_of_a_backlog_gathers_until_it_is_old(changes: int, size: int) -> None:
    slow = pace(commit_seconds=0.015)
    assert seconds_left(slow, 100.03, opened_at=100.001, changes=changes, size=size) == 0.015
    slowest = pace(commit_seconds=0.5)
    assert seconds_left(slowest, 100.03, opened_at=100.001, changes=changes, size=size) == 0.02
    changes, size = changes * 10, size * 10
    of_many = partial(seconds_left, slow, changes=changes, size=size, relations=100)
    assert of_many(100.19, opened_at=100.001) == 0.011
    assert of_many(100.201, opened_at=100.001) == 0


@pytest.mark.parametrize(("changes", "size"), [(9000, 100), (10, 1700 * KILOBYTE)])
def test_a_window_that_is_worth_a_commit_does_not_wait_for_more(changes: int, size: int) -> None:
    assert seconds_left(pace(), 100.03, opened_at=100.001, changes=changes, size=size) == 0


def test_a_window_that_folds_its_changes_waits_for_more() -> None:
    folds = partial(seconds_left, pace(), changes=9000, rows=1000)
    assert folds(100.03, opened_at=100.001) == 0.004
    assert folds(100.201, opened_at=100.001) == 0


def test_each_relation_of_a_window_has_to_be_worth_its_statements() -> None:
    assert seconds_left(pace(), 100.03, opened_at=100.001, changes=20_000, relations=13) == 0.004
    assert seconds_left(pace(), 100.03, opened_at=100.001, changes=20_000, relations=12) == 0


def test_a_backlog_that_has_ended_is_committed_like_anything_else() -> None:
    assert seconds_left(pace(), 100.03, opened_at=100.001, changes=5000, is_growing=False) == 0


def test_a_large_transaction_is_no_backlog_for_long() -> None:
    """The transactions arrive in a single burst: the worker checks once for more."""
    assert seconds_left(CommitPace(0.012, 0.2), 5.0, opened_at=5.0, changes=500) == 0.002
    assert (
        seconds_left(CommitPace(0.012, 0.2), 5.002, opened_at=5.0, changes=500, is_growing=False)
        == 0
    )
