"""Ranges of keys, as text, and their conditions. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from streamer.postgres.quoting import quote_literal

Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Keys from ``lower`` on and before ``upper``; None for no bound."""

    lower: Key | None = None
    upper: Key | None = None


def range_sql(unit: KeyRange, names: Sequence[str], types: Sequence[str]) -> str:
    """Return the condition for keys in a range; *names* are the SQL of the key columns."""
    bounds = ((">=", unit.lower), ("<", unit.upper))
    conditions = [
        f"({', '.join(names)}) {operator} ({_constants(key, types)})"
        for operator, key in bounds
        if key is not None
    ]
    return " and ".join(conditions) or "true"


def _constants(key: Key, types: Sequence[str]) -> str:
    return ", ".join(
        f"{quote_literal(value)}::{kind}" for value, kind in zip(key, types, strict=True)
    )


def join_ranges(ranges: Iterable[KeyRange]) -> list[KeyRange]:
    """Join adjacent ranges without a gap; no two ranges overlap."""
    by_lower = {unit.lower: unit for unit in ranges}
    follows = {unit.upper for unit in by_lower.values() if unit.upper is not None}
    joined: list[KeyRange] = []
    for first in by_lower.values():
        if first.lower is not None and first.lower in follows:
            continue
        last = first
        while last.upper is not None and last.upper in by_lower:
            last = by_lower[last.upper]
        joined.append(KeyRange(first.lower, last.upper))
    return joined
