"""The rows of streamer.request: operators' requests, and the notification that wakes the
process.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from streamer.mapping.mass_delete import MassDelete
from streamer.mapping.names import parse_name
from streamer.mapping.resync import Mode, Resync, has_own_past
from streamer.mapping.rules import SourceMapping, find_rules
from streamer.progress.audit import write_acts
from streamer.progress.bookkeeping import Bookkeeping
from streamer.target.connection import TargetConnection, transaction
from streamer.target.unfilled_columns import (
    AUTOMATIC,
    read_unfilled,
    remember_unfilled,
    resync_of_unfilled,
)

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
    stays_paused: bool = False
    """No operator has asked for this resync: it begins when one resumes the table."""

    @property
    def resync(self) -> Resync:
        return Resync.from_json(self.options)

    @property
    def decided(self) -> MassDelete | None:
        """The mass delete about which a taken request to resume has decided."""
        brake = self.options.get("brake")
        return None if brake is None else MassDelete.from_json(brake)


_REQUESTS_SQL: Final = """
select q.id as request_id, q.relation_id, q.action, q.options
from streamer.request q join streamer.relation r on r.id = q.relation_id
where r.source_id = $1 and q.action like 'quarantine%' order by q.id
"""
# A copy that is under way will do. Rows that `initial: none` declared to be those of the source are
# its to replace once an operator asks for a copy.
_RESYNC_SQL: Final = """
update streamer.relation set
    state = 'init', error = null, error_code = null, error_remedy = null, waiting_for = null,
    needs_resync = false,
    changed_at = now(), brake = null, outlives = false, owns_rows = owns_rows or (declared and $3),
    resync = $2::text::jsonb,
    attempt = case when snapshot_lsn is null then attempt else attempt + 1 end,
    snapshot_lsn = null, chunks = null
where id = $1 returning resync::text
"""
# A table in sync follows the stream up to the point of the copy.
_TO_POINT_SQL: Final = """
update streamer.relation set
    state = case when $4 then state else 'copying' end,
    error = null, error_code = null, error_remedy = null, waiting_for = null, changed_at = now(),
    resync = $2::text::jsonb, attempt = attempt + 1,
    owns_rows = owns_rows or (declared and $5)
where id = $1 and snapshot_lsn is not null and not needs_resync
  and ($3 or state in ('ready', 'catching_up', 'copying'))
returning resync::text
"""
_TABLE_SQL: Final = """
select source, type, state, snapshot_lsn, needs_resync, resync::text as resync,
       exists (select from streamer.quarantine q where q.relation_id = r.id) as has_quarantined
from streamer.relation r where id = $1 for update
"""
_PAUSE_SQL: Final = (
    "update streamer.relation set state = 'paused', changed_at = now() where id = $1"
)
# A table whose copy never finished has no snapshot_lsn: resuming it begins the copy.
_RESUME_SQL: Final = """
update streamer.relation set
    state = case when snapshot_lsn is null then 'init'
                 when resync is not null then 'copying' else 'ready' end,
    error = null, error_code = null, error_remedy = null, needs_resync = false,
    brake = $2::text::jsonb,
    outlives = outlives or coalesce(($2::text::jsonb->>'skips')::boolean, false),
    changed_at = now()
where id = $1 and state in ('paused', 'error')
"""
_UNFILLED_SQL: Final = """
select r.id, unfilled, w.is_due
from streamer.relation r, lateral (
    select copy_is_due and (type = 'clone' or not exists (
        select from streamer.quarantine q where q.relation_id = r.id)) as is_due) w
where source_id = $1 and ($2::int8 is null or id = $2) and (unfilled <> '{}' or w.is_due)
  and resync is null and state <> 'paused'
order by id for update of r
"""
# A request to resume is about the transaction that the operator has seen.
_INSERT_SQL: Final = """
insert into streamer.request (relation_id, action, options)
select r.id, $2, $3::text::jsonb || case when $2 = 'resume' and r.brake is not null
       then jsonb_build_object('lsn', r.brake->>'lsn') else '{}' end
