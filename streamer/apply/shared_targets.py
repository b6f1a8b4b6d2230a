"""Whether two sources would write the same rows of a target table: one judge for `check` and `run`.

Rows of several sources are told apart by the column ``sid`` of their table.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from streamer.apply.plan import ApplyPlan
from streamer.errors import TargetSchemaError
from streamer.mapping.names import RelationName
from streamer.progress.sources import read_writers

if TYPE_CHECKING:
    from streamer.target.connection import TargetConnection


def same_rows(target: RelationName, labels: Iterable[str], *, lacks_sid: bool) -> str:
    """Return the sentence about sources that write the same rows. Pure."""
    reason = ", because it has no column sid" if lacks_sid else ""
    return f"would write the same rows of target table {target}: {' and '.join(labels)}{reason}"


async def refuse_same_rows(connection: "TargetConnection", plan: ApplyPlan, label: str) -> None:
    """Refuse a target table without a sid that a running process fills from another source, too.

    Raises TargetSchemaError.
    """
    if plan.target.has_sid:
        return
    others = await read_writers(connection, str(plan.mapping.target)) - {label}
    if others:
        raise TargetSchemaError(
            "several sources "
            + same_rows(plan.mapping.target, sorted({label, *others}), lacks_sid=True),
            hint="run the statements that `streamer check` prints, or give one of the tables"
            " another `target`; then run `streamer resync` for them",
        )
