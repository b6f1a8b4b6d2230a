"""The audit of operators' acts on tables, rows in quarantine, indexes and sources.

Each act removes the acts that are older than `KEPT_DAYS`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.table import BookkeepingTable, Executor
from streamer.target.connection import TargetConnection

TEARDOWN: Final = "teardown"
BUILD_INDEX: Final = "build index"
_OBJECTS: Final = {TEARDOWN: "source", BUILD_INDEX: "index"}
KEPT_DAYS: Final = 400
"""The age at which both audits, of the target and of the mapping database, drop a row."""


@dataclass(frozen=True, slots=True)
class Act:
    """An operator's act. ``label``: the source and its table, the source, or the target table."""

    id: int
    at: datetime
    actor: str
    action: str
    label: str
    options: str

    @property
    def object(self) -> str:
        """The kind of thing that ``label`` names."""
        return _OBJECTS.get(self.action, "table")


ACTS: Final = BookkeepingTable("audit", "a", Act)


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
        json.dumps(_without_keys(options or {})),
    )
    await prune_acts(connection)


def _without_keys(options: dict[str, Any]) -> dict[str, Any]:
    """Return *options* with the number of keys in the place of keys, which are values of rows."""
    scope = options.get("scope")
    if not scope:
        return options
    count = sum(len(keys["rows"]) for keys in scope.get("keys", ()))
    return {**options, "scope": {**scope, "keys": count}}


async def write_act(
    bookkeeping: Bookkeeping,
    actor: str,
    action: str,
    label: str,
    options: dict[str, Any] | None = None,
) -> None:
    """Write an act on *label* that makes no request, before the work it names begins."""
    act = {"actor": actor, "action": action, "label": label, "options": options or {}}
    async with bookkeeping.transaction() as connection:
        await ACTS.insert(connection, [act])
        await prune_acts(connection)


async def prune_acts(session: Executor) -> None:
    """Remove the acts that are too old."""
    await ACTS.delete(
        session, "where at < pg_catalog.now() - pg_catalog.make_interval(days => $1)", KEPT_DAYS
    )


async def read_acts(session: Executor, limit: int) -> tuple[list[Act], int]:
    """Return the newest acts, and how many there are."""
    acts = await ACTS.read(session, "order by id desc limit $1", limit)
    return acts, await session.fetch_value("select pg_catalog.count(*) from streamer.audit")
