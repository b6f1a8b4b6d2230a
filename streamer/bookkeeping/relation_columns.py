"""The columns of streamer.relation that describe the source's table when its rows were copied.

``unfilled`` lists columns whose values existing rows lack, until a copy has written the values. So
neither a failure nor a pause loses a column. ``copy_is_due`` has the same purpose for a copy of all
rows. A request makes a running process begin the copy now.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from streamer.bookkeeping.bookkeeping_table import Executor, to_json
from streamer.bookkeeping.relation_records import RELATIONS
from streamer.bookkeeping.requests import request_automatic, resync_of_unfilled
from streamer.errors.remedies import Remedy
from streamer.source.tables.rewritten_tables import Storage
from streamer.target.connection import TargetConnection, transaction

_REMEMBER_SQL: Final = """
update streamer.relation
set unfilled = array(select distinct unnest(unfilled || $2::text[]) order by 1),
    copy_is_due = copy_is_due or $3
where id = $1
"""


async def read_unfilled(session: Executor, relation_id: int) -> list[str]:
    """Return the columns whose values existing rows lack, by the target's names."""
    columns = await session.fetch_value(
        "select unfilled from streamer.relation where id = $1", relation_id
    )
    return list(columns or ())


async def remember_unfilled(
    session: Executor, relation_id: int, columns: Sequence[str] | None
) -> None:
    """Record that existing rows lack values of *columns*, by the target's names; None for all
    columns.
    """
    await session.execute(_REMEMBER_SQL, relation_id, list(columns or ()), columns is None)


async def request_unfilled(
    session: Executor, relation_id: int, columns: Sequence[str] | None
) -> None:
    """Store *columns* as unfilled and request their values, in the transaction of *session*."""
    await remember_unfilled(session, relation_id, columns)
    await request_automatic(session, relation_id, resync_of_unfilled(columns))


async def read_source_columns(
    session: Executor, relation_ids: Sequence[int] | None = None
) -> dict[int, dict[str, int]]:
    """Return the number of each source column, by relation id and name, from when the table was
    last in sync.

    The result omits relations without recorded columns. *relation_ids*: None for all relations. The
    number of a column that the target did not get is negative.
    """
    rows = await session.fetch(
        "select id, columns::text from streamer.relation"
        " where columns is not null and ($1::int8[] is null or id = any ($1))",
        relation_ids,
    )
    return {row["id"]: json.loads(row["columns"]) for row in rows}


async def store_source_columns(
    connection: TargetConnection,
    relation_id: int,
    columns: Mapping[str, int],
    unfilled: Sequence[str] = (),
) -> None:
    """Store the columns of a table, and request the columns *unfilled* for existing rows."""
    async with transaction(connection):
        await RELATIONS.update(connection, {"columns": dict(columns)}, "where id = $2", relation_id)
        if unfilled:
            await request_unfilled(connection, relation_id, unfilled)


async def set_published(
    session: Executor,
    published: dict[int, tuple[str | None, str | None, int | None, Remedy | None]],
) -> None:
    """Store the fingerprints of publication memberships, replica identities, OIDs, and remedies of
    unusable identities, by the ids of relations.
    """
    names = ("id", "publication_membership", "identity", "source_oid", "identity_remedy")
    rows = (dict(zip(names, (key, *values), strict=True)) for key, values in published.items())
    await RELATIONS.update_each(session, rows)


async def set_transports(session: Executor, transports: dict[int, tuple[str, str]]) -> None:
    """Store the transport of relations, by id, and the reason."""
    names = ("id", "transport", "transport_reason")
    rows = (dict(zip(names, (key, *values), strict=True)) for key, values in transports.items())
    await RELATIONS.update_each(
        session,
        rows,
        "and (r.transport, r.transport_reason) is distinct from (v.transport, v.transport_reason)",
    )


async def read_stored_leaves(
    session: Executor, relation_ids: list[int]
) -> dict[int, dict[int, str]]:
    """Return the replicated partitions of each partitioned relation.

    The value for a partition is the transactions that attached it; empty if an older version did
    not store them.
    """
    rows = await session.fetch(
        "select id, leaves, leaf_joins from streamer.relation"
        " where id = any ($1::int8[]) and leaves is not null",
        relation_ids,
    )
    return {
        row["id"]: dict(
            zip(row["leaves"], row["leaf_joins"] or [""] * len(row["leaves"]), strict=True)
        )
        for row in rows
    }


async def set_leaves(session: Executor, relation_id: int, leaves: Mapping[int, str]) -> None:
    """Store the replicated partitions, with the transactions that attached them."""
    values = {"leaves": list(leaves), "leaf_joins": list(leaves.values())}
    await RELATIONS.set(session, relation_id, values)


def stored_storage(storage: Mapping[int, Storage] | None) -> dict[int, Any] | None:
    """Return the bookkeeping's form of *storage* by OID; None if unknown."""
    return None if storage is None else {oid: table.stored for oid, table in storage.items()}


async def read_storage(session: Executor, relation_ids: list[int]) -> dict[int, dict[int, Storage]]:
    """Return the storage of the tables of relations, by their OIDs."""
    rows = await session.fetch(
        "select id, storage::text as storage from streamer.relation"
        " where id = any ($1::int8[]) and storage is not null",
        relation_ids,
    )
    return {
        row["id"]: {int(oid): Storage.of(text) for oid, text in json.loads(row["storage"]).items()}
        for row in rows
    }


async def read_membership(session: Executor, relation_id: int) -> str | None:
    """Return the fingerprint of the relation's membership in a publication, if stored."""
    rows = await session.fetch(
        "select publication_membership from streamer.relation where id = $1", relation_id
    )
    return rows[0]["publication_membership"] if rows else None


@dataclass(frozen=True, slots=True)
class StorageChange:
    """A new value for the storage of a relation's tables, by OID, if the stored value is
    ``former``.
    """

    storage: Mapping[int, Storage]
    former: Mapping[int, Storage] | None


async def set_storage(session: Executor, changes: Mapping[int, StorageChange]) -> set[int]:
    """Store the storage of relations, by id; return the relations whose stored value was
    ``former``.

    A copy may have stored a newer value.
    """
    rows = [
        {
            "id": relation_id,
            "storage": stored_storage(change.storage),
            "former": stored_storage(change.former),
        }
        for relation_id, change in changes.items()
    ]
    stored = await session.fetch(_SET_STORAGE_SQL, to_json(rows)) if rows else []
    return {row["id"] for row in stored}


_SET_STORAGE_SQL: Final = """
update streamer.relation r set storage = v.storage
  from pg_catalog.jsonb_to_recordset($1::text::jsonb) v (id int8, storage jsonb, former jsonb)
 where r.id = v.id and r.storage is not distinct from v.former
returning r.id
"""
