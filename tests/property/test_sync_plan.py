"""Cut into parts, a table is read once, every page of it, also the pages that come later."""

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from streamer.sync.plan import (
    PAGE_BYTES,
    TASK_BYTES_MIN,
    TASK_PARTS_MAX,
    CopyPart,
    CopySource,
    Heap,
    cut,
    group,
)

heaps = st.lists(st.integers(0, 40 * PAGE_BYTES), min_size=1, max_size=4).map(
    lambda sizes: tuple(Heap(f'"public"."t{n}"', size) for n, size in enumerate(sizes))
)


def copy_source(heaps: tuple[Heap, ...], *, can_split: bool = True) -> CopySource:
    return CopySource(
        7, 3, "id, name", None, "copy t (id, name) from stdin", False, heaps, can_split
    )


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
        assert ranges[0][0] == 0
        assert ranges[-1][1] is None
        for (_, end), (begin, _) in itertools.pairwise(ranges):
            assert end == begin
        assert all(end is None or end > begin for begin, end in ranges)
        assert len(ranges) == max(1, -(-heap.size_bytes // part_bytes))


@given(heaps)
def test_a_table_that_cannot_be_split_is_one_part_for_each_heap(heaps: tuple[Heap, ...]) -> None:
    parts = cut(copy_source(heaps, can_split=False), part_bytes=PAGE_BYTES)
    assert len(parts) == len(heaps)
    assert all("where" not in part.copy_out for part in parts)


@given(st.lists(st.integers(0, 2 * TASK_BYTES_MIN), max_size=120))
def test_every_part_is_in_one_task_and_no_task_is_overlong(sizes: list[int]) -> None:
    parts = [CopyPart(1, 1, n, "", "", "", size) for n, size in enumerate(sizes)]
    tasks = group(parts)
    assert sorted(part.part for task in tasks for part in task) == list(range(len(parts)))
    assert all(0 < len(task) <= TASK_PARTS_MAX for task in tasks)
    totals = [sum(part.size_bytes for part in task) for task in tasks]
    assert totals == sorted(totals, reverse=True)
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
