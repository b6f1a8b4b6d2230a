"""The columns of a target table for a source's table, and their SQL. Pure.

`desired_columns` is the definition of a new table, and `at_target` the rule for one column.

Publications omit generated columns, so the target computes the values. Virtual columns
(PostgreSQL 18) are stored columns at the target. Other values come from the source, so a new table
needs no default and no identity.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from streamer.errors.error_classes import TargetSchemaError
from streamer.mapping.rule_options import METADATA_TYPES, TableType
from streamer.mapping.rules import RelationMapping, TableRule
from streamer.mapping.sid_and_history_columns import (
    HISTORY_BEGIN,
    HISTORY_OPEN,
    SID,
    HistoryColumns,
)
from streamer.postgres.quoting import quote_columns, quote_identifier
from streamer.schema.columns_in_expressions import (
    AbsentColumnError,
    UnclearExpressionError,
    over_columns,
)
from streamer.schema.source_definition import ColumnChange, DefinedColumn

IDENTITIES: Final = {"a": "always", "d": "by default"}
_HISTORY_DEFAULTS: Final = (HISTORY_BEGIN, HISTORY_OPEN, "false")
NO_CHANGES: Final[Mapping[str, ColumnChange]] = MappingProxyType({})


def desired_columns(
    columns: Sequence[DefinedColumn],
    mapping: RelationMapping,
    *,
    key: Collection[str] = (),
    has_sid: bool = False,
    computed_types: Mapping[str, str],
) -> list[DefinedColumn]:
    """Return the columns of a new target table for a source's table with *columns*.

    *key*: the source's columns that identify its rows. *computed_types*: the types of `set`, by
    target column. Raises TargetSchemaError for a generated column that the target cannot compute.
    """
    desired = [DefinedColumn(0, SID, "text", not_null=True)] if has_sid else []
    names = names_at_target([column.name for column in columns], mapping, key=key)
    for column in columns:
        name = mapping.own_column(column.name, key=key)
        if name is not None:
            plain = DefinedColumn(
                column.number, name, column.type, column.not_null, collation=column.collation
            )
            if column.generated:
                text = generation_expression(column, names, mapping)
                plain = replace(plain, generated="s", default=text)
            desired.append(at_target(plain, mapping, name))
    desired += [DefinedColumn(0, name, METADATA_TYPES[k]) for k, name in mapping.rule.metadata]
    desired += [
        DefinedColumn(0, name, computed_types.get(name, "text")) for name, _ in mapping.rule.set
    ]
    if mapping.type is not TableType.HISTORY:
        return desired
    refuse_names_of_history(mapping, [column.name for column in desired])
    return desired + history_columns(mapping.rule.history)


def refuse_names_of_history(mapping: RelationMapping, names: Iterable[str]) -> None:
    """Refuse a column of the source whose target column streamer uses for versions.

    *names*: the target's names of the source's columns. Raises TargetSchemaError.
    """
    if taken := sorted(set(names).intersection(mapping.rule.history.names)):
        raise TargetSchemaError(
            f'a column of source table "{mapping.source}" would go to column "{taken[0]}" of '
            f'history table "{mapping.target}", which streamer writes itself',
            hint="rename the column with `columns`, or the columns of versions with `history`",
        )


def history_columns(history: HistoryColumns) -> list[DefinedColumn]:
    """Return the columns that a history table has beside the source's columns."""
    types = zip(history.types.items(), _HISTORY_DEFAULTS, strict=True)
    return [
        DefinedColumn(0, history.id, "bigint", identity="d"),
        *(
            DefinedColumn(0, name, kind, not_null=True, default=default)
            for (name, kind), default in types
        ),
    ]


def at_target(column: DefinedColumn, mapping: RelationMapping, name: str | None) -> DefinedColumn:
    """Return the definition of column *name* at the target for the values of a source's *column*.

    A hash is text. The default or fill value of the source is not hashed, so the target must not
    get that value. So a new column counts as a column with different values in existing rows.
    """
    if name is None or mapping.hash_of(name) is None:
        return column
    has_values = column.default is not None or column.fill is not None or bool(column.identity)
    return DefinedColumn(
        column.number,
        column.name,
        "text",
        column.not_null,
        computed=column.computed,
        of_domain=column.of_domain or has_values,
    )


def names_at_target(
    columns: Iterable[str],
    mapping: RelationMapping,
    available: Collection[str] | None = None,
    key: Collection[str] = (),
) -> dict[str, str | None]:
    """Return the target's names of the source's *columns*, for expressions over these columns.

    None for a column that the target does not get, or gets as a hash. *available*: the target's
    columns; None if the mapping alone decides. The target then gets the columns of *key*.
    """
    names: dict[str, str | None] = {}
    for column in columns:
        name = mapping.target_column(column)
        if available is None:
            is_at_target = not mapping.is_optional(column) or column in key
        else:
            is_at_target = name in available
        is_plain = name is not None and mapping.hash_of(name) is None
        names[column] = name if is_at_target and is_plain else None
    return names


