"""The options of a resync: the write mode, the rows to copy, and the obstacles to ignore.

The bookkeeping stores the options as JSON until the resync ends. Pure.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Self

from streamer.mapping.rule_options import TableType

SKIP_CHANGES: Final = "--skip-changes"
"""The option of `streamer resync` that skips changes before the snapshot."""


def keeps_deleted_rows(kind: TableType | str) -> bool:
    """Whether a table of this type (append, history) keeps rows that the source deletes.

    After a loss of changes, no copy restores all rows of such a table.
    """
    return TableType(kind) is not TableType.CLONE


def after_loss(kinds: Iterable[TableType | str]) -> tuple[str, ...]:
    """Return the options of `streamer resync` for tables of these types that lost changes."""
    return (SKIP_CHANGES,) if any(map(keeps_deleted_rows, kinds)) else ()


class Mode(enum.StrEnum):
    """The write mode for rows of a clone."""

    RELOAD = "reload"
    """All rows."""
    DIFF = "diff"
    """Rows that differ."""


@dataclass(frozen=True, slots=True)
class KeySet:
    """Rows by their keys. ``columns``: the target's columns, with ``types`` that both sides have;
    ``rows``: the keys, as text.
    """

    columns: tuple[str, ...]
    types: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_json(self) -> dict[str, Any]:
        return {"columns": self.columns, "types": self.types, "rows": self.rows}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:
        rows = tuple(tuple(row) for row in stored["rows"])
        return cls(tuple(stored["columns"]), tuple(stored["types"]), rows)


@dataclass(frozen=True, slots=True)
class DifferingRows:
    """Rows that a comparison has found to differ, as SQL conditions.

    ``source`` names the source's columns, ``target`` the columns of the target's table t.
    ``by_index``: an index finds the rows; otherwise a query reads the whole table.
    """

    source: str
    target: str
    by_index: bool


@dataclass(frozen=True, slots=True)
class RowScope:
    """The rows to which a resync is limited: a row is in scope if any condition or key matches.

    ``conditions``: SQL expressions over the source's columns, which `parse_expression` accepts.
    ``differences``: rows that the copy itself has found to differ; not part of the bookkeeping.
    """

    conditions: tuple[str, ...] = ()
    keys: tuple[KeySet, ...] = ()
    differences: DifferingRows | None = None

    @property
    def reads_all(self) -> bool:
        """Whether a query of these rows reads the whole table."""
        return bool(self.conditions) or (
            self.differences is not None and not self.differences.by_index
        )

    def union(self, addition: "RowScope") -> "RowScope":
        """Return the scope of all rows in *self* or *addition*."""
        return RowScope(
            tuple(dict.fromkeys(self.conditions + addition.conditions)),
            tuple(dict.fromkeys(self.keys + addition.keys)),
        )

    def to_json(self) -> dict[str, Any]:
        return {"where": list(self.conditions), "keys": [keys.to_json() for keys in self.keys]}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:
        return cls(
            tuple(stored.get("where", ())),
            tuple(KeySet.from_json(keys) for keys in stored.get("keys", ())),
        )


@dataclass(frozen=True, slots=True)
class Resync:
    """The options of a resync. ``force``: leave out columns that the target lacks.

    ``scope``: copy only these rows. ``columns``: fill only these columns, by the target's names, of
    existing rows. ``skips_changes``: skip changes before the snapshot, even where rows of the
    target show earlier changes.
    """

    mode: Mode = Mode.RELOAD
    force: bool = False
    scope: RowScope | None = None
    columns: tuple[str, ...] | None = None
    skips_changes: bool = False

    @property
    def is_partial(self) -> bool:
        """Whether only some rows or columns are in scope, so that no change may be dropped."""
        return self.scope is not None or self.columns is not None

    @property
    def compares(self) -> bool:
        """Whether equal rows stay untouched."""
        return self.mode is Mode.DIFF or self.is_partial

    def union(self, addition: "Resync") -> "Resync":
        """Return a resync that fulfils this resync and *addition*."""
        force = self.force or addition.force
        if self.scope is not None and addition.scope is not None:
            return Resync(Mode.DIFF, force, self.scope.union(addition.scope))
        if self.columns is not None and addition.columns is not None:
            columns = tuple(dict.fromkeys(self.columns + addition.columns))
            return Resync(Mode.DIFF, force, columns=columns)
        return Resync(Mode.DIFF, force)

    def to_json(self) -> dict[str, Any]:
        options: dict[str, Any] = {"mode": self.mode.value}
        if self.force:
            options["force"] = True
        if self.scope is not None:
            options["scope"] = self.scope.to_json()
        if self.columns is not None:
            options["columns"] = list(self.columns)
        if self.skips_changes:
            options["skip_changes"] = True
        return options

    @classmethod
    def from_json(cls, options: dict[str, Any] | None) -> Self:
        options = options or {}
        scope, columns = options.get("scope"), options.get("columns")
        return cls(
            Mode(options.get("mode", Mode.RELOAD)),
            bool(options.get("force", False)),
            None if scope is None else RowScope.from_json(scope),
            None if columns is None else tuple(columns),
            bool(options.get("skip_changes", False)),
        )
