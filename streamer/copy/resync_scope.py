"""The rows to which a resync is limited, as conditions of both sides. Pure.

A condition of an operator names columns of the source. The target evaluates the condition over its
columns under the source's names. A row that matches the condition only at the target may have
changed at the source. `RowSwap.orphan_keys_sql` finds the keys of such rows, and the copy reads the
rows with these keys at the source, too. So afterwards all rows that match on either side are equal.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from streamer.control.resync_options import KeySet, Mode, Resync, RowScope
from streamer.errors.error_classes import MappingError, SyncError
from streamer.mapping.expressions import (
    Expression,
    ExpressionError,
    over_columns,
    parse_expression,
)
from streamer.mapping.rules import RelationMapping
from streamer.postgres.quoting import quote_identifier, quote_literal

if TYPE_CHECKING:
    from streamer.schema.source_definition import DefinedColumn
    from streamer.schema.target_relation import TargetRelation

KEYS_MAX: Final = 5000
"""The maximum number of keys in a statement."""


def parse_condition(text: str) -> Expression:
    """Read a condition of a scope. Raises MappingError."""
    try:
        return parse_expression(text)
    except ExpressionError as exc:
        raise MappingError(f"where: {exc}") from None


def parse_resync(
    mode: Mode,
    *,
    force: bool,
    where: str | None,
    columns: Sequence[str] | None,
    skips_changes: bool = False,
) -> Resync:
    """Return the resync that an operator requests on the command line, the API or the page.

    *where*: the condition for rows. *columns*: the columns to fill, by the target's names. Raises
    MappingError if the options do not fit together, or the condition is not an expression.
    """
    if where is not None and columns is not None:
        raise MappingError("where: a resync is limited to rows or to columns, not to both")
    if columns is not None and not all(columns):
        raise MappingError("columns: expected the names of columns of the target")
    if skips_changes and (where is not None or columns is not None):
        raise MappingError("skip_changes: a resync of some rows or columns skips no change")
    scope = None if where is None else RowScope((parse_condition(where).text,))
    names = None if columns is None else tuple(columns)
    return Resync(mode, force, scope, names, skips_changes)


def read_names(text: str) -> tuple[str, ...]:
    """Read names that commas separate, with double quotes around a name that contains a comma.

    Raises MappingError.
    """
    try:
        return tuple(next(csv.reader([text], skipinitialspace=True), ()))
    except csv.Error as exc:
        raise MappingError(f"columns: {exc}") from None


def unchanged_columns(
    columns: "Iterable[DefinedColumn]", mapping: RelationMapping, target: "TargetRelation"
) -> dict[str, str]:
    """Return the source's columns whose values the target stores unchanged, by the target's
    names.
    """
    names: dict[str, str] = {}
    for column in columns:
        name = mapping.target_column(column.name)
        present = target.columns.get(name) if name is not None else None
        if name is None or present is None or mapping.is_computed(name):
            continue
        if column.type in (present.type, present.base_type):
            names[column.name] = name
    return names


def check_conditions(
    scope: RowScope, at_target: Mapping[str, str], mapping: RelationMapping
) -> list[Expression]:
    """Return the conditions of *scope*; *at_target* comes from `unchanged_columns`.

    Raises MappingError if the target cannot evaluate a condition.
    """
    conditions = [parse_condition(text) for text in scope.conditions]
    for condition in conditions:
        if unknown := condition.unknown(at_target):
            raise MappingError(
                f'the condition uses column "{unknown[0]}", and target table "{mapping.target}" '
                "does not store the source's values of this column",
                hint=f"use these: {', '.join(sorted(at_target))}; or resync the whole table",
            )
    return conditions


def check_copy_where(
    condition: Expression, at_target: Mapping[str, str], mapping: RelationMapping
) -> None:
    """Refuse a `copy_where` that the target cannot evaluate. Raises MappingError."""
    if unknown := condition.unknown(at_target):
        raise MappingError(
            f'copy_where of table "{mapping.source}" uses column "{unknown[0]}", and target '
            f'table "{mapping.target}" does not store the source\'s values of this column',
            hint=f"use these: {', '.join(sorted(at_target))}",
        )


def source_condition(scope: RowScope, mapping: RelationMapping, columns: Sequence[str]) -> str:
    """Return the condition for the scope's rows at the source. *columns*: the names of the source's
    columns.

    Raises SyncError if a key names a column that the mapping no longer has.
    """
    names = {mapping.target_column(name): name for name in columns}
    conditions = [f"({text})" for text in scope.conditions]

    def quoted(keys: KeySet) -> list[str]:
        missing = [name for name in keys.columns if name not in names]
        if missing:
            raise SyncError(f'column "{missing[0]}" of the key is no longer mapped')
        return [quote_identifier(names[name]) for name in keys.columns]

    conditions += [key_condition(quoted(keys), keys) for keys in scope.keys]
    if scope.differences is not None:
        conditions.append(f"({scope.differences.source})")
    return " or ".join(conditions) or "false"


def target_condition(
    scope: RowScope, conditions: Iterable[Expression], at_target: Mapping[str, str]
) -> str:
    """Return the condition for the scope's rows of the target, which statements call t."""
    conditions_sql = [over_columns(condition, at_target, "t") for condition in conditions]
    for keys in scope.keys:
        quoted = [f"t.{quote_identifier(name)}" for name in keys.columns]
        conditions_sql.append(key_condition(quoted, keys))
    if scope.differences is not None:
        conditions_sql.append(f"({scope.differences.target})")
    return f"({' or '.join(conditions_sql) or 'false'})"


def key_condition(names: Sequence[str], keys: KeySet) -> str:
    """Return the condition for rows with one of *keys*; *names*: the SQL of the key's columns."""
    rows = ", ".join(
        "("
        + ", ".join(
            f"{quote_literal(value)}::{kind}" for value, kind in zip(row, keys.types, strict=True)
        )
        + ")"
        for row in keys.rows
    )
    return f"({', '.join(names)}) in (values {rows})" if keys.rows else "false"


def cut_keys(keys: KeySet) -> Iterator[KeySet]:
    """Yield *keys* in pieces of at most `KEYS_MAX`."""
    for first in range(0, len(keys.rows), KEYS_MAX):
        yield KeySet(keys.columns, keys.types, keys.rows[first : first + KEYS_MAX])
