"""The states of streamer.relation that a running process stores: errors, waits and due copies.

`streamer.progress.copies` stores those of a copy under way, and `taken_requests` those that an
operator asks for. A table that an operator has paused stays paused.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from streamer.error_reports import ErrorReport, TableWait
from streamer.mapping.mass_delete import MassDelete
from streamer.mapping.resync import Resync
from streamer.mapping.rules import RelationMapping
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.relation_columns import request_unfilled
from streamer.progress.relations import RELATIONS, STATE
from streamer.progress.table import Executor, plain, to_json

_ATTACH_SQL: Final = """
select r.snapshot_lsn::text as snapshot_lsn,
       r.error is null or r.error_code = 'gap' as is_well, r.state,
       exists (select from streamer.request q where q.relation_id = r.id and q.state = 'queued')
         as is_asked
from streamer.relation r where r.id = $1
"""
_IN_SYNC: Final = "and snapshot_lsn is not null and not needs_resync"
_IS_STREAMING: Final = """
and state in ('catching_up', 'ready', 'error') and snapshot_lsn is not null and resync is null
"""
_NEWEST: Final = "and ($3::int4 is null or attempt = $3)"
_CHANGED: Final = "changed_at = now()"
_STATE: Final = f"state = {STATE}, changed_at = now()"
_AGAIN: Final = "attempt = attempt + 1"
NO_COPY: Final = {
    "snapshot_lsn": None,
    "chunks": None,
    "waiting_for": None,
    "brake": None,
    "outlives": False,
}
"""No copy is under way, and none has ended; decisions about the rows before are void."""


async def require_resync_of_source(session: Executor, source_id: int, error: ErrorReport) -> None:
    """Changes of a source are lost for good: record it for every relation that awaits no copy."""
    await RELATIONS.update(
        session,
        {"error": error},
        "where source_id = $2 and snapshot_lsn is not null and error is distinct from $3",
        source_id,
        error.text,
        also=_STATE.format("error"),
    )


async def require_resync(session: Executor, relation_id: int, error: ErrorReport) -> None:
    """Changes of a relation are missing for good: it waits until an operator requests a copy."""
    values = NO_COPY | {"error": error, "needs_resync": True}
    also = f"{_STATE.format('error')}, {_AGAIN}, resync = coalesce(resync, $3::text::jsonb)"
    await RELATIONS.set(session, relation_id, values, "", to_json(plain(Resync())), also=also)


async def demand_copy(session: Executor, relation_id: int, resync: Resync) -> None:
    """Require another copy of a relation that was in sync or in copy."""
    values = NO_COPY | {"error": None, "needs_resync": False, "resync": resync}
    also = f"{_STATE.format('init')}, {_AGAIN}"
    await RELATIONS.set(session, relation_id, values, also=also)


async def forget_target(session: Executor, relation_id: int) -> None:
    """Another table has the name of the target: none of its rows is known to be streamer's."""
    values = {"filling": False, "owns_rows": False, "target_created": False}
    await RELATIONS.set(session, relation_id, values)


async def demand_copy_at_point(
    bookkeeping: Bookkeeping, relation_id: int, columns: Sequence[str] | None
) -> None:
    """Require rows of a relation in sync, whose changes up to the copy's point count, too.

    *columns*: those of the target to bring, if not all.
    """
    async with bookkeeping.transaction() as connection:
        if columns is None or columns:
            await request_unfilled(connection, relation_id, columns)


async def demand_part(session: Executor, relation_id: int, resync: Resync) -> None:
    """Require the rows of *resync* of a relation in sync, whose last copy has just failed."""
    values = {"resync": resync, "error": None}
    await RELATIONS.set(session, relation_id, values, _IN_SYNC, also=_STATE.format("copying"))


async def fail_copy(
    session: Executor, relation_id: int, error: ErrorReport, attempt: int | None = None
) -> bool:
    """Record why a relation cannot be copied.

    *attempt*: that of the copy, if it had begun. Return False if the bookkeeping has a newer one.
    """
    values = {"state": "error", "error": error, "waiting_for": None}
    return await RELATIONS.set(session, relation_id, values, _NEWEST, attempt, also=_CHANGED)


