"""Values that existing rows of target tables lack: of some columns, or of any.

``streamer.relation.unfilled`` keeps the columns until a copy has brought them, so that neither a
failure nor a pause loses one. ``copy_is_due`` does the same for a copy of all rows. The request
makes a running process bring them now.
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
set unfilled = array(select distinct unnest(unfilled || $2::text[]) order by 1),
    copy_is_due = copy_is_due or $3
where id = $1
"""
_REQUEST_SQL: Final = """
insert into streamer.request (relation_id, action, options)
select $1, 'resync', $2::text::jsonb
where not exists (select from streamer.request
                  where relation_id = $1 and action = 'resync' and options = $2::text::jsonb)
"""


async def read_unfilled(connection: TargetConnection, relation_id: int) -> list[str]:
    """Return the columns whose values existing rows lack, by the target's names."""
    found = await connection.fetch_value(
        "select unfilled from streamer.relation where id = $1", relation_id
    )
    return list(found or ())


async def remember_unfilled(
    connection: TargetConnection, relation_id: int, columns: Sequence[str] | None
) -> None:
    """Remember that existing rows lack values of *columns*, by the target's names; None: of any."""
    await connection.execute(_REMEMBER_SQL, relation_id, list(columns or ()), columns is None)


async def request_unfilled(
    connection: TargetConnection, relation_id: int, columns: Sequence[str] | None
) -> None:
    """Remember the same and request the values, in the transaction that *connection* is in."""
    await remember_unfilled(connection, relation_id, columns)
    await request_automatic(connection, relation_id, resync_of_unfilled(columns))


def resync_of_unfilled(columns: Sequence[str] | None) -> Resync:
    """Return the copy that brings the values. Pure."""
    return Resync(Mode.DIFF, columns=None if columns is None else tuple(columns))


async def request_automatic(connection: TargetConnection, relation_id: int, resync: Resync) -> None:
    """Make a request that no operator has made, unless the same one waits already."""
    options = resync.to_json() | {AUTOMATIC: True}
    await connection.execute(_REQUEST_SQL, relation_id, json.dumps(options))
    await connection.execute("notify streamer")
