"""The audit of operators' acts: resync, pause, resume, and what is done with rows in quarantine."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from streamer.target.connection import TargetConnection


@dataclass(frozen=True, slots=True)
class Act:
    """What an operator asked for. ``label``: of which source and table."""

    id: int
    at: datetime
    actor: str
    action: str
    label: str
    options: str


async def write_acts(
    connection: TargetConnection,
    relation_ids: Sequence[int],
    actor: str,
    action: str,
    options: dict[str, Any] | None,
) -> None:
    """Write an act on each relation, in the transaction of its request."""
    await connection.execute(
        "insert into streamer.audit (actor, action, label, options)"
        " select $2::text, $3::text,"
        " pg_catalog.concat_ws(':', s.database, s.sid) || ' ' || r.source, $4::jsonb"
        " from streamer.relation r join streamer.source s on s.id = r.source_id"
        " where r.id = any ($1::int8[]) order by r.id",
        list(relation_ids),
        actor,
        action.replace("_", " "),
        json.dumps(options or {}),
    )


async def read_acts(connection: TargetConnection, limit: int) -> tuple[list[Act], int]:
    """Return the newest acts, and how many there are."""
    rows = await connection.fetch(
        "select id, at, actor, action, label, options::text,"
        " pg_catalog.count(*) over () as total"
        " from streamer.audit order by id desc limit $1",
        limit,
    )
    names = [field.name for field in fields(Act)]
    acts = [Act(**{name: row[name] for name in names}) for row in rows]
    return acts, rows[0]["total"] if rows else 0
