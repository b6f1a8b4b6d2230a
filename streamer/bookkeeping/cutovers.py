"""The rows of streamer.cutover: the progress of the cut-over of a source.

A command stores a step before the work of the step begins. So after a kill of the command, the row
still names the interrupted step, and the next command repeats that step.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Final

from streamer.bookkeeping.bookkeeping_table import BookkeepingTable, Codec, Executor
from streamer.util.lsn import Lsn


@dataclass(frozen=True, slots=True)
class CutoverRecord:
    """A row of streamer.cutover. ``details``: facts for undoing the cut-over, and its options.

    ``marker_lsn``: the end of the source's WAL after all writes at the source were blocked.
    """

    source_id: int
    step: str
    details: dict[str, Any]
    marker_lsn: Lsn | None
    is_finished: Annotated[bool, Codec("c.finished_at is not null")]


CUTOVERS: Final = BookkeepingTable("cutover", "c", CutoverRecord)


async def read_cutover(session: Executor, source_id: int) -> CutoverRecord | None:
    """Return the cut-over of a source, if any."""
    return await CUTOVERS.find(session, "where source_id = $1", source_id)


async def store_step(session: Executor, source_id: int, step: str, details: dict[str, Any]) -> None:
    """Store the step whose work is about to begin, and the facts to undo the step."""
    row = {"source_id": source_id, "step": step, "details": details}
    await CUTOVERS.put(session, [row], "source_id")


async def store_marker(session: Executor, source_id: int, lsn: Lsn) -> None:
    await CUTOVERS.update(session, {"marker_lsn": lsn}, "where source_id = $2", source_id)


async def finish_cutover(session: Executor, source_id: int) -> None:
    """Record that applications may write to the target, which makes the cut-over final."""
    await session.execute(
        "update streamer.cutover set finished_at = pg_catalog.clock_timestamp()"
        " where source_id = $1",
        source_id,
    )


async def forget_cutover(session: Executor, source_id: int) -> None:
    await CUTOVERS.delete(session, "where source_id = $1", source_id)


async def is_cutting_over(session: Executor, source_id: int) -> bool:
    """Return whether sequences of the target have exact values, or are about to get exact
    values.
    """
    return await read_cutover(session, source_id) is not None