from streamer.relation r where r.id = any ($1::int8[]) order by r.id
"""


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
            _INSERT_SQL,
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
    bookkeeping: Bookkeeping,
    source_id: int,
    source: SourceMapping,
    pause: Callable[[int], None] = lambda _: None,
    *,
    begins: bool = False,
) -> list[Request]:
    """Take the requests for a source's relations, in order, storing the requested states.

    A start, *begins*, and a request to resume bring values that existing rows still lack. The
    rules of *source* tell which tables keep their past.

    *pause* is called with each relation to pause before readers can see that it is paused. Requests
    about rows in quarantine stay, see `quarantine_requests`.
    """
    async with bookkeeping.connection() as connection, transaction(connection):
        rows = await connection.fetch(
            "delete from streamer.request q using streamer.relation r"
            " where r.id = q.relation_id and r.source_id = $1 and q.action = any ($2)"
            " returning q.id as request_id, q.relation_id, q.action, q.options",
            source_id,
            ["resync", "resume", "pause"],
        )
        requests = []
        for request in sorted(map(_request, rows), key=lambda request: request.request_id):
            if request.action == "resync":
                if (taken := await _take_resync(connection, request, source)) is not None:
                    requests.append(taken)
                continue
            if request.action == "resume":
                if (taken := await _take_resume(connection, request)) is not None:
                    requests.append(taken)
                    requests += await _take_unfilled(connection, source_id, request.relation_id)
                continue
            pause(request.relation_id)
            await connection.execute(_PAUSE_SQL, request.relation_id)
            requests.append(request)
        if begins:
            requests += await _take_unfilled(connection, source_id)
    return requests


async def _take_resume(connection: TargetConnection, request: Request) -> Request | None:
    """Store the request to resume; return its effect, or None without one.

    It has none if the table was paused before a mass delete after the request was made: the
    operator has not seen that.
    """
    brake = MassDelete.stored(
        await connection.fetch_value(
            "select brake::text from streamer.relation where id = $1 for update",
            request.relation_id,
        )
    )
    if brake is not None and not brake.is_decided:
        if request.options.get("lsn") != str(brake.lsn):
            return None
        brake = brake.decide(skips=bool(request.options.get("skip_deletes")))
    stored = None if brake is None else brake.to_json()
    await connection.execute(
        _RESUME_SQL, request.relation_id, None if stored is None else json.dumps(stored)
    )
    return replace(request, options={"brake": stored})


async def _take_unfilled(
    connection: TargetConnection, source_id: int, relation_id: int | None = None
) -> list[Request]:
    """Begin to bring values that existing rows of relations lack: of one, or of all."""
    taken = []
    for row in await connection.fetch(_UNFILLED_SQL, source_id, relation_id):
        resync = resync_of_unfilled(None if row["is_due"] else row["unfilled"])
        request = Request(0, row["id"], "resync", resync.to_json() | {AUTOMATIC: True})
        stored = await _store_to_point(connection, request, resync, is_sure=True)
        if stored is not None:
            taken.append(stored)
    return taken


async def read_quarantine_requests(bookkeeping: Bookkeeping, source_id: int) -> list[Request]:
    """Return the requests that the lanes of a source fulfil, and then remove, in order."""
    async with bookkeeping.connection() as connection:
        return [_request(row) for row in await connection.fetch(_REQUESTS_SQL, source_id)]


def _request(row: Any) -> Request:
    return Request(row["request_id"], row["relation_id"], row["action"], json.loads(row["options"]))


async def _take_resync(
    connection: TargetConnection, request: Request, source: SourceMapping
) -> Request | None:
    """Store the request for a resync; return its effect.

    None: it is limited to some rows of a table of which a copy has to bring all. Or streamer itself
    asks for columns of a table that is paused: `resume` will bring them. Or changes are lost, the
    table has a past of its own, and the operator has not consented (`refuse_gap`).
    """
    resync = request.resync
    (table,) = await connection.fetch(_TABLE_SQL, request.relation_id)
    is_automatic = bool(request.options.get(AUTOMATIC))
    stays_paused = is_automatic and table["state"] == "paused"
    if stays_paused and resync.columns is not None:
        return None
    if resync.is_partial:
        if table["snapshot_lsn"] is not None and table["resync"] is not None:
            resync = resync.union(Resync.from_json(json.loads(table["resync"])))
        return await _store_to_point(connection, request, resync)
    if not resync.skips_changes:
        if has_own_past(table["type"]) and (table["needs_resync"] or table["has_quarantined"]):
            return None
        keeps_past = _keeps_past(source, table["source"])
        if keeps_past or (resync.compares and not resync.force):
            # Such a copy compares, so that it follows the stream after a restart, too.
            wanted = replace(resync, mode=Mode.DIFF)
            taken = await _store_to_point(
                connection, request, wanted, stays_paused=stays_paused, is_sure=keeps_past
            )
            if taken is not None:
                return taken
    stored = await connection.fetch_value(
        _RESYNC_SQL, request.relation_id, json.dumps(resync.to_json()), not is_automatic
    )
    return replace(request, options=json.loads(stored))


def _keeps_past(source: SourceMapping, table: str) -> bool:
    name = parse_name(table)
    rule = find_rules(source, [name]).get(name)
    return rule is not None and rule.keeps_past


async def _store_to_point(
    connection: TargetConnection,
    request: Request,
    resync: Resync,
    *,
    stays_paused: bool = False,
    is_sure: bool = False,
) -> Request | None:
    """*is_sure*: the table goes to the point from any state. Otherwise one that is paused or in
    error gets a copy of all rows, which does without its changes.
    """
    if resync.columns is not None:  # they stay wanted if the copy fails
        await remember_unfilled(connection, request.relation_id, resync.columns)
        # So this copy brings them, too, if one that failed was to bring others.
        wanted = await read_unfilled(connection, request.relation_id)
        resync = replace(resync, columns=tuple(wanted))
    stored = await connection.fetch_value(
        _TO_POINT_SQL,
        request.relation_id,
        json.dumps(resync.to_json()),
        is_sure or resync.is_partial,
        stays_paused,
        not request.options.get(AUTOMATIC) and resync.columns is None,
    )
    if stored is None:
        return None
    return replace(request, options=json.loads(stored), is_to_point=True, stays_paused=stays_paused)
