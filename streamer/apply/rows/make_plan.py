"""Makes the plan of a relation from the definitions of both sides.

If the target lacks a column or the key does not fit, the error prints the statement to run. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from streamer.apply.rows.apply_plan import ApplyPlan, Identity, PlanColumn, PlanInput
from streamer.apply.rows.hashed_columns import check_hashes
from streamer.decode.pgoutput import Relation
from streamer.errors.error_classes import TargetSchemaError
from streamer.errors.remedies import Remedy, at_target, run
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import METADATA_TYPES, DdlKind, OnColumnAdded, TableType
from streamer.mapping.rules import RelationMapping
from streamer.mapping.sid_and_history_columns import (
    SID,
    USUAL_HISTORY,
    HistoryColumns,
)
from streamer.mapping.time_partitions import is_time
from streamer.postgres.quoting import (
    quote_columns,
    quote_identifier,
    quote_qualified,
)
from streamer.schema.desired_columns import (
    NO_CHANGES,
    add_columns_sql,
    columns_to_add,
    history_columns,
    refuse_names_of_history,
)
from streamer.schema.partitions import PartitionKey
from streamer.schema.source_definition import ColumnChange, DefinedColumn
from streamer.schema.target_relation import TargetRelation


def make_plan(
    relation: Relation,
    mapping: RelationMapping,
    target: TargetRelation | None,
    *,
    primary_key: tuple[str, ...] = (),
    source_keys: tuple[tuple[str, ...], ...] = (),
    has_partial_key: bool = False,
    is_partitioned: bool = False,
    type_names: Mapping[str, str] | None = None,
    binary: bool = False,
    number: int = 0,
    input_types: dict[str, str] | None = None,
    computed_types: dict[str, str] | None = None,
) -> ApplyPlan:
    """Decide the way to apply changes of *relation*.

    *primary_key*: the source's primary key, for relations with REPLICA IDENTITY FULL.
    *source_keys*: columns of the source's unique indexes with an immediate check.
    *has_partial_key*: the source does not send generated columns of the key, and the sent columns
    do not identify rows. *is_partitioned*: partitions may differ in replica identity. *type_names*:
    the source's types by column, for an ALTER TABLE. *input_types*: types with collations, of
    columns that expressions use. *computed_types*: the types of expressions, by target column.
    Raises TargetSchemaError with the statement to run at the target, MappingError for an expression
    that does not fit the source.
    """
    if target is None:
        raise missing_target(mapping.target)
    sid = mapping.sid
    if target.unlogged:
        raise unlogged_error(target.name, target.unlogged)
    check_partitioning(mapping, target)
    columns, missing = match_columns(relation, mapping, target)
    if missing:
        raise missing_error(mapping, target.name, missing, type_names or {})
    _check_sent(mapping, columns)
    has_sid = target.has_sid and all(column.name != SID for column in columns)
    if has_sid and sid is None:
        raise TargetSchemaError(
            f'target table "{mapping.target}" has a column "sid" but this source has no sid',
            hint="give a sid to its url, or to the table in the mapping",
        )
    if mapping.rule.sid is not None and not target.has_sid:
        raise missing_sid(mapping, target)
    if target.has_sid and not has_sid and sid is not None:
        raise two_sids(mapping)
    if mapping.type is TableType.HISTORY:
        refuse_names_of_history(mapping, [column.name for column in columns])
        _check_history_columns(mapping, target, columns)
    columns = _with_computed(columns, mapping, target, computed_types or {}, has_sid=has_sid)
    identity: Identity = Identity.NONE
    key: tuple[PlanColumn, ...] = ()
    if not has_partial_key:
        identity, key = _identify(relation, mapping, target, columns, primary_key, source_keys)
    if mapping.rule.is_disjoint:
        _check_guard(mapping, target, key)
    check_hashes(relation, mapping, columns)
    if mapping.rule.deleted_at is not None:
        _check_marks(relation, mapping, target, identity, key, columns)
    columns = _with_metadata(columns, len(relation.columns), mapping, target)
    _check_unfilled_columns(mapping, target, columns, has_sid)
    if identity is not Identity.NONE:
        _check_identity_columns(target, columns, key)
    return ApplyPlan(
        relation=relation,
        mapping=mapping,
        target=target,
        sid=sid if has_sid else None,
        columns=columns,
        key=key,
        identity=identity,
        is_partitioned=is_partitioned,
        version_key=key if identity is Identity.KEY else _named(columns, mapping, primary_key),
        binary=binary,
        number=number,
        inputs=_inputs(relation, mapping, columns, input_types or {}),
    )


def _check_guard(
    mapping: RelationMapping, target: TargetRelation, key: tuple[PlanColumn, ...]
) -> None:
    """Check that the target refuses a key of another table. Raises TargetSchemaError."""
    if not key:
        raise TargetSchemaError(
            f'source table "{mapping.source}" has no key, and `keys: disjoint` needs a key',
            hint="give the table a primary key, or remove `keys` and give its rows a sid",
        )
    names = [column.name for column in key]
    if not target.is_unique(frozenset(names)):
        table = quote_qualified(target.name.namespace, target.name.name)
        index = f"create unique index on {table} ({quote_columns(names)})"
        raise TargetSchemaError(
            f"`keys: disjoint` needs a unique key ({', '.join(names)}) in target table "
            f'"{mapping.target}", so that PostgreSQL rejects a key of a second table',
            hint=Remedy.of("run at the target: ", at_target(index)),
        )


def check_partitioning(mapping: RelationMapping, target: TargetRelation) -> None:
    """Refuse a target without the time partitions of the rule. Raises TargetSchemaError. Pure."""
    rule = mapping.rule.partition_by
    if rule is None:
        return
    key = None if target.partition_key is None else PartitionKey.parse(target.partition_key)
    column = target.columns.get(rule.column)
    if column is not None:
        check_time(mapping, rule.column, column.base_type)
    if key is None or key.strategy != "RANGE" or [i.column for i in key.items] != [rule.column]:
        raise TargetSchemaError(
            f'target table "{target.name}" is not partitioned by range of column "{rule.column}", '
            "as `partition_by` says",
            hint=Remedy.of(
                "remove `partition_by`; or rename the table at the target, and run `",
                run("resync", str(mapping.source)),
                "`, which creates a partitioned table",
            ),
        )


def _check_sent(mapping: RelationMapping, columns: Sequence[PlanColumn]) -> None:
    """Refuse partitions by a column without a value of the source. Raises TargetSchemaError."""
    rule = mapping.rule.partition_by
    if rule is None or rule.is_of_versions:
        return
    if all(column.name != rule.column for column in columns):
        raise TargetSchemaError(
            f'`partition_by` names column "{rule.column}" of target table "{mapping.target}", '
            "which gets no value of the source",
            hint="name another column in `partition_by`",
        )


def check_time(mapping: RelationMapping, column: str, type_name: str) -> None:
    """Refuse a column of `partition_by` without a time. Raises TargetSchemaError. Pure."""
    if not is_time(type_name):
        raise TargetSchemaError(
            f'column "{column}" of target table "{mapping.target}" has type {type_name}, and '
            "`partition_by` needs a date or a timestamp",
            hint="name a column of type date, timestamp or timestamptz in `partition_by`",
        )


def missing_sid(mapping: RelationMapping, target: TargetRelation) -> TargetSchemaError:
    """Return the error for a rule with a sid, and a target table without its column. Pure."""
    return TargetSchemaError(
        f'`sid` distinguishes rows of target table "{mapping.target}", which has no column sid',
        hint=Remedy.of("run at the target: ", at_target(*target.add_sid_sql(mapping.sid))),
    )


def unlogged_error(target: RelationName, unlogged: Sequence[RelationName]) -> TargetSchemaError:
    """Return the error for an unlogged target table, whose rows a crash removes. Pure."""
    which = "is unlogged"
    if list(unlogged) != [target]:
        which = f"has unlogged partitions: {', '.join(map(str, unlogged))}"
    statements = (
        f"alter table {quote_qualified(name.namespace, name.name)} set logged" for name in unlogged
    )
    return TargetSchemaError(
        f'target table "{target}" {which}; after a crash PostgreSQL empties such a table, and the '
        "source does not send acknowledged rows again",
        hint=Remedy.of(
            "run at the target: ",
            at_target(*statements),
            "; then resync the table, if the server of the target has crashed since",
        ),
    )


def _inputs(
    relation: Relation,
    mapping: RelationMapping,
    columns: tuple[PlanColumn, ...],
    types: dict[str, str],
) -> tuple[PlanInput, ...]:
    stored = {c.position: c.target for c in columns if c.expression is None}
    names = [column.name for column in relation.columns]
    inputs = []
    for name in mapping.expression_inputs(names):
        position = names.index(name)
        kind = types.get(name, "text")
        holder = stored.get(position)
        # A column of a slightly different type may alter the value.
        is_equal = holder is not None and holder.type == kind.partition(" collate ")[0]
        inputs.append(PlanInput(position, name, kind, holder.name if holder and is_equal else None))
    return tuple(inputs)


def _with_computed(
    columns: tuple[PlanColumn, ...],
    mapping: RelationMapping,
    target: TargetRelation,
    types: dict[str, str],
    *,
    has_sid: bool,
) -> tuple[PlanColumn, ...]:
    """Add the computed columns of `set`, in place of source values or as additional columns."""
    by_name = {column.name: column for column in columns}
    is_history = mapping.type is TableType.HISTORY
    ours = (*((SID,) if has_sid else ()), *(mapping.rule.history.names if is_history else ()))
    for name, expression in mapping.rule.set:
        if name in ours:
            raise TargetSchemaError(
                f'`set` computes column "{name}" of target table "{mapping.target}", which '
                "streamer writes itself",
                hint="remove it from `set`",
            )
        target_column = target.columns.get(name)
        if target_column is None:
            quoted = quote_qualified(target.name.namespace, target.name.name)
            column = DefinedColumn(0, name, types.get(name, "<its type>"))
            raise TargetSchemaError(
                f'target table "{mapping.target}" has no column "{name}", which `set` computes',
                hint=Remedy.of(
                    "run at the target: ", at_target(*add_columns_sql(quoted, [column]))
                ),
            )
        if target_column.generated:
            raise TargetSchemaError(
                f'column "{name}" of target table "{mapping.target}" is generated, so `set` '
                "cannot compute the column",
                hint="remove it from `set`, or make it an ordinary column",
            )
        position = by_name[name].position if name in by_name else -1
        by_name[name] = PlanColumn(position, target_column, expression)
    return tuple(by_name.values())


def _with_metadata(
    columns: tuple[PlanColumn, ...], count: int, mapping: RelationMapping, target: TargetRelation
) -> tuple[PlanColumn, ...]:
    """Add the columns of `metadata`, whose values follow the *count* columns of the source.

    Raises TargetSchemaError for a column that the target lacks or the source writes.
    """
    added = []
    for number, (kind, name) in enumerate(mapping.rule.metadata):
        if name == SID or any(column.name == name for column in columns):
            raise TargetSchemaError(
                f'`metadata` writes {kind} to column "{name}" of target table "{mapping.target}", '
                "which already gets another value",
                hint="name another column in `metadata`, or exclude the source's column",
            )
        actual = target.columns.get(name)
        expected = METADATA_TYPES[kind]
        table = quote_qualified(target.name.namespace, target.name.name)
        if actual is None:
            sql = add_columns_sql(table, [DefinedColumn(0, name, expected)])
            raise TargetSchemaError(
                f'target table "{mapping.target}" has no column "{name}", which `metadata` writes',
                hint=Remedy.of("run at the target: ", at_target(*sql)),
            )
        if actual.type != expected or actual.generated or actual.identity_always:
            alter = f"alter table {table} alter column {quote_identifier(name)} type {expected}"
            raise TargetSchemaError(
                f'column "{name}" of target table "{mapping.target}" must be an ordinary column of '
                f"type {expected}, because `metadata` writes {kind} to it",
                hint=Remedy.of(
                    "name another column in `metadata`, or run at the target: ", at_target(alter)
                ),
            )
        added.append(PlanColumn(count + number, actual))
    return columns + tuple(added)


def _check_marks(
    relation: Relation,
    mapping: RelationMapping,
    target: TargetRelation,
    identity: Identity,
    key: tuple[PlanColumn, ...],
    columns: tuple[PlanColumn, ...],
) -> None:
    """Check that a delete finds its row by a key, and changes no computed value.

    Raises TargetSchemaError.
    """
    if identity is not Identity.KEY:
        raise TargetSchemaError(
            f'`on_delete: mark` of target table "{target.name}" needs a key, and source table '
            f'"{mapping.source}" has none',
            hint="give it a primary key, or remove `on_delete`",
        )
    if mapping.rule.filter is not None:
        return  # a mark writes only metadata
    names = {relation.columns[column.position].name for column in key}
    for column in columns:
        used = set() if column.expression is None else set(column.expression.names)
        if used & names and used - names:
            raise TargetSchemaError(
                f'`set` computes "{column.name}" of target table "{target.name}" from the key and '
                "from other columns, which a delete does not send",
                hint="remove `on_delete: mark`, or compute the column without the key",
            )


def missing_error(
    mapping: RelationMapping,
    target: RelationName,
    missing: Sequence[tuple[str, str]],
    types: Mapping[str, str],
    changes: Mapping[str, ColumnChange] = NO_CHANGES,
) -> TargetSchemaError:
    """Return the error for columns that the target lacks; see `missing_remedy`. Pure."""
    statements, words = missing_remedy(mapping, target, missing, types, changes)
    hint = Remedy.of("run at the target: ", at_target(*statements), f"; {words}")
    listed = ", ".join(f'"{name}"' for _, name in missing)
    return TargetSchemaError(f'target table "{mapping.target}" has no column {listed}', hint=hint)


def missing_remedy(
    mapping: RelationMapping,
    target: RelationName,
    missing: Sequence[tuple[str, str]],
    types: Mapping[str, str],
    changes: Mapping[str, ColumnChange],
) -> tuple[list[str], str]:
    """Return advice and the statements that make the target fit and keep rows equal. Pure.

    *changes*: see `columns_to_add`.
    """
    table = quote_qualified(target.namespace, target.name)
    statements, additions = [], []
    for source, name in missing:
        former = changes[source].before if source in changes else None
        old_name = None if former is None else mapping.target_column(former.name)
        if old_name is not None:
            renaming = f"{quote_identifier(old_name)} to {quote_identifier(name)}"
            statements.append(f"alter table {table} rename column {renaming}")
        else:
            additions.append((source, name))
    statements += add_columns_sql(table, columns_to_add(mapping, additions, types, changes))
    words = (
        "or exclude the column in the mapping; with the capture of definitions (`ddl: capture`) "
        "streamer makes such changes itself"
    )
    if any(c.after is not None and c.after.may_hide_values for c in changes.values()):
        words += "; streamer then copies the values of the existing rows"
    return statements, words


def missing_columns(
    relation: Relation, mapping: RelationMapping, target: TargetRelation
) -> list[tuple[str, str]]:
    """Return the columns that the target lacks: source and target names."""
    return match_columns(relation, mapping, target)[1]


def judge_added(
    names: Sequence[str], stored: Mapping[str, int], now: Mapping[str, DefinedColumn]
) -> dict[str, ColumnChange]:
    """Return the source's changes that created columns that the target lacks.

    Leave out a column that the source no longer has by that name. A column that the last copy
    included is missing because a session dropped it at the target, with all values. Pure.
    """
    by_number = {abs(number): name for name, number in stored.items()}
    changes = {}
    for name in now.keys() & set(names):
        column, former = now[name], by_number.get(now[name].number)
        if former in (None, name):
            lost = replace(column, fill=None, computed=True)
            added = column if former is None else lost
            changes[name] = ColumnChange(DdlKind.ADD_COLUMN, None, added)
        else:
            former_column = replace(column, name=former)
            changes[name] = ColumnChange(DdlKind.RENAME_COLUMN, former_column, column)
    return changes


def match_columns(
    relation: Relation, mapping: RelationMapping, target: TargetRelation
) -> tuple[tuple[PlanColumn, ...], list[tuple[str, str]]]:
    """Return the source's columns with the target's columns, and the missing columns."""
    columns: list[PlanColumn] = []
    missing: list[tuple[str, str]] = []
    for position, column in enumerate(relation.columns):
        name = mapping.target_column(column.name)
        if name is None:
            continue
        at_target = target.columns.get(name)
        if at_target is None:
            is_ignored = mapping.rule.on_column_added is OnColumnAdded.IGNORE
            if not is_ignored and mapping.own_column(column.name) is not None:
                missing.append((column.name, name))
        elif not at_target.generated:  # the target computes generated columns
            columns.append(PlanColumn(position, at_target))
    return tuple(columns), missing


def _check_history_columns(
    mapping: RelationMapping, target: TargetRelation, columns: tuple[PlanColumn, ...]
) -> None:
    history = mapping.rule.history
    absent = [name for name in history.names if name not in target.columns]
    if _is_to_rename_id(history, target, columns):
        absent.append(history.id)
    if not absent:
        return
    table = quote_qualified(target.name.namespace, target.name.name)
    # If the table has these columns by other names, new columns would make all versions open.
    usual = dict(zip(history.names, USUAL_HISTORY.names, strict=True))
    usual[history.id] = USUAL_HISTORY.id
    renames = [
        f"alter table {table} rename {quote_identifier(usual[name])} to {quote_identifier(name)}"
        for name in absent
        if usual[name] in target.columns and usual[name] not in history.names
    ]
    additions = [column for column in history_columns(history) if column.name in absent]
    remedy = Remedy.of("run at the target: ", at_target(*renames))
    if not renames:
        words = "; if the table has these columns under different names, rename the columns instead"
        remedy = Remedy.of(
            "run at the target: ", at_target(*add_columns_sql(table, additions)), words
        )
    raise TargetSchemaError(
        f'history table "{mapping.target}" has no column "{absent[0]}"', hint=remedy
    )


def _is_to_rename_id(
    history: HistoryColumns, target: TargetRelation, columns: tuple[PlanColumn, ...]
) -> bool:
    """Whether the column that orders versions has the default name, and the rule gives a new name.

    A table that an operator created may lack the column. A column of the source, among *columns*,
    may also have the default name.
    """
    usual = USUAL_HISTORY.id
    is_of_source = any(column.name == usual for column in columns)
    return usual in target.columns and history.id not in target.columns and not is_of_source


def _check_identity_columns(
    target: TargetRelation, columns: tuple[PlanColumn, ...], key: tuple[PlanColumn, ...]
) -> None:
    for column in columns:
        if column.target.identity_always and column not in key:
            table = quote_qualified(target.name.namespace, target.name.name)
            raise TargetSchemaError(
                f'column "{column.name}" of target table "{target.name}" is GENERATED ALWAYS AS '
                "IDENTITY, so the source's updates of it cannot be written",
                hint=Remedy.of(
                    "run at the target: ",
                    at_target(
                        f"alter table {table} alter column {quote_identifier(column.name)} "
                        "set generated by default"
                    ),
                ),
            )


def _check_unfilled_columns(
    mapping: RelationMapping,
    target: TargetRelation,
    columns: tuple[PlanColumn, ...],
    has_sid: bool,
) -> None:
    filled = {column.name for column in columns} | ({SID} if has_sid else set())
    if mapping.type is TableType.HISTORY:
        filled |= set(mapping.rule.history.names)
    for column in target.unfilled(filled):
        table = quote_qualified(target.name.namespace, target.name.name)
        alter = f"alter table {table} alter column {quote_identifier(column.name)}"
        error = TargetSchemaError(
            f'column "{column.name}" of target table "{mapping.target}" is NOT NULL, '
            "has no default and no column of the source to fill it",
            hint=Remedy.of(
                "run at the target: ",
                at_target(f"{alter} drop not null"),
                "; or give the column a default, or map a column to it",
            ),
        )
        error.column = column.name
        raise error


def _identify(
    relation: Relation,
    mapping: RelationMapping,
    target: TargetRelation,
    columns: tuple[PlanColumn, ...],
    primary_key: tuple[str, ...],
    source_keys: tuple[tuple[str, ...], ...],
) -> tuple[Identity, tuple[PlanColumn, ...]]:
    by_position = {column.position: column for column in columns}
    if relation.replica_identity in "di":
        positions = [i for i, column in enumerate(relation.columns) if column.is_key]
        absent = [relation.columns[i].name for i in positions if i not in by_position]
        if absent:
            raise TargetSchemaError(
                f'key column "{absent[0]}" of source table "{mapping.source}" is not written '
                "to the target",
                hint="do not exclude it, and add it to the target",
            )
        key = tuple(by_position[i] for i in positions)
        for column in key:
            if column.expression is not None:
                # If two rows had equal keys, a change could find the wrong row.
                raise TargetSchemaError(
                    f'`set` computes "{column.name}", which is part of the key of source table '
                    f'"{mapping.source}"',
                    hint="leave the key unchanged, and compute another column",
                )
        return (Identity.KEY, key) if key else (Identity.NONE, ())
    if relation.replica_identity == "n":
        return Identity.NONE, ()
    # FULL sends whole old rows. Columns that the target keeps unique find rows faster. If two rows
    # of the source share a key for a while, the target refuses the second. A history table holds a
    # key many times. An append table keeps a row even if a newer row has the same key. Rows outside
    # and inside a filter may share a key. For such tables the source must keep the key unique at
    # every moment, which a deferrable constraint does not.
    by_name = {column.name: column for column in columns if column.expression is None}
    candidates = target.unique_keys
    trusted = [{mapping.target_column(name) or "" for name in key} for key in source_keys]
    if mapping.type is TableType.HISTORY or mapping.rule.filter is not None:
        candidates = (tuple(mapping.target_column(name) or "" for name in primary_key),)
    elif mapping.type is TableType.CLONE:
        trusted = [set()]
    for names in candidates:
        if not any(key <= set(names) for key in trusted):
            continue
        key_names = [name for name in names if name != SID or SID in by_name]
        if key_names and all(n in by_name and by_name[n].target.not_null for n in key_names):
            return Identity.KEY, tuple(by_name[name] for name in key_names)
    return Identity.ROW, columns


def _named(
    columns: tuple[PlanColumn, ...], mapping: RelationMapping, names: tuple[str, ...]
) -> tuple[PlanColumn, ...]:
    """Return the target's columns for the source's columns *names*; no column if a column is
    missing.
    """
    by_name = {column.name: column for column in columns if column.expression is None}
    targets = [mapping.target_column(name) or "" for name in names]
    return tuple(by_name[name] for name in targets) if set(targets) <= set(by_name) else ()


_KINDS: Final = {
    "v": "a view",
    "m": "a materialized view",
    "f": "a foreign table",
    "S": "a sequence",
    "i": "an index",
    "I": "an index",
    "c": "a composite type",
}


def missing_target(target: RelationName, kind: str | None = None) -> TargetSchemaError:
    """Return the error for a *target* that does not exist or is not a table. *kind*: the relkind,
    if the target exists.
    """
    if kind is None:
        return TargetSchemaError(
            f'target table "{target}" does not exist',
            hint="create it, or set target.create_tables: true",
        )
    word = _KINDS.get(kind, "no table")
    return TargetSchemaError(f'target "{target}" is {word}', hint="give the table another `target`")


def two_sids(mapping: RelationMapping) -> TargetSchemaError:
    """Return the error for a source column that would fill the column of the url's sid."""
    return TargetSchemaError(
        f'column "sid" of source table "{mapping.source}" has the name of the column for the sid',
        hint="rename the column with `columns`, or exclude it",
    )
