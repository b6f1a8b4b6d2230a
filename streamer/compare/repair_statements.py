"""Renders the SQL that makes the target's rows equal to the source's rows, for an operator. Pure.

Each statement names a row by all values that the comparison found in the target. So a statement
does not affect a row that has changed since.
"""

from collections.abc import Iterator
from typing import Any

from streamer.compare.compared_table import ComparedTable
from streamer.postgres.quoting import quote_columns, quote_identifier, quote_literal

Values = dict[str, str | None]


def statements(table: ComparedTable, entry: dict[str, Any]) -> Iterator[str]:
    """Yield the statements for a key that differs; *entry* is a line of a report with values.

    A history table has no such statements, because versions need the times of the changes.
    """
    source_rows: list[Values] = list(entry.get("source") or [])
    target_rows: list[Values] = list(entry.get("target") or [])
    for values in list(target_rows):
        if values in source_rows:
            source_rows.remove(values)
            target_rows.remove(values)
    quoted = table.target.table
    into = quoted.removeprefix("only ")
    while source_rows and target_rows:
        values, old = source_rows.pop(0), target_rows.pop(0)
        changed = ", ".join(
            f"{quote_identifier(column)} = {_literal(value)}"
            for column, value in values.items()
            if old.get(column) != value
        )
        yield f"update {quoted} set {changed} where {_one(table, quoted, old)}"
    for old in () if table.keeps_more else target_rows:
        yield f"delete from {quoted} where {_one(table, quoted, old)}"
    sid_value = _sid_value(table)
    for values in source_rows:
        row = sid_value | values
        listed = ", ".join(_literal(value) for value in row.values())
        yield (
            f"insert into {into} ({quote_columns(row)}) overriding system value values ({listed})"
        )


def _sid_value(table: ComparedTable) -> Values:
    return {} if table.row_sid is None else {"sid": table.row_sid}


def _one(table: ComparedTable, quoted: str, values: Values) -> str:
    """Return the condition for a single row among several rows with *values*."""
    row = _sid_value(table) | values
    condition = " and ".join(
        f"{quote_identifier(column)} is null"
        if value is None
        else f"pg_catalog.format('%s', {quote_identifier(column)}) = {_literal(value)}"
        for column, value in row.items()
    )
    return f"(tableoid, ctid) = (select tableoid, ctid from {quoted} where {condition} limit 1)"


def _literal(value: str | None) -> str:
    return "null" if value is None else quote_literal(value)
