"""The storage of source tables when their rows and the stream agreed."""

import json
from collections.abc import Mapping

from streamer.progress.bookkeeping import Bookkeeping
from streamer.source.rewritten_tables import Storage


def to_json(storage: Mapping[int, Storage] | None) -> str | None:
    """Return the bookkeeping's form of storage by OID; None if it is unknown."""
    return (
        None if storage is None else json.dumps({oid: its.stored for oid, its in storage.items()})
    )


async def read_storage(
    bookkeeping: Bookkeeping, relation_ids: list[int]
) -> dict[int, dict[int, Storage]]:
    """Return the storage of the tables of relations, by their OIDs."""
    async with bookkeeping.connection() as connection:
        rows = await connection.fetch(
            "select id, storage::text as storage from streamer.relation"
            " where id = any ($1::int8[]) and storage is not null",
            relation_ids,
        )
    return {
        row["id"]: {int(oid): Storage.of(its) for oid, its in json.loads(row["storage"]).items()}
        for row in rows
    }


async def set_storage(
    bookkeeping: Bookkeeping,
    relation_id: int,
    storage: Mapping[int, Storage],
    before: Mapping[int, Storage] | None,
) -> bool:
    """Store the storage of the tables of a relation; return whether it was *before* until now. A
    copy stores another one.
    """
    async with bookkeeping.connection() as connection:
        stored = await connection.execute(
            "update streamer.relation set storage = $2::text::jsonb"
            " where id = $1 and storage is not distinct from $3::text::jsonb",
            relation_id,
            to_json(storage),
            to_json(before),
        )
    return bool(stored)
