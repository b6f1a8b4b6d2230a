"""Advice for a change that the target rejects. The command that suits the SQLSTATE comes first.

The drainer retries every few seconds, so the operator only removes the cause. Pure.
"""

import re
from collections.abc import Iterable
from typing import Final

from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.rows.apply_plan import ApplyPlan, PlanColumn
from streamer.decode.pgoutput import Column
from streamer.errors.error_classes import (
    ConflictError,
    IdentityError,
    StreamerError,
    TextEncodingError,
    UntranslatableTextError,
    ValueConversionError,
)
from streamer.errors.remedies import CONTINUES, Remedy, Step, at_source, at_target, run
from streamer.mapping.rules import RelationMapping
from streamer.mapping.sid_and_history_columns import SID
from streamer.postgres.quoting import (
    quote_columns,
    quote_identifier,
    quote_literal,
    quote_qualified,
)
from streamer.schema.desired_columns import alter_type_sql
from streamer.schema.target_relation import TargetRelation

_KEY_COLUMNS: Final = re.compile(r"Key \(([^)]*)\)=")
_MISSING_LABEL: Final = re.compile(
    r'invalid input value for enum [^:]*: "(.*?)"(?:, in column|: Key \(|$)', re.DOTALL
)
_OTHER_ATTRIBUTES: Final = "malformed record literal"
_QUARANTINE = (
    "set `on_error: quarantine` for this table, under `tables` in the configuration or on the page"
)


def advise(error: StreamerError, mapped: MappedRelation, plan: ApplyPlan | None) -> None:
    """Complete *error*, raised by a change of *mapped*, with the row and the next step."""
    error.message = _located(error)
    if plan is None or (error.remedy is not None and not isinstance(error, IdentityError)):
        return
    parts: list[str | Step | Remedy] = []
    for way in _ways(error, mapped, plan):
        parts += ["; or ", way] if parts else [way]
    if parts:
        error.remedy = Remedy.of(*parts)


def _located(error: StreamerError) -> str:
    message = error.message
    if error.column and f'"{error.column}"' not in message:
        message = f'{message}, in column "{error.column}"'
    if error.constraint and f'"{error.constraint}"' not in message:
        message = f'{message}, by constraint "{error.constraint}"'
    if error.key is not None and "Key (" not in message:
        message = f"{message}: {error.key}"
    return message


def _ways(error: StreamerError, mapped: MappedRelation, plan: ApplyPlan) -> Iterable[str | Remedy]:
    source = mapped.source
    table = str(mapped.mapping.source)
    again = run("resync", table, database=source.database, sid=source.sid)
    resync = Remedy.of("run: ", again)
    if isinstance(error, IdentityError):
        yield Remedy.of(error.remedy, ", " if error.remedy else "", resync)
    elif isinstance(error, UntranslatableTextError):
        yield Remedy.of("replace the character at the source, and ", resync)
        yield _QUARANTINE
    elif isinstance(error, TextEncodingError):
        words = "correct the text at the source so that it is valid UTF-8, and "
        yield Remedy.of(words, resync)
        yield _QUARANTINE
    elif isinstance(error, ValueConversionError) and _OTHER_ATTRIBUTES in error.message:
        yield Remedy.of(
            "the transaction of this row began before ALTER TYPE changed the attributes, so copy "
            "the rows as they are now: ",
            resync,
        )
        yield _QUARANTINE
    elif isinstance(error, ValueConversionError):
        yield from _alter_column(error, mapped, plan)
        yield _QUARANTINE
    elif isinstance(error, ConflictError):
        yield from _conflict(error, mapped, plan, resync)


def _conflict(
    error: ConflictError, mapped: MappedRelation, plan: ApplyPlan, resync: Remedy
) -> Iterable[str | Remedy]:
    match error.kind:
        case "insert_exists" if late_key(mapped, plan):
            yield _run_at_target(_make_late(error, plan))
        case "insert_exists" | "exclusion" if plan.mapping.rule.is_disjoint:
            yield "at the source, delete one of the two rows with this key, or change its key"
            yield resync
        case "insert_exists" | "exclusion":
            yield from _collision(error, mapped, plan, resync)
        case "several_rows":
            keys = [*([SID] if plan.sid is not None else []), *(c.name for c in plan.key)]
            index = f"create unique index on {plan.table} ({quote_columns(keys)})"
            yield Remedy.of("leave one row of each key, and ", _run_at_target(index))
            yield resync
        case "update_missing":
            rule = plan.mapping.rule
            if rule.copy_where is not None or rule.expiry is not None:
                relation = mapped.mapping.source
                table = quote_qualified(relation.namespace, relation.name)
                whole = at_source(f"alter table {table} replica identity full")
                yield Remedy.of("let the source send whole rows: ", whole, ", and ", resync)
            yield resync
            yield _QUARANTINE
        case "not_null" if error.column is not None:
            column = quote_identifier(error.column)
            yield _run_at_target(f"alter table {plan.table} alter column {column} drop not null")
            yield _QUARANTINE
        case "foreign_key":
            yield (
                "restart streamer once its role may set session_replication_role, because the "
                "source checks foreign keys"
            )
            yield _QUARANTINE
        case "check" if error.constraint is not None:
            yield _run_at_target(plan.target.drop_sql(error.constraint))
            yield _QUARANTINE
        case _:
            yield "find out why the target rejects the row, and change the table or its trigger"
            yield _QUARANTINE


