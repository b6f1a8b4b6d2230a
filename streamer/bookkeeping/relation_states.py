"""The states of streamer.relation that a running process stores: errors, waits and due copies.

`streamer.bookkeeping.copies` stores the states of a copy in progress, and `taken_requests` the
states that operators request. All these functions lock the row, and apply an event of `TableState`
to the stored state. So storing a state never undoes a later decision, such as a pause.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_table import BookkeepingTable, Codec, Executor, Values
from streamer.bookkeeping.relation_columns import request_unfilled
from streamer.bookkeeping.relation_records import RELATIONS, StateRecord
from streamer.control.mass_delete import MassDelete
from streamer.control.resync_options import Resync
from streamer.control.table_state import Need, State, TableState
from streamer.errors.error_reports import ErrorReport, TableWait
from streamer.mapping.rules import RelationMapping
from streamer.target.connection import TargetConnection

_ATTACH_SQL: Final = """
select r.snapshot_lsn::text as snapshot_lsn,
       r.error is null or r.error_code = 'gap' as is_well, r.state,
       exists (select from streamer.request q where q.relation_id = r.id and q.state = 'queued')
         as is_requested
from streamer.relation r where r.id = $1
"""
NO_COPY: Final = {
    "snapshot_lsn": None,
    "chunks": None,
    "waiting_for": None,
    "mass_delete": None,
    "outlives": False,
}
"""Values for a relation without a copy in progress and without a finished copy; decisions about the
former rows are void.
"""
OF_RELATIONS: Final = "where r.id = any ($1::int8[])"
_BLOCKED_BY: Final = """
where r.waiting_for is not null and pg_catalog.jsonb_path_exists(r.wait,
    '$.remedy[*].pids[*] ? (@ == $pid)', pg_catalog.jsonb_build_object('pid', $1::int8))
"""
CHANGED: Final = MappingProxyType({"changed_at": "now()"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRecord(StateRecord):
    """The columns of streamer.relation that a copy changes.

    The beginning of a copy increases ``attempt``, after which tasks of a former attempt store no
    values.
    """

    attempt: int
    is_filling: Annotated[bool, Codec("r.filling")]
    """The former copy filled the target directly and did not finish."""
    target_created: bool
    owns_rows: bool
    was_in_sync: bool
    disjoint: bool
    rows_copied: int
    bytes_copied: int
    unfilled: tuple[str, ...]
    chunk_attempt: Annotated[int, Codec("coalesce((r.chunks->>'attempt')::int4, 0)")]
    """The attempt of the last finished chunk."""

    @property
    def is_owner(self) -> bool:
        """Whether streamer wrote this source's rows in the target."""
        return self.target_created or self.owns_rows


COPIES: Final = BookkeepingTable("relation", "r", CopyRecord)


def state_columns(state: TableState) -> Values:
    """Return the state as the columns that users see. Pure."""
    return {"state": state.shown, "error": state.error}


async def change_states(
    connection: TargetConnection,
    change: Callable[[CopyRecord], Values | None],
    which: str,
    *parameters: Any,
    computed: Mapping[str, str] = CHANGED,
) -> list[CopyRecord]:
    """Store the values that *change* returns for the rows of *which*; return the former rows.

    *change* returns None to skip a row. All rows stay locked until the caller's transaction ends.
    *computed*: additional columns, as expressions.
    """
    locked = f"{which} order by r.id for no key update of r"
    changes = [(copy, change(copy)) for copy in await COPIES.read(connection, locked, *parameters)]
    rows = [{"id": copy.relation_id, **values} for copy, values in changes if values is not None]
    await RELATIONS.update_each(connection, rows, computed=computed)
    return [copy for copy, values in changes if values is not None]


async def _change(
    bookkeeping: Bookkeeping,
    change: Callable[[CopyRecord], Values | None],
    *relation_ids: int,
    which: str = OF_RELATIONS,
) -> bool:
    """Change rows in a separate transaction; return whether *change* had an effect."""
    async with bookkeeping.transaction() as connection:
        return bool(await change_states(connection, change, which, relation_ids))


def _event_change(
    event: Callable[[TableState], TableState], values: Values = MappingProxyType({})
) -> Callable[[CopyRecord], Values | None]:
    """Return the change that applies *event*, and stores *values* where the event changes the
    state.
    """

    def change(record: CopyRecord) -> Values | None:
        state = event(record.table_state)
        return None if state == record.table_state else {**state_columns(state), **values}

    return change


