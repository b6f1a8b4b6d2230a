"""The rows of streamer.source: the state and the acknowledged LSN of each source.

`streamer.bookkeeping.positions` updates the acknowledged LSN while a source streams.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_table import BookkeepingTable, Codec, Executor
from streamer.bookkeeping.purges import store_targets
from streamer.errors.error_classes import TargetFencedError
from streamer.errors.error_reports import ErrorReport
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import SourceLabel, SourceMapping
from streamer.mapping.shared_targets import TableWriter
from streamer.source.history_check import CommittedTransaction
from streamer.source.timeline_branches import Branch, KnownServer
from streamer.target.fencing_token import LOCK_CLASS, LOCKS_SQL, FencingToken
from streamer.util.lsn import Lsn


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """A row of streamer.source."""

    source_id: Annotated[int, Codec("s.id")]
    database: str
    sid: str | None
    system_identifier: str | None
    timeline: int | None
    timeline_history: str | None
    database_oid: int | None
    slot: str
    publication: str
    state: str
    error: ErrorReport | None
    acknowledged_lsn: Lsn
    visible_seconds: Annotated[
        float | None, Codec("extract(epoch from clock_timestamp() - s.visible_time)::float8")
    ]
    """Seconds since the latest time for which the target shows all commits of the source."""
    last_transaction: Annotated[
        CommittedTransaction | None, Codec(decode=CommittedTransaction.from_json)
    ]
    backlog: dict[str, Any] | None
    """The last values stored by the backlog guard of the process."""
    heartbeat_seconds: float | None
    heartbeat_overdue_seconds: Annotated[
        float | None, Codec("extract(epoch from now() - s.heartbeat_since)::float8")
    ]
    waiting_for: str | None = None
    """The reason why the start of the source waits, as text."""
    holder: Annotated[str | None, Codec("case when l.is_locked then {} end")] = None
    """Host and pid of the process whose session holds the source's lock."""
    implementation: Annotated[str | None, Codec("case when l.is_locked then {} end")] = None
    """The implementation of the work per change that this process uses: compiled or pure."""

    @property
    def label(self) -> str:
        return SourceLabel(self.database, self.sid)

    @property
    def known_server(self) -> KnownServer:
        """The source's history, as the target has stored it."""
        branch = None
        if self.timeline is not None:
            branch = Branch.parse(self.timeline, self.timeline_history or "")
        return KnownServer(self.system_identifier, branch, self.database_oid)


_IS_LOCKED_SQL: Final = (
    f"exists (select from {LOCKS_SQL} l where l.class = {{class_}} and l.id = {{id}})"
)
SOURCES: Final = BookkeepingTable(
    "source",
    "s",
    SourceRecord,
    "cross join lateral"
    f" (select {_IS_LOCKED_SQL.format(class_=LOCK_CLASS, id='s.id')}) l (is_locked)",
)
SUMMARY_SQL: Final = """
select database, sid, state, error, error_code, slot, publication, holder, acknowledged_lsn::text,
       visible_time, heartbeat_seconds, heartbeat_since
from streamer.source order by database, sid
"""
_WRITERS_SQL: Final = f"""
with running as materialized (
    select s.id, s.database, s.sid from streamer.source s
     where {_IS_LOCKED_SQL.format(class_=LOCK_CLASS, id="s.id")})
select distinct w.number, s.database, s.sid, r.row_sid, r.disjoint
from unnest($1::text[], $2::text[]) with ordinality w (target, sid, number)
join streamer.relation r on r.target = w.target
join running s on s.id = r.source_id
where $3 or r.row_sid is not distinct from w.sid
"""
_CHECK_SQL: Final = """
select s.lock_token as token
from streamer.source s join unnest($1::int8[], $2::text[]) c (id, token)
    on s.id = c.id and s.lock_token = c.token
"""


async def read_writers(
    session: Executor, tables: Sequence[tuple[RelationName, str | None]], *, any_sid: bool = False
) -> list[list[TableWriter]]:
    """Return the running sources that write to each of *tables*: a target, and the sid of its rows.

    *any_sid*: return the writers of all rows.
    """
    writers: list[list[TableWriter]] = [[] for _ in tables]
    targets, sids = [str(target) for target, _ in tables], [sid for _, sid in tables]
    for row in await session.fetch(_WRITERS_SQL, targets, sids, any_sid):
        label = SourceLabel(row["database"], row["sid"])
        writers[row["number"] - 1].append(TableWriter(label, row["row_sid"], row["disjoint"]))
    return writers


