"""Ranges of keys and their SQL."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from streamer.compare.compared_table import cut_pages
from streamer.compare.cut_ranges import (
    BUCKET_ROWS,
    BUCKETS_MAX,
    PAGES_BYTES,
    PARTS_MAX,
    RANGE_ROWS,
    RANGES_MAX,
    WHOLE_SECONDS_MAX,
    count_buckets,
    count_page_parts,
    count_page_readers,
    count_parts,
    count_ranges,
    cut_ranges,
    join_buckets,
    sampled_percent,
    split_range,
    whole_rate,
)
from streamer.compare.row_hashes import HashKind, choose_hash
from streamer.postgres.key_ranges import KeyRange, join_ranges, range_sql


def test_ranges_cover_all_keys_and_touch_each_other() -> None:
    keys = [("1", "a"), ("1", "a"), ("2", "b")]
    parts = split_range(KeyRange(), keys)
    assert [part.lower for part in parts] == [None, ("1", "a"), ("2", "b")]
    assert [part.upper for part in parts] == [("1", "a"), ("2", "b"), None]


@given(st.lists(st.integers(0, 99)).map(sorted), st.integers(1, 9))
def test_ranges_and_their_parts_cover_all_keys(numbers: list[int], parts: int) -> None:
    keys = [(str(number),) for number in numbers]
    ranges = cut_ranges(keys, parts)
    assert all(len(split_range(*cut)) <= parts for cut in ranges)
    bounds = [part for cut in ranges for part in split_range(*cut)]
    assert [part.lower for part in bounds] == [None, *sorted(set(keys), key=keys.index)]
    assert [part.upper for part in bounds] == [*sorted(set(keys), key=keys.index), None]


def test_a_range_of_equal_keys_stays_whole() -> None:
    unit = KeyRange(("1",), ("2",))
    assert split_range(unit, [("1",), ("1",)]) == [unit]


def test_conditions_quote_values_and_name_their_types() -> None:
    sql = range_sql(KeyRange(("1", "o'c"), None), ["b.v1", "b.v2"], ["integer", "uuid"])
    assert sql == "(b.v1, b.v2) >= ('1'::integer, 'o''c'::uuid)"
    assert range_sql(KeyRange(), ["b.v1"], ["integer"]) == "true"


def test_a_limit_on_the_rate_draws_no_statement_out_for_longer_than_its_snapshot_may_live() -> None:
    assert whole_rate(None, 4) is None
    assert whole_rate(1000.0, 4) == 1000.0
    assert whole_rate(10.0, 65_536) == 65_536 * BUCKET_ROWS / WHOLE_SECONDS_MAX


def test_the_number_of_ranges_is_bounded_and_follows_the_rate() -> None:
    assert count_ranges(0, None) == 1
    assert count_ranges(RANGE_ROWS * 10, None) == 10
    assert count_ranges(10**12, None) == RANGES_MAX
    assert count_ranges(1000, 10.0) == 20
    assert [count_parts(rows) for rows in (0, 2000, 2001)] == [1, 1, 2]
    assert count_parts(10**9) == PARTS_MAX


def test_buckets_are_a_power_of_two() -> None:
    assert [count_buckets(n) for n in (0, 1000, 1001, 5000, 10**12)] == [1, 1, 2, 8, BUCKETS_MAX]


def test_fast_hashes_need_the_same_bytes_and_the_same_answers() -> None:
    same = (["1"], ["1"])
    assert choose_hash(("UTF8", "UTF8"), same) is HashKind.BINARY
    assert choose_hash(("LATIN1", "LATIN1"), same) is HashKind.LOOKUP
    assert choose_hash(("SQL_ASCII", "UTF8"), same) is HashKind.LOOKUP
    assert choose_hash(("LATIN1", "UTF8"), same) is HashKind.MD5
    assert choose_hash(("UTF8", "UTF8"), (["1"], ["2"])) is HashKind.MD5
    assert choose_hash(("UTF8", "UTF8"), (None, None)) is HashKind.MD5


def test_ranges_without_a_gap_between_them_are_joined() -> None:
    a, b, c, d, e = (KeyRange((x,), (y,)) for x, y in ("12", "23", "45", "56", "89"))
    assert set(join_ranges([d, b, a, c, e])) == {
        KeyRange(("1",), ("3",)),
        KeyRange(("4",), ("6",)),
        e,
    }
    first, last = KeyRange(None, ("1",)), KeyRange(("9",), None)
    assert join_ranges([last, first, KeyRange(("1",), ("9",))]) == [KeyRange()]
    assert join_ranges([]) == []


@given(st.sets(st.integers(0, 63)), st.integers(1, 70))
def test_joined_buckets_hold_all_hashes_of_the_buckets_that_they_join(
    numbers: set[int], limit: int
) -> None:
    count, joined = join_buckets(64, numbers, limit)
    assert len(joined) <= limit
    assert {h & (count - 1) for h in range(1024) if h & 63 in numbers} == set(joined)


def test_a_sample_has_rows_and_pages_enough_for_each_range() -> None:
    narrow = sampled_percent(rows=300_000, pages=1330, ranges=6, parts=1)
    assert 1330 * narrow / 100 >= 6 * 16
    wide = sampled_percent(rows=300_000, pages=300_000, ranges=6, parts=1)
    assert 300_000 * wide / 100 >= 6 * 50
    many_parts = sampled_percent(rows=300_000, pages=300_000, ranges=6, parts=50)
    assert 300_000 * many_parts / 100 >= 6 * 50 * 2
    assert sampled_percent(rows=10, pages=1, ranges=6, parts=1) == 100


@given(st.integers(0, 10**9), st.integers(0, 10**15), st.integers(0, 10**12), st.floats(0.1, 10**6))
def test_parts_of_pages_are_bounded(pages: int, size: int, rows: int, rate: float) -> None:
    count = count_page_parts(pages, size, rows, rate)
    assert 1 <= count <= max(1, min(pages, RANGES_MAX))
    assert count_page_parts(pages, size, rows, None) <= count


@given(st.integers(1, 10**6), st.integers(0, 10**12), st.sampled_from([13_00_00, 14_00_00]))
def test_parts_of_pages_leave_no_page_out(pages: int, size: int, version: int) -> None:
    parts = cut_pages(pages, size, version, 0, None)
    assert parts[0].first == 0
    assert all(one.end == other.first for one, other in pairwise(parts))
    assert parts[-1].end in (None, pages)


@given(st.lists(st.sampled_from([1, PAGES_BYTES, 10 * PAGES_BYTES])), st.integers(1, 64))
def test_page_readers_at_most_double_the_statements(sizes: list[int], jobs: int) -> None:
    count, more = count_page_readers(sizes, jobs)
    assert count >= 1
    assert 0 <= more < jobs
    assert count == jobs or sum(size > PAGES_BYTES for size in sizes) > 1