async def require_resync_of_source(
    bookkeeping: Bookkeeping, source_id: int, error: ErrorReport
) -> None:
    """Record that changes of a source are lost, for every relation that awaits no copy."""
    change = _event_change(lambda state: state.cut_off(error))
    which = "where r.source_id = any ($1::int8[]) and r.snapshot_lsn is not null"
    await _change(bookkeeping, change, source_id, which=which)


async def require_resync(bookkeeping: Bookkeeping, relation_id: int, error: ErrorReport) -> None:
    """Stop a relation whose changes are permanently missing, until an operator requests a copy."""

    def change(record: CopyRecord) -> Values:
        values = {"needs_resync": True, "resync": record.resync, "attempt": record.attempt + 1}
        return {**NO_COPY, **values, **state_columns(record.table_state.lost(error))}

    await _change(bookkeeping, change, relation_id)


async def demand_copy(bookkeeping: Bookkeeping, relation_id: int, resync: Resync) -> None:
    """Require a new copy of a relation that was in sync or was being copied."""

    def change(record: CopyRecord) -> Values:
        values = {"needs_resync": False, "resync": resync, "attempt": record.attempt + 1}
        return {**NO_COPY, **values, **state_columns(record.table_state.to_copy_again())}

    await _change(bookkeeping, change, relation_id)


async def forget_target(session: Executor, relation_id: int) -> None:
    """Record that the target is a new table, none of whose rows is known to be streamer's."""
    values = {"filling": False, "owns_rows": False, "target_created": False}
    await RELATIONS.set(session, relation_id, values)


async def demand_copy_at_point(
    bookkeeping: Bookkeeping, relation_id: int, columns: Sequence[str] | None
) -> None:
    """Require a copy of a relation in sync, which first applies its changes up to the copy's point.

    *columns*: the target's columns to copy; None for all.
    """
    async with bookkeeping.transaction() as connection:
        if columns is None or columns:
            await request_unfilled(connection, relation_id, columns)


async def fail_copy(
    bookkeeping: Bookkeeping,
    relation_id: int,
    error: ErrorReport,
    need: Need,
    attempt: int | None,
) -> bool:
    """Record why streamer gives up a copy of the scope *need*.

    The rows of former chunks stay, and follow the stream. A relation that was in sync stays in
    sync. *attempt*: the attempt of the copy, if begun. Return False if the bookkeeping has a newer
    attempt, or a new request.
    """

    def change(record: CopyRecord) -> Values | None:
        state = record.table_state
        if attempt not in (None, record.attempt):
            return None
        if not state.lacks(need) and state.need is not Need.NOTHING:
            return None
        # A switch to the stream with an unknown outcome may have removed the need for a copy.
        failed = replace(state, need=need).copy_failed(error)
        resync = {"resync": None} if need is Need.PART else {}
        return {**state_columns(failed), **resync, "waiting_for": None}

    return await _change(bookkeeping, change, relation_id)


async def block_copy(bookkeeping: Bookkeeping, relation_id: int, error: ErrorReport) -> None:
    """Record why the copy of a relation cannot begin."""

    def change(record: CopyRecord) -> Values:
        return {**state_columns(record.table_state.blocked(error)), "waiting_for": None}

    await _change(bookkeeping, change, relation_id)


async def demand_again(
    bookkeeping: Bookkeeping, relation_id: int, need: Need, resync: Resync
) -> None:
    """Repeat a request for a copy of the scope *need* that was made before the copy failed."""

    def change(record: CopyRecord) -> Values | None:
        state = record.table_state
        is_failed_part = need is Need.PART and state.need is Need.NOTHING
        if not (state.lacks(need) or is_failed_part):
            return None
        cleared = NO_COPY if need is Need.ROWS else {}
        requested = state if state.is_paused else state.copy_requested()
        return {**cleared, **state_columns(requested), "resync": resync}

    await _change(bookkeeping, change, relation_id)


async def is_copy_due(session: Executor, relation_id: int) -> bool:
    """Whether rows of a relation in sync need a copy that streamer began by itself."""
    sql = "select copy_is_due from streamer.relation where id = $1"
    return bool(await session.fetch_value(sql, relation_id))


