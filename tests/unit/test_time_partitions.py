"""Intervals of time partitions: they cover time without gaps, and names fit."""

import itertools
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.mapping.relation_names import NAME_BYTES_MAX, RelationName
from streamer.mapping.rule_options import Interval
from streamer.mapping.sid_and_history_columns import HISTORY_OPEN
from streamer.mapping.time_partitions import (
    INTERVALS_AHEAD,
    PartitionBy,
    default_partition,
    format_bound,
    interval_partition,
    is_time,
    named_beginning,
)

MOMENTS = st.datetimes(
    datetime(1900, 1, 1), datetime(2200, 1, 1), timezones=st.just(timezone(timedelta(hours=-7)))
)


@given(MOMENTS, st.sampled_from(Interval), st.integers(1, 50))
def test_the_bounds_follow_one_another_and_include_the_present(
    now: datetime, interval: Interval, keep: int
) -> None:
    rule = PartitionBy("at", interval, keep)
    bounds = rule.bounds(now)
    assert len(bounds) == keep + 1 + INTERVALS_AHEAD
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(bounds))
    start, end = bounds[keep]
    assert start <= now < end
    assert bounds[0][0] == rule.kept_since(now)
    assert start.astimezone(UTC).hour == 0


def test_open_versions_have_a_partition_that_stays() -> None:
    rule = PartitionBy("kvsz_end", Interval.YEAR, 1, is_of_versions=True)
    start, stop = rule.bounds(datetime(2024, 2, 29, tzinfo=UTC))[-1]
    assert format_bound(start) in HISTORY_OPEN
    assert format_bound(start) < format_bound(stop)


@pytest.mark.parametrize(
    ("interval", "start"),
    [
        (Interval.DAY, "2024-02-29"),
        (Interval.WEEK, "2024-02-26"),
        (Interval.MONTH, "2024-02-01"),
        (Interval.YEAR, "2024-01-01"),
    ],
)
def test_an_interval_begins_by_the_calendar(interval: Interval, start: str) -> None:
    rule = PartitionBy("at", interval, 1)
    leap = datetime(2024, 2, 29, 23, 59, tzinfo=UTC)
    assert str(rule.start_of(rule.number_at(leap)).date()) == start


@pytest.mark.parametrize("name", ["t", "a" * 63, "ü" * 31])
def test_names_of_partitions_fit_and_differ(name: str) -> None:
    table, other = RelationName("public", name), RelationName("other", name)
    start = datetime(2024, 2, 1, tzinfo=UTC)
    names = [interval_partition(table, start).name, default_partition(table).name]
    assert all(len(name.encode()) <= NAME_BYTES_MAX for name in names)
    assert named_beginning(names[0]) == start
    assert named_beginning(names[1]) is None
    assert len(name) == 1 or interval_partition(other, start).name != names[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("date", True),
        ("timestamp without time zone", True),
        ("timestamp(3) with time zone", True),
        ("time without time zone", False),
        ("integer", False),
    ],
)
def test_types_with_a_time(name: str, expected: bool) -> None:
    assert is_time(name) is expected
