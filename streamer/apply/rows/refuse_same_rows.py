"""Refuses rows of a target table that two running sources would write."""

from typing import TYPE_CHECKING

from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.bookkeeping.sources import read_writers
from streamer.errors.error_classes import TargetSchemaError
from streamer.mapping.shared_targets import TableWriter, find_clashes

if TYPE_CHECKING:
    from streamer.target.connection import TargetConnection


async def refuse_same_rows(connection: "TargetConnection", plan: ApplyPlan, label: str) -> None:
    """Refuse rows of a target table that a running process writes from another source.

    Raises TargetSchemaError.
    """
    name, lacks_sid = plan.mapping.target, not plan.target.has_sid
    (stored,) = await read_writers(connection, [(name, plan.sid)], any_sid=lacks_sid)
    writer = TableWriter(label, plan.sid, plan.mapping.rule.is_disjoint)
    writers = [writer, *(present for present in stored if present.label != label)]
    for clash in find_clashes(name, writers, lacks_sid=lacks_sid):
        if label in clash.labels:
            first = "run the statements that `streamer check` prints" if lacks_sid else ""
            raise TargetSchemaError(
                clash.message,
                hint=f"{first or clash.hint}; then run `streamer resync` for the tables",
            )
