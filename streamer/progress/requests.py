"""The rows of streamer.request: operators' requests, and the notification that wakes the
process.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from streamer.mapping.resync import Resync
from streamer.progress.audit import write_acts
from streamer.progress.bookkeeping import Bookkeeping
from streamer.target.connection import TargetConnection, transaction

CHANNEL: Final = "streamer"
"""Notified when an operator makes a request, or `WAITING` when one waits for the sources."""

WAITING: Final = "wait"
WAITING_FOR_TABLES: Final = "wait tables"
"""Payload of a notification by `streamer wait`: store positions now, not when it suits."""


@dataclass(frozen=True, slots=True)
class Request:
    """A row of streamer.request: an operator's request."""

    request_id: int
    relation_id: int
    action: str
    options: dict[str, Any]
    is_to_point: bool = False
    """A resync of a table in sync, which applies changes up to the copy's point."""

    @property
    def resync(self) -> Resync:
        return Resync.from_json(self.options)


_REQUESTS_SQL: Final = """
select q.id as request_id, q.relation_id, q.action, q.options
from streamer.request q join streamer.relation r on r.id = q.relation_id
where r.source_id = $1 and q.action like 'quarantine%' order by q.id
"""
# A copy that is under way will do.
_RESYNC_SQL: Final = """
update streamer.relation set
    state = 'init', error = null, error_code = null, waiting_for = null, needs_resync = false,
    changed_at = now(),
    resync = $2::text::jsonb,
    attempt = case when snapshot_lsn is null then attempt else attempt + 1 end,
    snapshot_lsn = null
where id = $1 returning resync::text
"""
# A table in sync follows the stream up to the point of the copy.
_TO_POINT_SQL: Final = """
update streamer.relation set
    state = 'copying', error = null, error_code = null, waiting_for = null, changed_at = now(),
    resync = $2::text::jsonb, attempt = attempt + 1
where id = $1 and snapshot_lsn is not null and not needs_resync
  and ($3 or state in ('ready', 'catching_up', 'copying'))
returning resync::text
"""
# A table whose copy never finished has no snapshot_lsn: resuming it begins the copy.
_REQUESTED_STATE_SQL: Final = {
    "pause": "update streamer.relation set state = 'paused', changed_at = now() where id = $1",
    "resume": "update streamer.relation set"
    " state = case when snapshot_lsn is null then 'init'"
    " when resync is not null then 'copying' else 'ready' end,"
    " error = null, error_code = null, needs_resync = false,"
    " changed_at = now() where id = $1 and state in ('paused', 'error')",
}


async def make_request(
    bookkeeping: Bookkeeping,
    relation_id: int,
    action: str,
    options: dict[str, Any] | None = None,
    *,
    actor: str = "unknown",
) -> None:
    await make_requests(bookkeeping, [relation_id], action, options, actor=actor)


async def make_requests(
    bookkeeping: Bookkeeping,
    relation_ids: Sequence[int],
    action: str,
    options: dict[str, Any] | None = None,
    *,
    actor: str = "unknown",
) -> None:
    """Ask for the same of several relations at once: a start sees all of the requests or none.

    A source that needs a copy of all its tables would not start with requests for some of them.
    *actor*: the operator, for the audit.
    """
    async with bookkeeping.connection() as connection, transaction(connection):
        await connection.execute(
            "insert into streamer.request (relation_id, action, options)"
            " select relation_id, $2, $3 from pg_catalog.unnest($1::int8[]) r (relation_id)",
            list(relation_ids),
            action,
            json.dumps(options or {}),
        )
        await write_acts(connection, relation_ids, actor, action, options)
        await connection.execute(f"notify {CHANNEL}")


async def has_requests(connection: TargetConnection) -> bool:
    """Whether any request waits, for whichever source. The bookkeeping may not exist yet."""
    if not await connection.fetch_value("select to_regclass('streamer.request') is not null"):
        return False
    return bool(await connection.fetch_value("select exists (select from streamer.request)"))


async def take_requests(
    bookkeeping: Bookkeeping, source_id: int, pause: Callable[[int], None] = lambda _: None
) -> list[Request]:
    """Take the requests for a source's relations, in order, storing the requested states.

    *pause* is called with each relation to pause before readers can see that it is paused. Requests
    about rows in quarantine stay, see `quarantine_requests`.
    """
    async with bookkeeping.connection() as connection, transaction(connection):
        rows = await connection.fetch(
            "delete from streamer.request q using streamer.relation r"
            " where r.id = q.relation_id and r.source_id = $1 and q.action = any ($2)"
            " returning q.id as request_id, q.relation_id, q.action, q.options",
            source_id,
            ["resync", *_REQUESTED_STATE_SQL],
        )
        requests = []
        for request in sorted(map(_request, rows), key=lambda request: request.request_id):
            if request.action == "resync":
                if (taken := await _take_resync(connection, request)) is not None:
                    requests.append(taken)
                continue
            if request.action == "pause":
                pause(request.relation_id)
            await connection.execute(_REQUESTED_STATE_SQL[request.action], request.relation_id)
            requests.append(request)
    return requests


async def read_quarantine_requests(bookkeeping: Bookkeeping, source_id: int) -> list[Request]:
    """Return the requests that the lanes of a source fulfil, and then remove, in order."""
    async with bookkeeping.connection() as connection:
        return [_request(row) for row in await connection.fetch(_REQUESTS_SQL, source_id)]


def _request(row: Any) -> Request:
    return Request(row["request_id"], row["relation_id"], row["action"], json.loads(row["options"]))


async def _take_resync(connection: TargetConnection, request: Request) -> Request | None:
    """Store the request for a resync; return its effect.

    None: it is limited to some rows of a table of which a copy has to bring all.
    """
    resync = request.resync
    if resync.scope is not None:
        before = await connection.fetch_value(
            "select resync::text from streamer.relation where id = $1 and snapshot_lsn is not null",
            request.relation_id,
        )
        if before is not None:
            resync = resync.union(Resync.from_json(json.loads(before)))
        return await _store_to_point(connection, request, resync)
    stored = await connection.fetch_value(
        _RESYNC_SQL, request.relation_id, json.dumps(resync.to_json())
    )
    return replace(request, options=json.loads(stored))


async def _store_to_point(
    connection: TargetConnection, request: Request, resync: Resync
) -> Request | None:
    stored = await connection.fetch_value(
        _TO_POINT_SQL, request.relation_id, json.dumps(resync.to_json()), resync.scope is not None
    )
    if stored is None:
        return None
    return replace(request, options=json.loads(stored), is_to_point=True)
