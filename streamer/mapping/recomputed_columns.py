"""Finds the columns whose values in existing rows become wrong with a changed `set`. Pure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamer.mapping.rules import RelationMapping


@dataclass(frozen=True, slots=True)
class Recomputed:
    """``columns``: the columns of the target. ``sources``: columns of the source that the target
    stores unchanged again, because no expression replaces them any more.
    """

    columns: tuple[str, ...]
    sources: tuple[str, ...]


def recomputed(
    former: str | None, mapping: RelationMapping, names: Sequence[str]
) -> Recomputed | None:
    """Return the columns that the rule of *mapping* computes differently than *former* says.

    *former*: `TableRule.expressions_fingerprint` of the rule that filled the rows. *names*: the
    source's columns. Return None if the filters differ, because different rows then belong to the
    target. Return None also if the hashes differ, because no server can compute a hash.
    """
    old, new = _read(former), _read(mapping.rule.expressions_fingerprint)
    if old["filter"] != new["filter"] or old.get("hash") != new.get("hash"):
        return None
    removed = old["set"].keys() - new["set"].keys()
    plain = {
        target: name
        for name in names
        if (target := mapping.target_column(name)) in removed and target
    }
    changed = [
        name
        for name, expression in new["set"].items()
        # For a value that the source does not send, the stream reads the target's column. While
        # that column has the result of the old expression, all expressions may read that result.
        if plain or old["set"].get(name) != expression
    ]
    return Recomputed((*changed, *plain), tuple(plain.values()))


def _read(mark: str | None) -> dict[str, Any]:
    return {"filter": None, "set": {}} if mark is None else dict(json.loads(mark))