async def fail_chunk(session: Executor, relation_id: int, error: ErrorReport) -> None:
    """Record why a copy in chunks stops; the chunks before stay, and follow the stream.

    A paused table continues when an operator resumes it, so it has no error. A newer request has
    removed the chunks.
    """
    values = {"state": "error", "error": error, "waiting_for": None}
    unless = "and chunks is not null and state <> 'paused'"
    await RELATIONS.set(session, relation_id, values, unless, also=_CHANGED)


async def is_copy_due(session: Executor, relation_id: int) -> bool:
    """Whether rows of a relation in sync need a copy that streamer began by itself."""
    sql = "select copy_is_due from streamer.relation where id = $1"
    return bool(await session.fetch_value(sql, relation_id))


async def fail_part(
    session: Executor, relation_id: int, error: ErrorReport, attempt: int | None
) -> bool:
    """Record why a copy of some rows of a relation was given up; the relation is as it was.

    Else as `fail_copy`.
    """
    values = {"error": error, "resync": None, "waiting_for": None}
    rest, also = f"{_NEWEST} and snapshot_lsn is not null", _STATE.format("ready")
    return await RELATIONS.set(session, relation_id, values, rest, attempt, also=also)


async def set_waiting(session: Executor, relation_ids: list[int], wait: TableWait | None) -> None:
    """Store the obstacles of waiting relations, and clear those that are gone."""
    text = wait and str(wait)
    await RELATIONS.update(
        session,
        {"waiting_for": text, "wait": wait},
        "where id = any ($2::int8[]) and waiting_for is distinct from $3",
        relation_ids,
        text,
    )


async def report_gap(session: Executor, relation_id: int, error: ErrorReport) -> bool:
    """Show the gap of a ready relation unless it shows another error; return whether it is new."""
    rest = "and state = 'ready' and (error is null or error_code = $3 and error <> $4)"
    return await RELATIONS.set(session, relation_id, {"error": error}, rest, error.code, error.text)


async def set_brake(
    session: Executor, relation_id: int, found: MassDelete, error: ErrorReport
) -> None:
    """Pause a relation before the source transaction *found*, unless a copy replaces it anyway."""
    values = {"state": "paused", "brake": found, "error": error}
    await RELATIONS.set(session, relation_id, values, _IN_SYNC, also=_CHANGED)


async def request_still_unfilled(bookkeeping: Bookkeeping, relation_id: int) -> None:
    """Request the values that existing rows of a relation still lack, if there are any.

    The same cause may have stopped the relation and the copy that was to bring them.
    """
    async with bookkeeping.transaction() as connection:
        for row in await connection.fetch(
            "select unfilled, copy_is_due from streamer.relation"
            " where id = $1 and (unfilled <> '{}' or copy_is_due) and resync is null for update",
            relation_id,
        ):
            columns = None if row["copy_is_due"] else row["unfilled"]
            await request_unfilled(connection, relation_id, columns)


async def set_streaming_state(
    session: Executor, relation_id: int, state: str, error: ErrorReport | None = None
) -> None:
    """Store how applying changes fares, unless an operator wants something else meanwhile."""
    values = {"state": state, "error": error}
    await RELATIONS.set(session, relation_id, values, _IS_STREAMING, also=_CHANGED)


async def store_names(session: Executor, names: Mapping[int, RelationMapping]) -> None:
    """Store the names of source's tables and targets that relations, by id, have from now on."""
    # Names of relations are unique at each moment.
    await session.execute(
        "update streamer.relation set source = 'renamed ' || id where id = any ($1::int8[])",
        list(names),
    )
    rows = ({"id": key, "source": m.source, "target": m.target} for key, m in names.items())
    await RELATIONS.update_each(session, rows)


async def read_attach_state(session: Executor, relation_id: int) -> Any:
    """Return the row that tells whether rows of attached partitions can be requested now."""
    return next(iter(await session.fetch(_ATTACH_SQL, relation_id)), None)


async def set_lags(session: Executor, seconds: dict[int, float | None]) -> None:
    """Store for how long relations, by their id, have lagged."""
    await session.execute(
        "update streamer.relation r"
        " set lag_since = clock_timestamp() - make_interval(secs => l.seconds)"
        " from unnest($1::int8[], $2::float8[]) l (id, seconds) where r.id = l.id",
        list(seconds),
        list(seconds.values()),
    )


def skipped_sql(relation_id: int, number: int) -> str:
    """Return the statement that counts TRUNCATEs which streamer has ignored. Pure."""
    return (
        f"update streamer.relation set truncates_skipped = truncates_skipped + {number}"
        f" where id = {relation_id}"
    )
