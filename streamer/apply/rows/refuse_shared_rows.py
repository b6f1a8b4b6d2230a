"""Refuses a table whose rows in the target a second running source writes, too."""

from typing import TYPE_CHECKING

from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.bookkeeping.sources import read_writers
from streamer.errors.error_classes import TargetSchemaError
from streamer.errors.remedies import Remedy, at_target
from streamer.mapping.shared_targets import TableWriter, find_clashes

if TYPE_CHECKING:
    from streamer.target.connection import TargetConnection


async def refuse_shared_rows(connection: "TargetConnection", plan: ApplyPlan, label: str) -> None:
    """Refuse *plan* if a running process writes rows of the plan's target from a different source.

    *label*: the source of the plan. Raises TargetSchemaError.
    """
    name, lacks_sid = plan.mapping.target, not plan.target.has_sid
    (stored,) = await read_writers(connection, [(name, plan.sid)], any_sid=lacks_sid)
    others = [present for present in stored if present.label != label]
    writer = TableWriter(label, plan.sid, plan.mapping.rule.is_disjoint)
    for clash in find_clashes(name, [writer, *others], lacks_sid=lacks_sid):
        if label not in clash.labels:
            continue
        remedy = Remedy.of(clash.hint)
        sids = {label: plan.mapping.sid} | {present.label: present.sid for present in others}
        if lacks_sid and len({sids[source] for source in clash.labels}) > 1:
            sql = at_target(*plan.target.add_sid_sql(sids[clash.labels[0]]))
            remedy = Remedy.of(
                "run at the target: ", sql, "; or give one of the tables another `target`"
            )
        raise TargetSchemaError(
            clash.message, hint=Remedy.of(remedy, "; then run `streamer resync` for the tables")
        )
