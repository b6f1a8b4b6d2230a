"""The target table of several tenants, which fits the definitions of all tenants.

The first tenant creates the table. Before the first copy of each later tenant, streamer adds
missing columns, widens narrower types, and drops NOT NULL from columns that the tenant lacks. If
each schema has an enum of its own, the target's enum gets the labels that it lacks. The values of
earlier tenants do not change, so the order of the tenants does not matter.

streamer widens only tables that it created, of sources that do not capture definitions. With the
capture, `streamer.schema_changes.changes_during_copy` makes these changes, and `on_ddl` decides.
"""

import structlog

from streamer.bookkeeping.relation_records import read_created
from streamer.errors.error_classes import (
    Retry,
    StreamerError,
    TargetRejectedError,
    TargetSchemaError,
)
from streamer.errors.remedies import Remedy, at_target
from streamer.mapping.rules import RelationMapping
from streamer.postgres.quoting import quote_qualified
from streamer.schema.target_relation import TargetRelation
from streamer.schema_changes.read_definitions import read_target_types
from streamer.schema_changes.translate.joining_source import widening_statements
from streamer.source.catalog import SourceRelation
from streamer.target.add_columns import LOCK_SECONDS
from streamer.target.catalog import read_relation
from streamer.target.connection import (
    TargetAddress,
    TargetConnection,
    target_connection,
    transaction,
)
from streamer.target.foreign_functions import ForeignCalls

log = structlog.get_logger()


async def widen_shared_table(
    address: TargetAddress,
    target: TargetConnection,
    table: TargetRelation,
    relation: SourceRelation,
    mapping: RelationMapping,
) -> TargetRelation:
    """Widen a table that streamer created for several tenants; return the new definition.

    The statements run on a separate connection, and have committed when the function returns.
    Raises TargetContentionError if the table stays locked, TargetSchemaError with the statements if
    the role lacks the privilege.
    """
    definition = relation.definition
    types = await read_target_types(target, table) if definition.types else []
    statements = widening_statements(definition, mapping, table, types)
    if not statements:
        return table
    if table.name not in await read_created(target, [table.name]):
        return table
    try:
        async with (
            target_connection(address, "streamer columns") as connection,
            transaction(connection),
        ):
            await connection.execute(f"set local lock_timeout = '{LOCK_SECONDS}s'")
            # Two tenants may join at the same time: the second tenant sees the columns of the
            # first.
            quoted = quote_qualified(table.name.namespace, table.name.name)
            await connection.execute(f"lock table {quoted} in access exclusive mode")
            present = await read_relation(connection, table.name) or table
            types = await read_target_types(connection, present) if definition.types else []
            statements = widening_statements(definition, mapping, present, types)
            calls = await ForeignCalls.before(connection, [quoted])
            for statement in statements:
                await connection.execute(statement)
            await calls.refuse()
    except StreamerError as exc:
        if exc.retry is Retry.TIMED:
            raise
        # An operator's role may run the statements; the message names all causes.
        is_forbidden = isinstance(exc, TargetRejectedError)
        by_hand = Remedy.of("have its owner run at the target: ", at_target(*statements))
        raise TargetSchemaError(
            f'target table "{table.name}" cannot take the rows of this source: {exc.message}',
            hint=by_hand if is_forbidden else exc.remedy,
        ) from exc
    if statements:
        log.info("shared table widened", table=str(table.name), sql="; ".join(statements))
    return await read_relation(target, table.name) or table
