"""Takes operators' requests, and stores the requested states of relations."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_table import Values
from streamer.bookkeeping.ddl_records import APPLY, SKIP, WAITING, decide, read_progress
from streamer.bookkeeping.relation_columns import remember_unfilled
from streamer.bookkeeping.relation_records import RELATIONS, RelationRecord
from streamer.bookkeeping.relation_states import NO_COPY
from streamer.bookkeeping.requests import (
    AUTOMATIC,
    REQUESTS,
    RESTART,
    Request,
    end_request,
    read_taken,
    resync_of_unfilled,
    take,
)
from streamer.control.resync_options import SKIP_CHANGES, Mode, Resync, keeps_deleted_rows
from streamer.control.table_state import ALL_ROWS, Need, State, TableState
from streamer.errors.command_lines import command
from streamer.errors.error_classes import DefinitionStopError, GapError, MappingError, StreamerError
from streamer.errors.error_reports import ErrorReport
from streamer.errors.remedies import Remedy, run
from streamer.mapping.disjoint_keys import describe_unguarded
from streamer.mapping.relation_names import parse_name
from streamer.mapping.rules import Named, SourceMapping, find_rules
from streamer.target.connection import TargetConnection
from streamer.util.failpoints import failpoint

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
    """Take the requests for a source's relations, in order, and store the requested states.

    At a start (*begins*), and with a request to resume, also request values that existing rows
    still lack. The rules of *source* decide which tables keep history.

    The function calls *pause* with each relation to pause, before readers can see the pause.
    Requests about rows in quarantine stay queued, see `read_quarantine_requests`.
    """
    requests = []
    async with bookkeeping.transaction() as connection:
        for request in await take(connection, source_id):
            if request.action == RESTART:  # stays taken until the next attempt begins
                requests.append(request)
                continue
            assert request.relation_id is not None, "only a restart concerns no table"
            record = await _lock(connection, request.relation_id)
            error: StreamerError | None = None
            is_open = False  # the outcome is not decided yet
            match request.action:
                case "resync":
                    effect = await _take_resync(connection, request, record, source)
                    if isinstance(effect, StreamerError):
                        error = effect
                    else:
                        requests += effect
                        is_open = bool(effect)
                case "resume":
                    resumed = await _take_resume(connection, request, record, source)
                    if isinstance(resumed, StreamerError):
                        error = resumed
                    else:
                        requests.append(resumed)
                        requests += await _take_unfilled(connection, source_id, record.relation_id)
                case "pause":
                    pause(record.relation_id)
                    await _store(connection, record, {"state": record.table_state.paused().shown})
                    requests.append(request)
                case _:
                    error = await _take_decision(connection, request, record)
                    is_open = error is None
            if not is_open:
                report = None if error is None else ErrorReport.of(error)
                await end_request(connection, request.request_id, report)
        if begins:
            requests += await _take_unfilled(connection, source_id)
    return requests


async def store_outcomes(bookkeeping: Bookkeeping, source_id: int) -> set[int]:
    """End the taken requests of a source that are fulfilled or failed; return the ids of the
    relations with unfinished requests.

    The outcome depends only on stored states, so a new process finds outcomes that its predecessor
    did not store. A row of a relation may be locked for long, so this function does not wait.
    """
    waiting = set()
    requests = await read_taken(bookkeeping, source_id)
    ids = [request.relation_id for request in requests]
    records = await RELATIONS.read(bookkeeping, "where r.id = any ($1::int8[])", ids) if ids else []
    states = {record.relation_id: record.table_state for record in records}
    for request in requests:
        if (state := states.get(request.relation_id or 0)) is None:
            continue  # the table has left the mapping meanwhile
        if request.action == "resync":
            is_done, error = outcome(state)
        else:
            is_done, error = decided(*await read_progress(bookkeeping, request.options["ddl"]))
        if is_done:
            failpoint("requests.ended")
            await end_request(bookkeeping, request.request_id, error)
        else:
            waiting.add(request.relation_id or 0)
    return waiting


def outcome(state: TableState) -> tuple[bool, ErrorReport | None]:
    """Return whether the requested copy has ended, and its error. Pure."""
    is_in_sync = state.need is Need.NOTHING and state.shown is not State.ERROR
    if is_in_sync and state.error is not None and state.error.code == GapError.code:
        return True, None  # the copy succeeded, and the gap appeared later
    return state.need in (Need.NOTHING, Need.REQUEST) or state.shown is State.ERROR, state.error


def decided(state: str, reason: str | None) -> tuple[bool, ErrorReport | None]:
    """Return whether a decision about a definition has taken effect, and its error. Pure."""
    if state == WAITING:
        return True, ErrorReport(
            reason or "the table waits for another decision", DefinitionStopError.code
        )
    return state not in (APPLY, SKIP), None


def find_gap(record: RelationRecord, resync: Resync, source: Named) -> MappingError | None:
    """Return the reason why a copy needs consent: it would leave a gap in the table's history.
    Pure.
    """
    if not keeps_deleted_rows(record.type) or resync.skips_changes or resync.is_partial:
        return None
    table = f'{record.type} table "{record.source}"'
    again = run("resync", record.source, SKIP_CHANGES, database=source.database, sid=source.sid)
    accept = Remedy.of("to accept a gap in its past, run: ", again)
    if record.needs_resync:
        at = record.changed_at
        since = "" if at is None else f" ({at:%Y-%m-%d %H:%M:%S%z})"
        return MappingError(
            f"changes of {table} are permanently missing, from position {record.end_lsn}{since} up "
            "to the next copy",
            hint=accept,
        )
    if record.quarantined:
        ids = {"database": source.database, "sid": source.sid}
        retry = run("quarantine retry", record.source, **ids)
        return MappingError(
            f"{record.quarantined} changes of {table} are in quarantine, and a copy would "
            "drop them",
            hint=Remedy.of(
                "to apply them after you have removed the cause, run: ", retry, "; ", accept
            ),
        )
    return None


def find_mixed_rows(record: RelationRecord, resync: Resync, source: Named) -> MappingError | None:
    """Return the reason why a copy of differing rows could change rows of other tables. Pure.

    A copy of columns changes only rows that the table has.
    """
    if not record.disjoint or resync.columns is not None or not resync.compares:
        return None
    error = record.table_state.error
    if error is None or error.code != GapError.code:
        return None
    again = run("resync", record.source, database=source.database, sid=source.sid)
    return MappingError(
        describe_unguarded(record.source, record.target),
        hint=Remedy.of("to copy all tables with this target again, run: ", again),
    )


def _unseen_mass_delete(record: RelationRecord, source: SourceMapping) -> MappingError:
    """Return the reason why a request to resume has no effect. Pure."""
    resume = run("resume", record.source, database=source.database, sid=source.sid)
    return MappingError(
        f'table "{record.source}" was paused after the request, because of a mass delete',
        hint=Remedy.of("`streamer status` shows the transaction; to apply it, run: ", resume),
    )


async def _lock(connection: TargetConnection, relation_id: int) -> RelationRecord:
    """Return the row of a relation, which stays locked until the transaction ends."""
    record = await RELATIONS.find(connection, "where r.id = $1 for update of r", relation_id)
    assert record is not None, "a foreign key of streamer.request holds the row"
    return record


async def _store(connection: TargetConnection, record: RelationRecord, values: Values) -> None:
    await RELATIONS.set(connection, record.relation_id, values, also="changed_at = now()")


async def _take_resume(
    connection: TargetConnection, request: Request, record: RelationRecord, source: SourceMapping
) -> Request | StreamerError:
    """Store the request to resume; return the effect, or why the request has no effect.

    A request has no effect on a later pause because of a mass delete, which the operator has not
    seen. After a loss of changes, a resumed table gets a copy, for which a table with its own past
    needs the operator's consent.
    """
    mass_delete, state = record.mass_delete, record.table_state
    if state.is_lost and (gap := find_gap(record, ALL_ROWS, source)) is not None:
        return gap
    if mass_delete is not None and not mass_delete.is_decided:
        if request.options.get("lsn") != str(mass_delete.lsn):
            return _unseen_mass_delete(record, source)
        mass_delete = mass_delete.decide(skips=bool(request.options.get("skip_deletes")))
    if (resumed := state.resumed()) != state:
        values = {
            "state": resumed.shown,
            "error": None,
            "needs_resync": False,
            "mass_delete": mass_delete,
            "outlives": record.outlives or (mass_delete is not None and mass_delete.skips),
        }
        await _store(connection, record, values)
    return replace(
        request, options={"mass_delete": None if mass_delete is None else mass_delete.to_json()}
    )


async def _take_decision(
    connection: TargetConnection, request: Request, record: RelationRecord
) -> MappingError | None:
    """Store the decision about a definition; return a reason if no decision is due."""
    decision, statements = request.action.removeprefix("ddl_"), request.options.get("statements")
    ddl_id = await decide(connection, record.relation_id, decision, statements)
    if ddl_id is None:
        return MappingError(
            f'no change of "{record.source}" waits for a decision',
            hint=f"see `{command('ddl list')}`",
        )
    await REQUESTS.set(
        connection, request.request_id, {"options": request.options | {"ddl": ddl_id}}
    )
    return None


async def _take_unfilled(
    connection: TargetConnection, source_id: int, relation_id: int | None = None
) -> list[Request]:
    """Request the values that existing rows lack: of the given relation, or of all relations."""
    requests = []
    for record in await RELATIONS.read(connection, _LACKING, source_id, relation_id):
        is_due = record.copy_is_due and (record.type == "clone" or not record.quarantined)
        if is_due or record.unfilled:
            resync = resync_of_unfilled(None if is_due else record.unfilled)
            options = resync.to_json() | {AUTOMATIC: True}
            request = Request(0, record.relation_id, "resync", options)
            requests += await _store_to_point(
                connection, request, record, resync, may_be_stopped=True
            )
    return requests


async def _take_resync(
    connection: TargetConnection, request: Request, record: RelationRecord, source: SourceMapping
) -> list[Request] | StreamerError:
    """Store the request for a resync; return the effect, or why the request cannot be fulfilled.

    Return an empty list for an automatic backfill of a paused table, which `resume` requests later.
    """
    resync, state = request.resync, record.table_state
    is_automatic = bool(request.options.get(AUTOMATIC))
    if (mixed := find_mixed_rows(record, resync, source)) is not None:
        return mixed
    stays_paused = is_automatic and state.is_paused
    if stays_paused and resync.columns is not None:
        return []
    # A copy of all rows would delete the rows of the other tables that share the target.
    if resync.is_partial or (record.disjoint and resync.compares):
        if state.need is Need.PART:
            resync = resync.union(state.resync)
        requests = await _store_to_point(connection, request, record, resync, may_be_stopped=True)
        return requests or MappingError(
            f'"{record.source}" is not in sync, so streamer cannot copy only some rows',
            hint="run `streamer resync` for the whole table",
        )
    if not resync.skips_changes:
        if (gap := find_gap(record, resync, source)) is not None:
            return gap
        keeps_history = _keeps_history(source, record.source)
        if keeps_history or (resync.compares and not resync.force):
            # The stored mode is DIFF, so that the table follows the stream after a restart, too.
            compared = replace(resync, mode=Mode.DIFF)
            requests = await _store_to_point(
                connection,
                request,
                record,
                compared,
                stays_paused=stays_paused,
                may_be_stopped=keeps_history,
            )
            if requests:
                return requests
    # A copy in progress fulfils the request. A requested copy may replace rows that belong to the
    # source by `initial: none`.
    values = NO_COPY | {
        "state": state.rows_requested(resync).shown,
        "error": None,
        "needs_resync": False,
        "resync": resync,
        "owns_rows": record.owns_rows or (record.declared and not is_automatic),
        "attempt": record.attempt + (record.snapshot_lsn is not None),
    }
    await _store(connection, record, values)
    return [replace(request, options=resync.to_json())]


def _keeps_history(source: SourceMapping, table: str) -> bool:
    name = parse_name(table)
    rule = find_rules(source, [name]).get(name)
    return rule is not None and rule.keeps_history


async def _store_to_point(
    connection: TargetConnection,
    request: Request,
    record: RelationRecord,
    resync: Resync,
    *,
    stays_paused: bool = False,
    may_be_stopped: bool = False,
) -> list[Request]:
    """Store a resync to a point; return the effect.

    The effect is empty if the table needs a copy of all rows anyway. The effect is also empty for
    a resync of all rows of a table that is paused or in error, unless *may_be_stopped* is set.
    """
    state = record.table_state
    if resync.columns is not None:  # if the copy fails, the columns stay unfilled
        await remember_unfilled(connection, record.relation_id, resync.columns)
        # This copy also includes the columns of a failed copy.
        resync = replace(resync, columns=tuple(sorted({*record.unfilled, *resync.columns})))
    is_stopped = state.shown in (State.PAUSED, State.ERROR)
    if state.need not in (Need.NOTHING, Need.PART):
        return []
    if is_stopped and not (may_be_stopped or resync.is_partial):
        return []
    is_of_operator = not request.options.get(AUTOMATIC) and resync.columns is None
    values = {
        "state": state.part_requested(resync, stays_paused=stays_paused).shown,
        "error": None,
        "waiting_for": None,
        "resync": resync,
        "attempt": record.attempt + 1,
        "owns_rows": record.owns_rows or (record.declared and is_of_operator),
    }
    await _store(connection, record, values)
    options = resync.to_json()
    return [replace(request, options=options, is_to_point=True, stays_paused=stays_paused)]