async def set_waiting(session: Executor, relation_ids: list[int], wait: TableWait | None) -> None:
    """Store *wait* as the obstacle of relations; None clears the obstacle."""
    text = wait and str(wait)
    await RELATIONS.update(
        session,
        {"waiting_for": text, "wait": wait},
        "where id = any ($2::int8[])"
        " and (waiting_for is distinct from $3 or wait is distinct from $4::text::jsonb)",
        relation_ids,
        text,
        wait and wait.stored,
    )


async def read_blocking_transactions(session: Executor, pid: int) -> list[str]:
    """Return the virtual transactions in which session *pid* blocks relations, as stored."""
    waiting = await RELATIONS.read(session, _BLOCKED_BY, pid)
    remedies = [record.wait.remedy for record in waiting if record.wait is not None]
    ended = [holder for remedy in remedies if remedy for sql in remedy.sql for holder in sql.ended]
    return [holder.transaction for holder in ended if holder.pid == pid and holder.transaction]


async def report_gap(bookkeeping: Bookkeeping, relation_id: int, error: ErrorReport) -> bool:
    """Store a gap as the error of a ready relation, unless the relation has a different error;
    return whether the gap is new.
    """
    change = _event_change(lambda state: state.lacks_rows(error))
    return await _change(bookkeeping, change, relation_id)


async def pause_before_mass_delete(
    bookkeeping: Bookkeeping, relation_id: int, mass_delete: MassDelete, error: ErrorReport
) -> None:
    """Pause a relation before the transaction *mass_delete*, unless a copy replaces its rows."""
    change = _event_change(
        lambda state: state.stopped_by_delete_limit(error), {"mass_delete": mass_delete}
    )
    await _change(bookkeeping, change, relation_id)


async def set_copy_error(
    bookkeeping: Bookkeeping, relation_ids: Sequence[int], error: ErrorReport | None
) -> None:
    """Store the reason why copies in progress must begin again; None once they continue."""
    change = _event_change(lambda state: state.delayed(error))
    await _change(bookkeeping, change, *relation_ids)


async def request_still_unfilled(bookkeeping: Bookkeeping, relation_id: int) -> None:
    """Request the values that existing rows of a relation still lack, if any.

    A common cause may have stopped both the relation and the copy of these values.
    """
    async with bookkeeping.transaction() as connection:
        for row in await connection.fetch(
            "select unfilled, copy_is_due from streamer.relation"
            " where id = $1 and (unfilled <> '{}' or copy_is_due) and resync is null for update",
            relation_id,
        ):
            columns = None if row["copy_is_due"] else row["unfilled"]
            await request_unfilled(connection, relation_id, columns)


async def set_streaming_states(
    bookkeeping: Bookkeeping, outcomes: Mapping[int, tuple[State, ErrorReport | None]]
) -> None:
    """Store the outcomes of applying changes to relations, by id, unless a copy or a pause has
    taken over the state.
    """

    def change(record: CopyRecord) -> Values | None:
        outcome = outcomes[record.relation_id]
        return _event_change(lambda now: now.with_shown(*outcome))(record)

    await _change(bookkeeping, change, *outcomes)


async def store_names(session: Executor, names: Mapping[int, RelationMapping]) -> None:
    """Store the new names of the source's tables and targets of relations, by id."""
    # Names of relations must be unique at each moment.
    await session.execute(
        "update streamer.relation set source = 'renamed ' || id where id = any ($1::int8[])",
        list(names),
    )
    rows = ({"id": key, "source": m.source, "target": m.target} for key, m in names.items())
    await RELATIONS.update_each(session, rows)


async def read_attach_state(session: Executor, relation_id: int) -> Any:
    """Return the facts that decide whether to request rows of attached partitions now."""
    return next(iter(await session.fetch(_ATTACH_SQL, relation_id)), None)


async def set_lags(session: Executor, seconds: dict[int, float | None]) -> None:
    """Store the time for which relations, by id, have lagged."""
    await session.execute(
        "update streamer.relation r"
        " set lag_since = clock_timestamp() - make_interval(secs => l.seconds)"
        " from unnest($1::int8[], $2::float8[]) l (id, seconds) where r.id = l.id",
        list(seconds),
        list(seconds.values()),
    )


def skipped_sql(relation_id: int, number: int) -> str:
    """Return the statement that counts ignored TRUNCATEs. Pure."""
    return (
        f"update streamer.relation set truncates_skipped = truncates_skipped + {number}"
        f" where id = {relation_id}"
    )
