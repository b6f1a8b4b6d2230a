"""Removes a relation whose table a session dropped at the source, as `on_table_dropped` says.

A single transaction ends the open versions of a history and removes the relation's record. A crash
before its COMMIT leaves the record, and the next start finds the table missing again.
"""

from typing import Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.registered_relations import remove_dropped
from streamer.mapping.rules import RelationMapping
from streamer.mapping.sid_and_history_columns import SID
from streamer.postgres.quoting import quote_identifier
from streamer.target.catalog import read_relation
from streamer.target.connection import may_replace_role, transaction
from streamer.util.failpoints import failpoint

_AT: Final = "$1::text::timestamptz"


async def forget_dropped(
    bookkeeping: Bookkeeping,
    relation_id: int,
    mapping: RelationMapping,
    *,
    ends_at: str | None,
) -> None:
    """Remove a relation; *ends_at*: the time at which open versions of its rows end, if any.

    streamer copies a later table with the same name like any new table.
    """
    async with bookkeeping.connection() as connection:
        role = await may_replace_role(connection)
        async with transaction(connection):
            relation = await read_relation(connection, mapping.target)
            if ends_at is not None and relation is not None:
                if role:
                    await connection.execute("set local session_replication_role = replica")
                condition = "true"
                values = [ends_at]
                history = mapping.rule.history
                if relation.has_sid and mapping.sid is not None:
                    condition = f"{quote_identifier(SID)}::text = $2"
                    values.append(mapping.sid)
                await connection.execute(
                    f"update {relation.rows} set {history.end_sql(_AT, 'true')}"
                    f" where {history.is_open()} and {condition}",
                    *values,
                )
            await remove_dropped(connection, relation_id)
            failpoint("drop.forgetting")
        failpoint("drop.forgotten")
