"""Columns of target tables whose values existing rows lack.

``streamer.relation.unfilled`` keeps them until a copy has brought them, so that neither a failure
nor a pause loses one. The request makes a running process bring them now.
"""

import json
from collections.abc import Sequence
from typing import Final

from streamer.mapping.resync import Mode, Resync
from streamer.target.connection import TargetConnection

AUTOMATIC: Final = "automatic"
"""The option of a request that no operator has made: a pause of the table wins."""

_REMEMBER_SQL: Final = """
update streamer.relation
set unfilled = array(select distinct unnest(unfilled || $2::text[]) order by 1) where id = $1
"""
_REQUEST_SQL: Final = """
insert into streamer.request (relation_id, action, options) values ($1, 'resync', $2::text::jsonb)
"""


async def read_unfilled(connection: TargetConnection, relation_id: int) -> list[str]:
    """Return the columns whose values existing rows lack, by the target's names."""
    found = await connection.fetch_value(
        "select unfilled from streamer.relation where id = $1", relation_id
    )
    return list(found or ())


async def remember_unfilled(
    connection: TargetConnection, relation_id: int, columns: Sequence[str]
) -> None:
    """Remember that existing rows lack values of *columns*, by the target's names."""
    await connection.execute(_REMEMBER_SQL, relation_id, list(columns))


async def request_unfilled(
    connection: TargetConnection, relation_id: int, columns: Sequence[str]
) -> None:
    """Remember the same and request the values, in the transaction that *connection* is in."""
    await remember_unfilled(connection, relation_id, columns)
    await request_automatic(connection, relation_id, Resync(Mode.DIFF, columns=tuple(columns)))


async def request_automatic(connection: TargetConnection, relation_id: int, resync: Resync) -> None:
    """Make a request that no operator has made."""
    options = resync.to_json() | {AUTOMATIC: True}
    await connection.execute(_REQUEST_SQL, relation_id, json.dumps(options))
    await connection.execute("notify streamer")
