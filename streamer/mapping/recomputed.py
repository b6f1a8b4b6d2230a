"""The columns whose values in existing rows another `set` makes wrong. Pure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamer.mapping.rules import RelationMapping


@dataclass(frozen=True, slots=True)
class Recomputed:
    """``columns``: those of the target. ``sources``: columns of the source that the target gets as
    they are again, because no expression takes their place any more.
    """

    columns: tuple[str, ...]
    sources: tuple[str, ...]


def recomputed(
    before: str | None, mapping: RelationMapping, names: Sequence[str]
) -> Recomputed | None:
    """Return the columns that the rule of *mapping* computes otherwise than *before* says.

    *before*: `TableRule.expressions_mark` of the rule that filled the rows. *names*: the source's
    columns. None if the filters differ: then other rows belong to the target. None if the hashes
    differ, too: a hash is nothing that either server could compute.
    """
    old, new = _read(before), _read(mapping.rule.expressions_mark)
    if old["filter"] != new["filter"] or old.get("hash") != new.get("hash"):
        return None
    gone = old["set"].keys() - new["set"].keys()
    plain = {
        there: name for name in names if (there := mapping.target_column(name)) in gone and there
    }
    changed = [
        name
        for name, expression in new["set"].items()
        # The stream takes a value that the source does not send from the target's column. While
        # that holds the result of the old expression, every other expression may read it.
        if plain or old["set"].get(name) != expression
    ]
    return Recomputed((*changed, *plain), tuple(plain.values()))


def _read(mark: str | None) -> dict[str, Any]:
    return {"filter": None, "set": {}} if mark is None else dict(json.loads(mark))
