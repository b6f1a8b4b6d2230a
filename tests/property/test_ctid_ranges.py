"""The parts of a table cover every page once, later pages included. Groups of parts need few tasks,
in the order of the tables.
"""

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.copy.parts.ctid_ranges import (
    PART_BYTES,
    PARTS_MAX,
    TASK_BYTES_MIN,
    TASK_PARTS_MAX,
    CopyPart,
    CopySource,
    Heap,
    cut,
    group,
    task_rate,
)

PAGE_BYTES = 8192
MEGABYTE = 1024 * 1024

heaps = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 400)), min_size=1, max_size=4).map(
    lambda sizes: tuple(
        Heap(f'"public"."t{n}"', (pages + toast_pages) * PAGE_BYTES, pages)
        for n, (pages, toast_pages) in enumerate(sizes)
    )
)


def copy_source(heaps: tuple[Heap, ...], *, can_split: bool = True) -> CopySource:
    return CopySource(7, 3, "id, name", None, ("t", "id, name"), False, heaps, can_split)


def pages(part: CopyPart) -> tuple[int, int | None]:
    """Which pages a part reads: from, and to before; None if there is no end."""
    first = re.search(r"ctid >= '\((\d+),0\)'::tid", part.copy_out)
    last = re.search(r"ctid < '\((\d+),0\)'::tid", part.copy_out)
    return int(first[1]) if first else 0, int(last[1]) if last else None


@given(heaps, st.integers(PAGE_BYTES, 10 * PAGE_BYTES))
def test_parts_cover_every_page_once(heaps: tuple[Heap, ...], part_bytes: int) -> None:
    parts = cut(copy_source(heaps), part_bytes=part_bytes)
    assert [part.part for part in parts] == list(range(len(parts)))
    for heap in heaps:
        ranges = [pages(part) for part in parts if f"from {heap.relation_sql}" in part.copy_out]
        if not heap.page_count and (heap != heaps[0] or any(h.page_count for h in heaps)):
            assert ranges == []
            continue
        assert ranges[0][0] == 0
        assert ranges[-1][1] is None
        for (_, end), (begin, _) in itertools.pairwise(ranges):
            assert end == begin
        assert all(begin < heap.page_count for begin, _ in ranges[1:])
        assert all(end is None or end > begin for begin, end in ranges)
        assert len(ranges) == max(1, min(-(-heap.size_bytes // part_bytes), heap.page_count))


@given(heaps)
def test_a_table_that_cannot_be_split_is_one_part_for_each_heap(heaps: tuple[Heap, ...]) -> None:
    parts = cut(copy_source(heaps, can_split=False), part_bytes=PAGE_BYTES)
    assert len(parts) == max(1, sum(heap.page_count > 0 for heap in heaps))
    assert all("where" not in part.copy_out for part in parts)


def one_heap(megabytes: int, *, pages: int | None = None) -> Heap:
    size = megabytes * MEGABYTE
    return Heap("t", size, size // PAGE_BYTES if pages is None else pages)


def test_a_table_with_most_bytes_in_toast_is_cut_by_its_whole_size() -> None:
    """10 GB in 100 pages: eighty tasks, not a single task."""
    parts = cut(copy_source((one_heap(10 * 1024, pages=100),)))
    assert len(parts) == 10 * 1024 * MEGABYTE // PART_BYTES == 80
    assert {part.size_bytes for part in parts} == {PART_BYTES}
    assert {(end or 100) - begin for begin, end in map(pages, parts)} == {1, 2}


def test_a_huge_table_has_larger_parts_instead_of_ever_more() -> None:
    parts = cut(copy_source((one_heap(100 * 1024 * 1024),)))
    assert len(parts) == PARTS_MAX


def test_a_schema_of_all_sizes_needs_few_tasks_and_begins_with_the_smallest() -> None:
    """A huge table, a table whose bulk is TOAST, 500 small tables, and 1000 partitions, of which
    999 are empty.
    """
    huge = cut(replace(copy_source((one_heap(2048),)), relation_id=1))
    toasted = cut(replace(copy_source((one_heap(512, pages=300),)), relation_id=2))
    empty = Heap("leaf", 8192, 0)
    partitions = cut(
        replace(copy_source((empty,) * 999 + (one_heap(1),)), relation_id=3),
    )
    small = [
        part
        for n in range(500)
        for part in cut(replace(copy_source((Heap("s", 8192, n % 2),)), relation_id=10 + n))
    ]
    assert [len(parts) for parts in (huge, toasted, partitions, small)] == [16, 4, 1, 500]
    sizes = {1: 2048 * MEGABYTE, 2: 512 * MEGABYTE, 3: MEGABYTE}
    ranks = {part.relation_id: (0, sizes.get(part.relation_id, 8192)) for part in small}
    ranks |= {number: (0, size) for number, size in sizes.items()}
    tasks = group([*huge, *partitions, *toasted, *small], ranks)
    assert len(tasks) == 16 + 4 + 11
    assert [part.relation_id for task in tasks[11:] for part in task] == [2] * 4 + [1] * 16
    assert tasks[10][-1].relation_id == 3
    # WHEN the huge table has a higher priority
    ranks[1] = (-1, sizes[1])
    tasks = group([*huge, *partitions, *toasted, *small], ranks)
    assert [task[0].relation_id for task in tasks[:16]] == [1] * 16


@given(st.lists(st.integers(0, 2 * TASK_BYTES_MIN), max_size=120))
def test_every_part_is_in_one_task_and_no_task_is_overlong(sizes: list[int]) -> None:
    parts = [
        CopyPart(1, 1, n, "", "", "", "", "", size, "", "", (), (), "")
        for n, size in enumerate(sizes)
    ]
    tasks = group(parts, {1: (0, 0)})
    assert sorted(part.part for task in tasks for part in task) == list(range(len(parts)))
    assert all(0 < len(task) <= TASK_PARTS_MAX for task in tasks)
    totals = [sum(part.size_bytes for part in task) for task in tasks]
    assert all(
        len(task) == 1 or total < 2 * TASK_BYTES_MIN
        for task, total in zip(tasks, totals, strict=True)
    )
    small = [
        t
        for task, t in zip(tasks, totals, strict=True)
        if t < TASK_BYTES_MIN and len(task) < TASK_PARTS_MAX
    ]
    assert len(small) <= 1, "what is left over is one task"


@given(st.floats(1, 1e6), st.integers(1, 64), st.integers(1, 200))
def test_tasks_that_run_at_a_time_use_the_whole_limit_and_no_more(
    limit: float, jobs: int, task_count: int
) -> None:
    share = task_rate(limit, jobs, task_count)
    assert share is not None
    assert share * min(jobs, task_count) == pytest.approx(limit)
    assert task_rate(None, jobs, task_count) is None
