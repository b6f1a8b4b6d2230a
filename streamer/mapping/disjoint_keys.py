"""Which rules can have `keys: disjoint`. Pure.

Several tables then write one target table without a sid, and the user promises that no two tables
contain the same key. A row enters the target only by an INSERT, which fails if a second table has
already written the key. From then on the key identifies the row of its table. So the target must
contain all rows of each table.
"""

from dataclasses import dataclass
from typing import Final

from streamer.mapping.rule_options import Initial, OnDelete, OnError, TableType
from streamer.mapping.rules import TableRule


@dataclass(frozen=True, slots=True)
class Unfit:
    """A *setting* of a rule that `keys: disjoint` excludes."""

    setting: str
    problem: str
    hint: str


def describe_unguarded(source: str, target: str) -> str:
    """Return why a copy cannot compare the rows of *source* with the rows of *target*.

    After ATTACH PARTITION, for instance, the source has rows that the stream never inserted into
    the target. A row of a second table may have the key of such a row, and the copy would change
    that row.
    """
    return (
        f'"{source}" has rows that came without an INSERT, so a second table with target '
        f'"{target}" may have rows with equal keys'
    )


def find_unfit(rule: TableRule) -> Unfit | None:
    """Return the first setting of *rule* that `keys: disjoint` excludes, if any."""
    if not rule.is_disjoint:
        return None
    lacks = "the target would lack rows whose keys must reject rows of other tables"
    unfit = {
        "sid": (rule.sid is not None, "a sid distinguishes the rows already"),
        "type": (rule.type is not TableType.CLONE, _TYPES.get(rule.type, "")),
        "filter": (rule.filter is not None, lacks),
        "copy_where": (rule.copy_where is not None, lacks),
        "initial": (rule.initial is not Initial.COPY, lacks),
        "truncate_target": (rule.truncate_target, "the remaining tables would lose their rows"),
        "on_delete": (
            rule.on_delete is OnDelete.MARK,
            "a row marked as deleted still occupies its key",
        ),
        "on_error": (
            rule.on_error is OnError.QUARANTINE,
            "a later change of a dropped row could reach a row of a second table",
        ),
    }
    for setting, (is_set, reason) in unfit.items():
        if is_set:
            problem = f"`keys: disjoint` excludes this setting: {reason}"
            return Unfit(setting, problem, _hint(setting))
    return None


_TYPES: Final = {
    TableType.APPEND: "a deleted row keeps its key, which would stop or replace a later row",
    TableType.HISTORY: "a key has many versions there, so no key could refuse a second table",
}
"""Why a table of the type cannot share its target by keys."""


def _hint(setting: str) -> str:
    if setting == "on_error":
        return "set `on_error: stop` for this table"
    return f"remove `{setting}`, or remove `keys` and give the rows a sid"
