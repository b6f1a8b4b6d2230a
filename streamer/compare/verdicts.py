"""Verdicts about keys, and the sum for each table. Pure.

Each Spark task or thread counts verdicts in separate `Findings`, which the caller merges.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple, Self

from streamer.compare.compared_table import ComparedTable

SAMPLE_ROWS: Final = 10
"""The number of keys of a table that the result shows."""
ERROR: Final = "error"
"""The kind of a verdict about a failed reading of a table; its key is the message."""
UNDECIDED: Final = "undecided"


class KeyVerdict(NamedTuple):
    """The judgement of a key: numbers of rows, columns that differ, values of both sides as JSON,
    and the position of the source.
    """

    relation: int
    key: str
    kind: str
    missing: int = 0
    extra: int = 0
    different: int = 0
    columns: list[str] = []  # noqa: RUF012  # no verdict changes the list
    source: str | None = None
    target: str | None = None
    lsn: str = "0/0"


def verdict_fields(table: ComparedTable, verdict: KeyVerdict) -> dict[str, Any]:
    """Return a verdict as JSON fields: kind, differing columns, and key and values by column."""
    values = json.loads(verdict.key)
    entry: dict[str, Any] = {
        "key": dict(zip(table.key_columns, values, strict=True)),
        "kind": verdict.kind,
        "columns": verdict.columns,
    }
    for side, rows in (("source", verdict.source), ("target", verdict.target)):
        if rows is not None:
            entry[side] = json.loads(rows)
    return entry


@dataclass(slots=True)
class TableFinding:
    """The row counts, sample and error of a table. ``keys``: the keys of all differing rows; None
    if too many or not needed.
    """

    rows_source: int = 0
    rows_target: int = 0
    missing: int = 0
    extra: int = 0
    different: int = 0
    undecided: int = 0
    error: str | None = None
    sample: list[KeyVerdict] = field(default_factory=list)
    keys: list[str] | None = None

    @classmethod
    def of(cls, verdict: KeyVerdict) -> Self:
        if verdict.kind == ERROR:
            return cls(error=verdict.key, keys=[])
        is_undecided = verdict.kind == UNDECIDED
        return cls(
            missing=verdict.missing,
            extra=verdict.extra,
            different=verdict.different,
            undecided=int(is_undecided),
            sample=[verdict],
            keys=[] if is_undecided else [verdict.key],
        )

    def add(self, finding: "TableFinding", keys_max: int) -> None:
        for name in ("rows_source", "rows_target", "missing", "extra", "different", "undecided"):
            setattr(self, name, getattr(self, name) + getattr(finding, name))
        self.error = self.error or finding.error
        if finding.sample:
            sample = sorted([*self.sample, *finding.sample], key=lambda v: (v.kind, v.key))
            self.sample = sample[:SAMPLE_ROWS]
        if self.keys is not None and finding.keys is not None:
            self.keys += finding.keys
        if finding.keys is None or len(self.keys or ()) > keys_max:
            self.keys = None


class Findings:
    """The findings of all tables so far."""

    def __init__(self, tables: Mapping[int, ComparedTable], keys_max: int) -> None:
        self._tables = tables
        self._keys_max = keys_max
        self.by_table: dict[int, TableFinding] = {}
        """The findings of tables; tables without a finding are missing."""

    def get(self, relation_id: int) -> TableFinding:
        if relation_id not in self.by_table:
            table = self._tables[relation_id]
            has_keys = self._keys_max and table.key and table.key_types
            self.by_table[relation_id] = TableFinding(keys=[] if has_keys else None)
        return self.by_table[relation_id]

    def fail(self, relation_id: int, error: str) -> None:
        finding = self.get(relation_id)
        finding.error = finding.error or error

    def add(self, verdict: KeyVerdict) -> None:
        self.get(verdict.relation).add(TableFinding.of(verdict), self._keys_max)

    def merge(self, by_table: Mapping[int, TableFinding]) -> None:
        """Add the findings of a task or thread."""
        for relation_id, finding in by_table.items():
            self.get(relation_id).add(finding, self._keys_max)

    def results(self) -> list[dict[str, Any]]:
        """Return a result for each table."""
        results = []
        for relation_id, table in self._tables.items():
            finding = self.get(relation_id)
            result = {column.name: getattr(finding, column.name) for column in fields(TableFinding)}
            result["sample"] = [verdict_fields(table, verdict) for verdict in finding.sample]
            result["keys"] = [json.loads(key) for key in finding.keys or ()] or None
            results.append({"relation_id": relation_id} | result)
        return results
