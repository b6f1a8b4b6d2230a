"""The columns of streamer.relation that tell what the source's table was when its rows came.

``unfilled`` keeps columns whose values existing rows lack until a copy has brought them, so that
neither a failure nor a pause loses one. ``copy_is_due`` does the same for a copy of all rows. The
request makes a running process bring them now.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from streamer.progress.relations import RELATIONS
from streamer.progress.requests import request_automatic, resync_of_unfilled
from streamer.progress.table import Executor, to_json
from streamer.source.rewritten_tables import Storage
from streamer.target.connection import TargetConnection, transaction

_REMEMBER_SQL: Final = """
update streamer.relation
set unfilled = array(select distinct unnest(unfilled || $2::text[]) order by 1),
    copy_is_due = copy_is_due or $3
where id = $1
"""


async def read_unfilled(session: Executor, relation_id: int) -> list[str]:
    """Return the columns whose values existing rows lack, by the target's names."""
    found = await session.fetch_value(
        "select unfilled from streamer.relation where id = $1", relation_id
    )
    return list(found or ())


async def remember_unfilled(
    session: Executor, relation_id: int, columns: Sequence[str] | None
) -> None:
    """Remember that existing rows lack values of *columns*, by the target's names; None: of any."""
    await session.execute(_REMEMBER_SQL, relation_id, list(columns or ()), columns is None)


async def request_unfilled(
    session: Executor, relation_id: int, columns: Sequence[str] | None
) -> None:
    """Remember the same and request the values, in the transaction that *session* is in."""
    await remember_unfilled(session, relation_id, columns)
    await request_automatic(session, relation_id, resync_of_unfilled(columns))


async def read_known(
    session: Executor, relation_ids: Sequence[int] | None = None
) -> dict[int, dict[str, int]]:
    """Return the source's columns by their numbers as they were when each table was last in sync.

    By id of the relation, of those with such a record; *relation_ids*: None for all. The
    number of a column that the target did not get is negative.
    """
    rows = await session.fetch(
        "select id, columns::text from streamer.relation"
        " where columns is not null and ($1::int8[] is null or id = any ($1))",
        relation_ids,
    )
    return {row["id"]: json.loads(row["columns"]) for row in rows}


async def store_known(
    connection: TargetConnection,
    relation_id: int,
    columns: Mapping[str, int],
    wanted: Sequence[str] = (),
) -> None:
    """Store the columns of a table, and request those of *wanted* for existing rows."""
    async with transaction(connection):
        await RELATIONS.update(connection, {"columns": dict(columns)}, "where id = $2", relation_id)
        if wanted:
            await request_unfilled(connection, relation_id, wanted)


async def set_published(
    session: Executor, published: dict[int, tuple[str | None, str | None, int | None]]
) -> None:
    """Store the publication marks, replica identities and OIDs that relations, by id, have."""
    names = ("id", "publication_mark", "identity", "source_oid")
    rows = (dict(zip(names, (key, *values), strict=True)) for key, values in published.items())
    await RELATIONS.update_each(session, rows)


async def set_transports(session: Executor, transports: dict[int, tuple[str, str]]) -> None:
    """Store the transport of relations, by their id, and the reason."""
    names = ("id", "transport", "transport_reason")
    rows = (dict(zip(names, (key, *values), strict=True)) for key, values in transports.items())
    await RELATIONS.update_each(
        session,
        rows,
        "and (r.transport, r.transport_reason) is distinct from (v.transport, v.transport_reason)",
    )


async def read_known_leaves(
    session: Executor, relation_ids: list[int]
) -> dict[int, dict[int, str]]:
    """Return the replicated partitions of each partitioned relation.

    Each comes with the transactions that attached it; empty if an older version did not store them.
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
    """Return the bookkeeping's form of storage by OID; None if it is unknown."""
    return None if storage is None else {oid: its.stored for oid, its in storage.items()}


async def read_storage(session: Executor, relation_ids: list[int]) -> dict[int, dict[int, Storage]]:
    """Return the storage of the tables of relations, by their OIDs."""
    rows = await session.fetch(
        "select id, storage::text as storage from streamer.relation"
        " where id = any ($1::int8[]) and storage is not null",
        relation_ids,
    )
    return {
        row["id"]: {int(oid): Storage.of(its) for oid, its in json.loads(row["storage"]).items()}
        for row in rows
    }


async def set_storage(
    session: Executor,
    relation_id: int,
    storage: Mapping[int, Storage],
    before: Mapping[int, Storage] | None,
) -> bool:
    """Store the storage of the tables of a relation; return whether it was *before* until now. A
    copy stores another one.
    """
    rest = "and storage is not distinct from $3::text::jsonb"
    values = {"storage": stored_storage(storage)}
    known = None if before is None else to_json(stored_storage(before))
    return await RELATIONS.set(session, relation_id, values, rest, known)
