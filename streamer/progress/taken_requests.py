"""Takes operators' requests, and stores the states of the relations that they ask for."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from streamer.mapping.mass_delete import MassDelete
from streamer.mapping.names import parse_name
from streamer.mapping.resync import Mode, Resync, has_own_past
from streamer.mapping.rules import SourceMapping, find_rules
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.relation_columns import read_unfilled, remember_unfilled
from streamer.progress.requests import AUTOMATIC, Request, resync_of_unfilled, take
from streamer.target.connection import TargetConnection

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
    async with bookkeeping.transaction() as connection:
        requests = []
        for request in await take(connection, source_id):
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
