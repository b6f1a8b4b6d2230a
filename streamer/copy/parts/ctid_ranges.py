"""Divides the copy of relations into parts, and groups parts into Spark tasks.

A part is a range of a table's pages, read with a TID range scan. Before PostgreSQL 14 a table is a
single part, because each range would read the whole table. The number of parts follows from the
size of the table with its TOAST table, because few pages may refer to gigabytes. Parts of a table
can run at the same time. Small tables share a task, because each task opens two connections. Tasks
follow the order of the relations: small tables first, so that few tables wait for large tables.
Pure.
"""

from dataclasses import dataclass, field
from typing import Any, Final

PART_BYTES: Final = 128 * 1024 * 1024
"""A part takes about ten seconds: long enough for a task, and short enough to repeat after a
failure.
"""
PARTS_MAX: Final = 4096
"""The maximum number of parts of a heap, because each part is a row of the ledger and a Spark task.
Larger heaps have larger parts.
"""
TASK_BYTES_MIN: Final = 16 * 1024 * 1024
TASK_PARTS_MAX: Final = 50


@dataclass(frozen=True, slots=True)
class Heap:
    """A table with storage: a plain table, or a leaf of a partitioned table.

    ``size_bytes`` includes the TOAST table, ``page_count`` does not. ``stores``: OID and filenode
    of each table to read, as planned. ``numbers``: the numbers of the columns, in the order of
    `CopySource.columns`. ``row_count``: an estimate from the statistics; 0 if there are none.
    ``named``: the table's name, quoted, and the OID of the table of that name.
    """

    relation_sql: str
    size_bytes: int
    page_count: int
    stores: tuple[tuple[int, int], ...] = ()
    numbers: tuple[int, ...] = ()
    row_count: int = 0
    named: tuple[str, int] = ("", 0)


@dataclass(frozen=True, slots=True)
class CopyPart:
    """A unit of work, small and free of secrets.

    ``lock``: the lock that keeps the table unchanged during the COPY. ``stores``, ``numbers`` and
    ``named``: storage, columns and name at the time of the plan, see `Heap`; ``probe``: a query
    without rows whose columns have these numbers.

    ``types_out`` and ``types_in``: queries without rows whose columns show the types on both sides,
    which must be equal. Empty in text format, where types do not matter.
    """

    relation_id: int
    attempt: int
    part: int
    description: str
    copy_out: str
    copy_in: str
    types_out: str
    types_in: str
    size_bytes: int
    lock: str
    probe: str
    stores: tuple[tuple[int, int], ...]
    numbers: tuple[int, ...]
    locate: str
    """A query that returns the ctid of each row of the part, and the row."""
    named: tuple[str, int] = ("", 0)
    hashes: tuple[tuple[int, str], ...] = ()
    """Fields whose values the task hashes, with the check of each field's key."""
    expressions: tuple[str, ...] = ()
    """The settings with an expression that the source evaluates for each row."""

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class CopySource:
    """The common fields of a relation's parts: see `cut`. ``into``: the target table and the list
    of columns, as SQL.
    """

    relation_id: int
    attempt: int
    select_list: str
    condition: str | None
    into: tuple[str, str]
    binary: bool
    heaps: tuple[Heap, ...]
    can_split: bool
    columns: str = ""
    """All columns of the source's table: expressions may use columns that the copy leaves out."""
    names: tuple[str, ...] = ()
    """The columns of the target that the copy writes."""
    hashes: tuple[tuple[int, str], ...] = ()
    """Fields of `names` that the copy hashes, with the check of each field's key."""
    expressions: tuple[str, ...] = ()
    """The settings with an expression in the query, for the error of a row."""


def cut(source: CopySource, *, part_bytes: int = PART_BYTES) -> list[CopyPart]:
    """Cut a relation into at least one part. A heap without pages needs no part, because every row
    of the snapshot is on a page by now.
    """
    parts: list[CopyPart] = []
    for heap in [heap for heap in source.heaps if heap.page_count] or source.heaps[:1]:
        count = 1
        if source.can_split:
            part_count = min(-(-heap.size_bytes // part_bytes), PARTS_MAX)
            count = max(1, min(part_count, heap.page_count))
        for number in range(count):
            first = number * heap.page_count // count
            last = (number + 1) * heap.page_count // count
            # The last range is open: the table may have grown since its measurement.
            conditions = [] if source.condition is None else [f"({source.condition})"]
            if number > 0:
                conditions.append(f"ctid >= '({first},0)'::tid")
            if number < count - 1:
                conditions.append(f"ctid < '({last},0)'::tid")
            where = f" where {' and '.join(conditions)}" if conditions else ""
            rows = f"{source.select_list} from {heap.relation_sql}{where}"
            query = f"select {rows}"
            options = "format binary" if source.binary else "format text"
            table, columns = source.into
            listed = f" ({columns})" if columns else ""
            parts.append(
                CopyPart(
                    relation_id=source.relation_id,
                    attempt=source.attempt,
                    part=len(parts),
                    description=f"{heap.relation_sql} {number + 1}/{count}",
                    copy_out=f"copy ({query}) to stdout ({options})",
                    copy_in=f"copy {table}{listed} from stdin ({options})",
                    types_out=f"{query} limit 0" if source.binary else "",
                    types_in=f"select {columns} from {table} limit 0" if source.binary else "",
                    size_bytes=heap.size_bytes // count,
                    lock=f"lock table {heap.relation_sql} in access share mode",
                    probe=f"select {source.columns} from {heap.relation_sql} limit 0",
                    stores=heap.stores,
                    numbers=heap.numbers,
                    locate=f"select ctid, {rows}" if source.select_list else "",
                    named=heap.named,
                    hashes=source.hashes,
                    expressions=source.expressions,
                )
            )
    return parts


@dataclass(slots=True)
class _Task:
    parts: list[CopyPart] = field(default_factory=list)
    size_bytes: int = 0


def group(parts: list[CopyPart], ranks: dict[int, tuple[int, int]]) -> list[list[CopyPart]]:
    """Group parts into tasks, in the order of their relations' *ranks*; small parts share a task.

    *ranks*: the ranks by relation id. The parts of the last and largest table are small, so no long
    task delays the end.
    """
    tasks: list[_Task] = []
    small = _Task()
    for part in sorted(parts, key=lambda p: (ranks[p.relation_id], p.relation_id, p.part)):
        if part.size_bytes >= TASK_BYTES_MIN:
            tasks.append(_Task([part], part.size_bytes))
            continue
        if not small.parts:
            tasks.append(small)  # at the position of its first part
        small.parts.append(part)
        small.size_bytes += part.size_bytes
        if small.size_bytes >= TASK_BYTES_MIN or len(small.parts) >= TASK_PARTS_MAX:
            small = _Task()
    return [task.parts for task in tasks]


def task_rate(rows_per_second: float | None, jobs: int, task_count: int) -> float | None:
    """Return a task's share of a limit, by the number of tasks that run at a time."""
    if rows_per_second is None:
        return None
    return rows_per_second / max(1, min(jobs, task_count))
