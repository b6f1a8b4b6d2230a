"""Takes operators' requests, and stores the states of the relations that they ask for."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from streamer.mapping.names import parse_name
from streamer.mapping.resync import Mode, Resync, has_own_past
from streamer.mapping.rules import SourceMapping, find_rules
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.relation_columns import remember_unfilled
from streamer.progress.relation_states import NO_COPY
from streamer.progress.relations import RELATIONS, RelationRecord
from streamer.progress.requests import AUTOMATIC, Request, resync_of_unfilled, take
from streamer.progress.table import Values
from streamer.progress.table_state import Need, State
from streamer.target.connection import TargetConnection

_LACKING: Final = """
where source_id = $1 and ($2::int8 is null or id = $2) and (unfilled <> '{}' or copy_is_due)
  and resync is null and state <> 'paused' order by id for update of r
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
    requests = []
    async with bookkeeping.transaction() as connection:
        for request in await take(connection, source_id):
            record = await _lock(connection, request.relation_id)
            match request.action:
                case "resync":
                    requests += await _take_resync(connection, request, record, source)
                case "resume" if taken := await _take_resume(connection, request, record):
                    requests.append(taken)
                    requests += await _take_unfilled(connection, source_id, request.relation_id)
                case "pause":
                    pause(request.relation_id)
                    await _store(connection, record, {"state": record.table_state.paused().shown})
                    requests.append(request)
        if begins:
            requests += await _take_unfilled(connection, source_id)
    return requests


async def _lock(connection: TargetConnection, relation_id: int) -> RelationRecord:
    """Return the row of a relation, which stays locked until the transaction ends."""
    record = await RELATIONS.find(connection, "where r.id = $1 for update of r", relation_id)
    assert record is not None, "a foreign key of streamer.request holds the row"
    return record


async def _store(connection: TargetConnection, record: RelationRecord, values: Values) -> None:
    await RELATIONS.set(connection, record.relation_id, values, also="changed_at = now()")


async def _take_resume(
    connection: TargetConnection, request: Request, record: RelationRecord
) -> Request | None:
    """Store the request to resume; return its effect, or None without one.

    It has none if the table was paused before a mass delete after the request was made: the
    operator has not seen that.
    """
    brake, state = record.brake, record.table_state
    if brake is not None and not brake.is_decided:
        if request.options.get("lsn") != str(brake.lsn):
            return None
        brake = brake.decide(skips=bool(request.options.get("skip_deletes")))
    if (resumed := state.resumed()) != state:
        values = {
            "state": resumed.shown,
            "error": None,
            "needs_resync": False,
            "brake": brake,
            "outlives": record.outlives or (brake is not None and brake.skips),
        }
        await _store(connection, record, values)
    return replace(request, options={"brake": None if brake is None else brake.to_json()})


async def _take_unfilled(
    connection: TargetConnection, source_id: int, relation_id: int | None = None
) -> list[Request]:
    """Begin to bring values that existing rows of relations lack: of one, or of all."""
    taken = []
    for record in await RELATIONS.read(connection, _LACKING, source_id, relation_id):
        is_due = record.copy_is_due and (record.type == "clone" or not record.quarantined)
        if is_due or record.unfilled:
            resync = resync_of_unfilled(None if is_due else record.unfilled)
            options = resync.to_json() | {AUTOMATIC: True}
            request = Request(0, record.relation_id, "resync", options)
            taken += await _store_to_point(connection, request, record, resync, is_sure=True)
    return taken


async def _take_resync(
    connection: TargetConnection, request: Request, record: RelationRecord, source: SourceMapping
) -> list[Request]:
    """Store the request for a resync; return its effect.

    Empty: it is limited to some rows of a table of which a copy has to bring all. Or streamer
    itself asks for columns of a table that is paused: `resume` will bring them. Or changes are
    lost, the table has a past of its own, and the operator has not consented (`refuse_gap`).
    """
    resync, state = request.resync, record.table_state
    is_automatic = bool(request.options.get(AUTOMATIC))
    stays_paused = is_automatic and state.is_paused
    if stays_paused and resync.columns is not None:
        return []
    if resync.is_partial:
        if state.need is Need.PART:
            resync = resync.union(state.resync)
        return await _store_to_point(connection, request, record, resync)
    if not resync.skips_changes:
        if has_own_past(record.type) and (state.is_lost or record.quarantined):
            return []
        keeps_past = _keeps_past(source, record.source)
        if keeps_past or (resync.compares and not resync.force):
            # Such a copy compares, so that it follows the stream after a restart, too.
            wanted = replace(resync, mode=Mode.DIFF)
            taken = await _store_to_point(
                connection, request, record, wanted, stays_paused=stays_paused, is_sure=keeps_past
            )
            if taken:
                return taken
    # A copy that is under way will do. Rows that `initial: none` declared to be those of the source
    # are its to replace once an operator asks for a copy.
    values = NO_COPY | {
        "state": state.asked_for_rows(resync).shown,
        "error": None,
        "needs_resync": False,
        "resync": resync,
        "owns_rows": record.owns_rows or (record.declared and not is_automatic),
        "attempt": record.attempt + (record.snapshot_lsn is not None),
    }
    await _store(connection, record, values)
    return [replace(request, options=resync.to_json())]


def _keeps_past(source: SourceMapping, table: str) -> bool:
    name = parse_name(table)
    rule = find_rules(source, [name]).get(name)
    return rule is not None and rule.keeps_past


async def _store_to_point(
    connection: TargetConnection,
    request: Request,
    record: RelationRecord,
    resync: Resync,
    *,
    stays_paused: bool = False,
    is_sure: bool = False,
) -> list[Request]:
    """*is_sure*: the table goes to the point from any state. Otherwise one that is paused or in
    error gets a copy of all rows, which does without its changes.
    """
    state = record.table_state
    if resync.columns is not None:  # they stay wanted if the copy fails
        await remember_unfilled(connection, request.relation_id, resync.columns)
        # So this copy brings them, too, if one that failed was to bring others.
        resync = replace(resync, columns=tuple(sorted({*record.unfilled, *resync.columns})))
    is_waiting = state.shown in (State.PAUSED, State.ERROR)
    if state.need not in (Need.NOTHING, Need.PART):
        return []
    if is_waiting and not (is_sure or resync.is_partial):
        return []
    is_of_operator = not request.options.get(AUTOMATIC) and resync.columns is None
    values = {
        "state": state.asked_for_part(resync, stays_paused=stays_paused).shown,
        "error": None,
        "waiting_for": None,
        "resync": resync,
        "attempt": record.attempt + 1,
        "owns_rows": record.owns_rows or (record.declared and is_of_operator),
    }
    await _store(connection, record, values)
    options = resync.to_json()
    return [replace(request, options=options, is_to_point=True, stays_paused=stays_paused)]
