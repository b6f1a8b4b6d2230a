"""Checks a rule's expressions at a source, and reads the types of their values."""

from typing import Any

import psycopg

from streamer.errors.error_classes import MappingError, SyncError
from streamer.mapping.expressions import (
    Expression,
    ExpressionError,
    ExpressionFacts,
    check_functions,
    functions_sql,
)
from streamer.mapping.rules import RelationMapping
from streamer.postgres.quoting import quote_qualified
from streamer.source.catalog import SourceRelation, read_relations
from streamer.source.connection import Connection, fetch_all, first_line


async def read_expressions(plain: Connection, mapping: RelationMapping) -> ExpressionFacts:
    """Check the expressions of *mapping* at the source. Raises MappingError, SyncError."""
    relations = await read_relations(plain, [mapping.source])
    if mapping.source not in relations:
        raise SyncError(f'table "{mapping.source}" does not exist at the source')
    return await describe_expressions(plain, mapping, relations[mapping.source])


async def describe_expressions(
    plain: Connection, mapping: RelationMapping, relation: SourceRelation
) -> ExpressionFacts:
    """Make the source check the expressions of *mapping*. Raises MappingError for a rejected
    expression.

    The types of the values are missing if the role may not read the table.
    """
    sent = [column.name for column in relation.columns if not column.generated]
    inputs = mapping.expression_inputs(sent)
    functions = functions_sql(mapping.rule.expressions)
    rows = await fetch_all(plain, functions) if functions is not None else []
    oids: dict[str, int] = {}
    for place, expression in mapping.rule.named_expressions:
        try:
            check_functions(expression, rows)
        except ExpressionError as exc:
            raise MappingError(f'{place} of table "{mapping.source}": {exc}') from None
        is_filter = expression is mapping.rule.filter
        oid = await _read(plain, mapping, relation, place, expression, is_condition=is_filter)
        if oid is not None:
            oids[place.removeprefix("set ")] = oid
    return ExpressionFacts(
        types=await _type_names(plain, oids),
        collations={
            column.name: column.collation
            for column in relation.columns
            if column.collation is not None and column.name in inputs
        },
    )


async def describe_condition(
    plain: Connection,
    mapping: RelationMapping,
    relation: SourceRelation,
    condition: Expression,
    place: str,
) -> None:
    """Check at the source a condition over the rows of *relation*. Raises MappingError."""
    functions = functions_sql((condition,))
    rows = await fetch_all(plain, functions) if functions is not None else []
    try:
        check_functions(condition, rows)
    except ExpressionError as exc:
        raise MappingError(f'{place} of table "{mapping.source}": {exc}') from None
    await _read(plain, mapping, relation, place, condition, is_condition=True)


async def _read(
    plain: Connection,
    mapping: RelationMapping,
    relation: SourceRelation,
    place: str,
    expression: Expression,
    *,
    is_condition: bool,
) -> int | None:
    """Make the source parse an expression; return the type of the value."""
    quoted = quote_qualified(relation.name.namespace, relation.name.name)
    only = "" if relation.is_partitioned else "only "
    sql = f"select ({expression}) from {only}{quoted} limit 0"
    if is_condition:
        sql = f"select from {only}{quoted} where ({expression}) limit 0"
    try:
        cursor: Any = await plain.execute(sql.encode())
    except psycopg.errors.InsufficientPrivilege:
        return None
    except psycopg.Error as exc:
        if exc.sqlstate is None or exc.sqlstate[:2] not in ("22", "42", "2F", "0A", "39", "P0"):
            raise
        raise MappingError(
            f'{place} of table "{mapping.source}" is refused by the source: {first_line(exc)}',
            hint="correct the expression",
        ) from exc
    return None if is_condition else int(cursor.description[0].type_code)


async def _type_names(plain: Connection, oids: dict[str, int]) -> dict[str, str]:
    rows = await fetch_all(
        plain,
        "select o.oid, pg_catalog.format_type(o.oid::oid, -1) as name"
        " from pg_catalog.unnest(%s::int8[]) o (oid)",
        list(oids.values()),
    )
    names = {row["oid"]: row["name"] for row in rows}
    return {column: names[oid] for column, oid in oids.items()}