async def read_source_records(session: Executor) -> list[SourceRecord]:
    return await SOURCES.read(session, "order by database, sid")


async def read_source_record(session: Executor, source_id: int) -> SourceRecord:
    """Return the record of a source in the bookkeeping. Raises TargetFencedError."""
    if (record := await SOURCES.find(session, "where s.id = $1", source_id)) is None:
        raise TargetFencedError("target: the bookkeeping of this source was removed")
    return record


async def read_source_labels(session: Executor) -> dict[int, str]:
    """Return the labels of all sources, by id."""
    rows = await session.fetch("select id, database, sid from streamer.source")
    return {row["id"]: SourceLabel(row["database"], row["sid"]) for row in rows}


async def register_source(session: Executor, source: SourceMapping) -> tuple[int, str | None]:
    """Register a source unless it is registered; return its id and the process that last ran the
    source.
    """
    values = {name: getattr(source, name) for name in ("database", "sid", "slot", "publication")}
    await SOURCES.insert(session, [values], "on conflict do nothing")
    (row,) = await session.fetch(
        "select id, holder from streamer.source"
        " where database = $1 and sid is not distinct from $2",
        source.database,
        source.sid,
    )
    return row["id"], row["holder"]


async def set_source(session: Executor, source_id: int, **values: Any) -> None:
    """Store values of a source, by column."""
    await SOURCES.set(session, source_id, values)


async def holds_lock(session: Executor, fence: FencingToken) -> bool:
    """Return whether *fence* is valid; a valid token then stays valid until the transaction
    ends.
    """
    return bool(
        await session.fetch_value(
            "select lock_token = $2 from streamer.source where id = $1 for share",
            fence.source_id,
            fence.token,
        )
    )


async def read_valid_tokens(session: Executor, fences: Collection[FencingToken]) -> set[str]:
    """Return the valid tokens among *fences*."""
    ids, tokens = [fence.source_id for fence in fences], [fence.token for fence in fences]
    return {row["token"] for row in await session.fetch(_CHECK_SQL, ids, tokens)}


async def follow_timeline(
    session: Executor, fence: FencingToken, former: int, timeline: int, timeline_history: str
) -> None:
    """Store a later timeline of the same server, while *fence* holds the lock of its source."""
    await SOURCES.update(
        session,
        {"timeline": timeline, "timeline_history": timeline_history},
        "where id = $2 and lock_token = $3 and timeline = $4",
        fence.source_id,
        fence.token,
        former,
    )


async def set_source_state(
    session: Executor,
    source_id: int,
    state: str,
    error: ErrorReport | None = None,
    *,
    waiting_for: str | None = None,
) -> None:
    """Store the state of a source. *waiting_for*: the reason why its start waits."""
    values = {"state": state, "error": error, "waiting_for": waiting_for}
    await SOURCES.set(session, source_id, values)


async def report_source_failure(
    session: Executor, source_id: int, state: str, error: ErrorReport, holder: str
) -> None:
    """Store why *holder* cannot stream a source, unless another process streams the source."""
    await SOURCES.update(
        session,
        {"state": state, "error": error, "waiting_for": None},
        f"where id = $2 and (holder = $3 or not {_IS_LOCKED_SQL.format(class_='$4', id='$2')})",
        source_id,
        holder,
        LOCK_CLASS,
    )


async def set_heartbeat_overdue(session: Executor, source_id: int, seconds: float | None) -> None:
    """Store the time for which a heartbeat has been in flight; None if no heartbeat is overdue."""
    await session.execute(
        "update streamer.source"
        " set heartbeat_since = now() - make_interval(secs => $2::float8) where id = $1",
        source_id,
        seconds,
    )


async def forget_source(bookkeeping: Bookkeeping, source_id: int) -> None:
    """Remove a source and its relations, but keep the list of tables with its rows for a purge."""
    async with bookkeeping.transaction() as connection:
        await store_targets(connection, source_id)
        await remove_source(connection, source_id)


async def remove_source(session: Executor, source_id: int) -> None:
    """Remove a source in the transaction of the caller."""
    await SOURCES.delete(session, "where id = $1", source_id)