def identity_of(identity: str, *, is_key: bool) -> str:
    """Return the identity of a target's column, in the form of `IDENTITIES`.

    No UPDATE can write a column that is GENERATED ALWAYS, so only a key column stays ALWAYS. A row
    with a changed key is deleted and inserted.
    """
    return identity if is_key else "d"


def generation_expression(
    column: DefinedColumn, names: Mapping[str, str | None], mapping: RelationMapping
) -> str:
    """Return the expression of a generated *column* over the target's columns.

    *names*: see `names_at_target`, for all columns of the source. Raises TargetSchemaError if the
    expression uses a column that the target does not get.
    """
    named = f'column "{column.name}" of source table "{mapping.source}" is generated'
    hint = f'exclude "{column.name}", or create it in target table "{mapping.target}" yourself'
    try:
        return over_columns(column.default or "", names)
    except AbsentColumnError as exc:
        problem = f'from "{exc.column}", which target table "{mapping.target}" does not get'
        raise TargetSchemaError(f"{named} {problem}", hint=hint) from None
    except UnclearExpressionError as exc:
        problem = f"{named}, and its expression is unclear: {exc}"
        raise TargetSchemaError(problem, hint=hint) from None


def columns_to_add(
    mapping: RelationMapping,
    missing: Iterable[tuple[str, str]],
    types: Mapping[str, str],
    changes: Mapping[str, ColumnChange] = NO_CHANGES,
) -> list[DefinedColumn]:
    """Return the columns that the target lacks, from the facts of a source without the capture.

    *missing*: the names at the source and at the target. *types*: the known types, by name at the
    source. *changes*: the changes since the last copy that the source's catalogs show, by name at
    the source.
    """
    columns = []
    for source, name in missing:
        added = changes[source].after if source in changes else None
        fill = None if added is None or mapping.is_computed(name) else added.fill
        kind = mapping.type_of(name, types.get(source, "<its type>"))
        columns.append(DefinedColumn(0, name, kind, fill=fill))
    return columns


def alter_type_sql(table: str, column: str, sql_type: str) -> str:
    """Return the statement that changes the type of *column* of a quoted *table*, and converts the
    values.

    Problem and check print this statement, and `streamer doctor` prints equal statements once.
    """
    quoted = quote_identifier(column)
    return f"alter table {table} alter column {quoted} type {sql_type} using {quoted}::{sql_type}"


def add_columns_sql(
    table: str, columns: Iterable[DefinedColumn], *, if_not_exists: bool = False
) -> list[str]:
    """Return the statements that add columns to a quoted *table*, with values in existing rows.

    The columns keep no default, because later values come from the source, and a default would hide
    a missing value.
    """
    add = "add column if not exists" if if_not_exists else "add column"
    adds, drops = [], []
    for column in columns:
        default = column.default if column.fill is None else column.constant
        adds.append(f"{add} {column_clause(replace(column, default=default))}")
        if column.fill is not None:
            drops.append(f"alter column {quote_identifier(column.name)} drop default")
    return [f"alter table {table} {', '.join(actions)}" for actions in (adds, drops) if actions]


def type_clause(column: DefinedColumn) -> str:
    """Return the type of a column with its collation."""
    return column.type + (f" collate {column.collation}" if column.collation else "")


def history_keys(key: Sequence[str], rule: TableRule, timing: str = "") -> tuple[str, str | None]:
    """Return the columns of a history's primary key, and the SQL for one open version of a key.

    The SQL is the columns of a unique index or, with *timing*, a deferrable constraint; None if no
    constraint can be deferrable. Time partitions need the end of the version in both keys.
    """
    history = rule.history
    end = [] if rule.partition_by is None else [history.end]
    primary = f"({quote_columns([*key, history.id, *end])})"
    is_open = f"{quote_identifier(history.end)} = {HISTORY_OPEN}"
    if not timing:
        return primary, f"({quote_columns([*key, *end])}) where {is_open}"
    if end:  # before PostgreSQL 17, a partitioned table has no exclusion constraints
        return primary, None
    equal = ", ".join(f"{quote_identifier(name)} with =" for name in key)
    # Only exclusion constraints can be both deferrable and partial.
    return primary, f"exclude using btree ({equal}) where ({is_open}){timing}"


def column_clause(column: DefinedColumn) -> str:
    """Return the clause of CREATE TABLE or ADD COLUMN for a column of the target."""
    parts = [quote_identifier(column.name), type_clause(column)]
    if column.generated:
        parts.append(f"generated always as ({column.default}) stored")
    elif column.identity:
        parts.append(f"generated {IDENTITIES[column.identity]} as identity")
    elif column.default is not None:
        parts.append(f"default {column.default}")
    if column.not_null:
        parts.append("not null")
    return " ".join(parts)
