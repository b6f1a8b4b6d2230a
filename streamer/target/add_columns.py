"""Adds source columns that the target table lacks.

RELATION contains a column's type as an OID. Built-in types have the same OIDs everywhere, so the
target has their names; only the source has the names of all other types.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import structlog

from streamer.decode.pgoutput import Relation
from streamer.errors.error_classes import (
    Retry,
    StreamerError,
    TargetRejectedError,
    TargetSchemaError,
)
from streamer.errors.remedies import Remedy, at_target
from streamer.mapping.relation_names import RelationName
from streamer.mapping.sid_and_history_columns import STABLE_OIDS_END
from streamer.postgres.quoting import quote_qualified
from streamer.schema.desired_columns import add_columns_sql
from streamer.schema.indexes_constraints_types import base_type
from streamer.schema.source_definition import DefinedColumn
from streamer.target.connection import (
    TargetAddress,
    TargetConnection,
    target_connection,
    transaction,
)
from streamer.target.missing_types import ReadTypes, refuse_missing_types

log = structlog.get_logger()

LOCK_SECONDS: Final = 3
"""Seconds that ALTER TABLE waits for its lock; later statements on the table queue behind it."""

TypeKey = tuple[int, int]
"""OID and modifier of a type."""

ReadTypeNames = Callable[[str, str | None, Sequence[TypeKey]], Awaitable[dict[TypeKey, str]]]
"""Reads the names of types at the source with a database and sid."""

_TYPE_NAMES_SQL: Final = """
select k.oid, k.modifier, pg_catalog.format_type(t.oid, k.modifier) as name
from unnest($1::int8[], $2::int4[]) k (oid, modifier)
join pg_catalog.pg_type t on t.oid = k.oid::oid
"""


def type_keys(relation: Relation, names: Sequence[str]) -> dict[str, TypeKey]:
    """Return the types of the columns *names* of *relation*."""
    return {
        column.name: (column.type_oid, column.type_modifier)
        for column in relation.columns
        if column.name in names
    }


async def read_own_type_names(
    connection: TargetConnection, keys: Sequence[TypeKey]
) -> dict[TypeKey, str]:
    """Return the names of the built-in types among *keys*."""
    builtin = [(oid, modifier) for oid, modifier in keys if oid < STABLE_OIDS_END]
    if not builtin:
        return {}
    rows = await connection.fetch(
        _TYPE_NAMES_SQL, [oid for oid, _ in builtin], [modifier for _, modifier in builtin]
    )
    return {(row["oid"], row["modifier"]): row["name"] for row in rows}


async def add_columns(
    address: TargetAddress,
    target: RelationName,
    columns: Sequence[DefinedColumn],
    read: ReadTypes,
) -> None:
    """Add *columns* to *target*, unless they exist by now. *read* reads the names of their types at
    the source. The function uses a separate connection and commits before it returns, because other
    tasks may fill the table meanwhile. Raises TargetContentionError if the table stays locked,
    TargetSchemaError and TargetRejectedError with the statement to run.
    """
    quoted = quote_qualified(target.namespace, target.name)
    statements = add_columns_sql(quoted, columns, if_not_exists=True)
    async with target_connection(address, "streamer columns") as connection:
        await refuse_missing_types(connection, {base_type(c.type) for c in columns}, read)
        try:
            async with transaction(connection):
                await connection.execute(f"set local lock_timeout = '{LOCK_SECONDS}s'")
                for statement in statements:
                    await connection.execute(statement)
        except StreamerError as exc:
            if exc.retry is Retry.TIMED:
                raise
            is_right = isinstance(exc, TargetRejectedError)
            listed = ", ".join(f'"{column.name}"' for column in columns)
            raise (TargetRejectedError if is_right else TargetSchemaError)(
                f'column {listed} cannot be added to target table "{target}": {exc.message}',
                hint=Remedy.of(
                    "run at the target: ",
                    at_target(*statements),
                    "; or exclude the column in the mapping",
                ),
            ) from exc
    log.info("columns added", table=str(target), sql="; ".join(statements))