def _collision(
    error: ConflictError, mapped: MappedRelation, plan: ApplyPlan, resync: Remedy
) -> Iterable[str | Remedy]:
    # A copy keeps the rows of other sids, and would meet the same row.
    can_resync = not plan.target.lacks_sid(mapped.mapping, error.constraint or "")
    if error.constraint and not _is_primary_key(error, plan):
        drop = drop_refusing(plan.target, mapped.mapping, error.constraint)
        # The list of problems adds these words to a remedy without a command.
        yield Remedy.of(drop, f"; {CONTINUES}") if can_resync else drop
    yield "delete the conflicting row at the target, if streamer did not write it"
    if can_resync:
        yield resync
    yield _QUARANTINE


def drop_refusing(table: TargetRelation, mapping: RelationMapping, name: str) -> Remedy:
    """Return a remedy for a row of *mapping* that constraint or unique index *name* refuses."""
    reason = "unless the source has that constraint as well, "
    if table.lacks_sid(mapping, name):
        reason = f'rows of two sids can collide, because "{name}" lacks column "{SID}"; '
        reason += "rows of one sid collide if the source lacks such a unique index; "
    return Remedy.of(reason, _run_at_target(table.drop_sql(name)))


def _is_primary_key(error: ConflictError, plan: ApplyPlan) -> bool:
    """Whether the key that PostgreSQL names is the target's primary key."""
    named = _KEY_COLUMNS.search(error.message)
    return named is None or named[1] == ", ".join(plan.target.primary_key)


def _alter_column(
    error: StreamerError, mapped: MappedRelation, plan: ApplyPlan
) -> Iterable[str | Remedy]:
    column = next((c for c in plan.columns if c.name == error.column), None)
    if column is None or column not in plan.source_columns:
        yield "change the type of the target column to the type of the source column"
        return
    label = _MISSING_LABEL.search(error.message)
    if label is not None:
        add = f"alter type {column.target.type} add value {quote_literal(label[1])}"
        yield _run_at_target(add)
        return
    sent = plan.relation.columns[column.position]
    kind = _sent_type(sent) or mapped.source.types.get(sent.name)
    if kind is not None and kind != column.target.type:
        yield _run_at_target(alter_type_sql(plan.table, column.name, kind))


def _run_at_target(sql: str) -> Remedy:
    return Remedy.of("run at the target: ", at_target(sql))


_PLAIN: Final = {
    20: "bigint",
    21: "smallint",
    23: "integer",
    25: "text",
    700: "real",
    701: "double precision",
}
_VARCHAR: Final = 1043
_NUMERIC: Final = 1700
_HEADER: Final = 4
"""PostgreSQL adds this to the length or precision in a type modifier."""


def _sent_type(column: Column) -> str | None:
    """Return the name of the type that the source sends; the stored catalog may be older than a
    change of the column.

    Return None for a type without a built-in name.
    """
    has_modifier, modifier = column.type_modifier >= _HEADER, column.type_modifier - _HEADER
    if column.type_oid == _VARCHAR:
        return f"character varying({modifier})" if has_modifier else "character varying"
    if column.type_oid == _NUMERIC and not has_modifier:
        return "numeric"
    return _PLAIN.get(column.type_oid)


def late_key(mapped: MappedRelation, plan: ApplyPlan) -> bool:
    """Whether the source's primary key is deferrable, and the target's is checked at once."""
    key = mapped.source.primary_key
    if plan.relation.replica_identity != "f" or not key or key in mapped.source.unique_keys:
        return False
    target_key = [name for name in plan.target.primary_key if name != SID]
    return target_key == [mapped.mapping.target_column(name) for name in key]


def _make_late(error: ConflictError, plan: ApplyPlan) -> str:
    constraint = quote_identifier(error.constraint or f"{plan.target.name.name}_pkey")
    key = quote_columns(plan.target.primary_key)
    return (
        f"alter table {plan.table} drop constraint {constraint}, add primary key ({key}) deferrable"
    )


def key_text(columns: Iterable[PlanColumn], values: Iterable[str | None]) -> str:
    """Return a key as text, in the form of PostgreSQL's error messages."""
    shown = ", ".join("null" if value is None else value for value in values)
    return f"Key ({', '.join(column.name for column in columns)})=({shown})"
