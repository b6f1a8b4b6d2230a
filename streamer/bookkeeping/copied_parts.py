"""The rows of streamer.sync_partition: the ledger of the parts of copies.

Tasks finish their parts themselves (`streamer.bookkeeping.task_statements`). While a task copies a
part, it holds a lock on the part's row. Attempt number 0 marks a withdrawn part.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final

from streamer.bookkeeping.bookkeeping_table import BookkeepingTable, Codec, Executor


@dataclass(frozen=True, slots=True)
class PartRecord:
    """A part that a task copied, or that failed with ``kind`` and ``error``.

    ``constraint``: the constraint or unique index of the target that refuses a row.
    """

    relation_id: int
    part: int
    rows_copied: int | None
    bytes_copied: int | None
    kind: Annotated[str | None, Codec("p.failure")]
    error: str | None
    constraint: Annotated[str | None, Codec("p.failed_constraint")] = None
    started_at: datetime | None = None
    finished_at: datetime | None = None


PARTS: Final = BookkeepingTable("sync_partition", "p", PartRecord)
_COLUMNS: Final = ("relation_id", "part", "attempt", "description", "size_bytes")
_WITHDRAW_SQL: Final = """
with free as (
    select relation_id, part from streamer.sync_partition
    where relation_id = $1 and attempt > 0 and finished_at is null for update skip locked
)
update streamer.sync_partition p set attempt = 0
from free where p.relation_id = free.relation_id and p.part = free.part
"""
_IS_WRITTEN_SQL: Final = """
select exists (select from streamer.sync_partition
               where relation_id = $1 and attempt > 0 and finished_at is null)
"""
_SPEED_SQL: Final = """
select sum(p.bytes_copied)::float8
       / greatest(extract(epoch from max(p.finished_at) - min(p.started_at)), 1)::float8 as speed
from streamer.sync_partition p
where p.finished_at is not null and p.started_at is not null
having sum(p.bytes_copied) > 10000000
"""
SUMMARY_SQL: Final = """
select r.source, count(*) as parts, count(p.finished_at) as finished,
       max(p.finished_at) as last_finished_at, min(p.error) as error
from streamer.sync_partition p join streamer.relation r on r.id = p.relation_id
group by 1
"""


async def add_parts(session: Executor, parts: Iterable[Any]) -> None:
    """Add parts (`streamer.copy.parts.ctid_ranges.CopyPart`) to the ledger."""
    await PARTS.insert(session, ({name: getattr(p, name) for name in _COLUMNS} for p in parts))


async def remove_parts(session: Executor, relation_ids: Sequence[int]) -> None:
    """Remove the parts of relations whose copies begin again.

    The statement waits until each task that holds the row of its part commits or ends.
    """
    await PARTS.delete(session, "where relation_id = any ($1::int8[])", relation_ids)


async def read_ended_parts(session: Executor, relation_ids: Sequence[int]) -> list[PartRecord]:
    """Return the copied parts of relations, and failed parts that end the copy of a table."""
    return await PARTS.read(
        session,
        "where relation_id = any ($1::int8[])"
        " and attempt > 0 and (finished_at is not null or failure is not null)",
        relation_ids,
    )


async def withdraw_parts(session: Executor, relation_id: int) -> bool:
    """Withdraw the parts that no task writes; return whether these were all parts."""
    await session.execute(_WITHDRAW_SQL, relation_id)
    return not await session.fetch_value(_IS_WRITTEN_SQL, relation_id)


async def read_copy_speed(session: Executor) -> float | None:
    """Return the speed of the last copies, in bytes per second; None without earlier copies."""
    speed = await session.fetch_value(_SPEED_SQL)
    return float(speed) if speed else None
