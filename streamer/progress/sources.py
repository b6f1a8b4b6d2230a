"""The rows of streamer.source: the state of each source, and the LSN that streamer has acknowledged
to it.

The session that holds the lock of a source stores its acknowledged position, see `lock`.
"""

import json
from dataclasses import dataclass
from typing import Any, Final

from streamer.error_reports import ErrorReport
from streamer.errors import TargetFencedError
from streamer.lsn import Lsn
from streamer.mapping.rules import SourceLabel
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.purges import keep_columns
from streamer.source.history_check import Landmark
from streamer.source.timeline_branches import Branch, KnownPlace
from streamer.target.claim import LOCK_CLASS, Claim
from streamer.target.connection import TargetConnection, transaction


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """A row of streamer.source."""

    source_id: int
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
    visible_seconds: float | None
    """How long ago everything was visible that the source had committed then."""
    last_transaction: Landmark | None
    backlog: dict[str, Any] | None
    """The values stored last: see `set_backlog`."""
    heartbeat_seconds: float | None
    heartbeat_overdue_seconds: float | None
    waiting_for: str | None = None
    """What the start of the source waits for, in words."""
    holder: str | None = None
    """Host and pid of the process whose session has the source's lock now."""
    implementation: str | None = None
    """The implementation of the hot path that this process uses."""

    @property
    def label(self) -> str:
        return SourceLabel(self.database, self.sid)

    @property
    def known_place(self) -> KnownPlace:
        """The source's history that the target has."""
        branch = None
        if self.timeline is not None:
            branch = Branch.parse(self.timeline, self.timeline_history or "")
        return KnownPlace(self.system_identifier, branch, self.database_oid)


_IS_LOCKED_SQL: Final = """exists (
    select from pg_catalog.pg_locks l
    where l.locktype = 'advisory' and l.objsubid = 2 and l.granted
      and l.database = (select d.oid from pg_catalog.pg_database d
                        where d.datname = pg_catalog.current_database())
      and l.classid = {class_}::int8::oid and l.objid = {id}::int8::oid)"""
_SOURCES_SQL: Final = f"""
select id as source_id, database, sid, system_identifier, timeline, timeline_history,
       database_oid, slot, publication, state, error,
       error_code, error_remedy, waiting_for, acknowledged_lsn::text as acknowledged_lsn,
       extract(epoch from clock_timestamp() - visible_time)::float8 as visible_seconds,
       last_transaction, backlog,
       heartbeat_seconds,
       extract(epoch from now() - heartbeat_since)::float8 as heartbeat_overdue_seconds,
       case when is_locked then holder end as holder,
       case when is_locked then implementation end as implementation
from streamer.source,
     lateral (select {_IS_LOCKED_SQL.format(class_=LOCK_CLASS, id="source.id")} as is_locked) lock
order by database, sid
"""
_WRITERS_SQL: Final = f"""
select distinct s.database, s.sid from streamer.source s
join streamer.relation r on r.source_id = s.id
where r.target = $1 and ($2 or s.sid is not distinct from $3::text)
  and {_IS_LOCKED_SQL.format(class_=LOCK_CLASS, id="s.id")}
"""
_KEEP_TARGETS_SQL: Final = """
insert into streamer.purge (database, sid, target)
select distinct s.database, coalesce(s.sid, ''), r.target
from streamer.source s join streamer.relation r on r.source_id = s.id where s.id = $1
on conflict (database, sid, target) do update set
    rows_deleted = 0, next_block = null, blocks = null, began_at = null, finished_at = null
"""
_REPORT_FAILURE_SQL: Final = f"""
update streamer.source set state = $2, error = $3, error_code = $4, waiting_for = null,
    error_remedy = $7::text::jsonb
where id = $1 and (holder = $5 or not {_IS_LOCKED_SQL.format(class_="$6", id="$1")})
"""


def _source_record(row: Any) -> SourceRecord:
    fields = dict(row)
    fields["error"] = ErrorReport.stored(
        fields["error"], fields.pop("error_code"), fields.pop("error_remedy")
    )
    fields["acknowledged_lsn"] = Lsn.parse(fields["acknowledged_lsn"])
    if fields["last_transaction"] is not None:
        fields["last_transaction"] = Landmark.from_json(fields["last_transaction"])
    if fields["backlog"] is not None:
        fields["backlog"] = json.loads(fields["backlog"])
    return SourceRecord(**fields)


async def read_writers(
    connection: TargetConnection, target: str, *, any_sid: bool, sid: str | None
) -> list[tuple[str, str | None]]:
    """Return the label and sid of the sources of *target*, by its name, that a process runs now.

    *sid*: only sources with this one, unless *any_sid* is true.
    """
    rows = await connection.fetch(_WRITERS_SQL, target, any_sid, sid)
    return [(SourceLabel(row["database"], row["sid"]), row["sid"]) for row in rows]


async def read_source_records(bookkeeping: Bookkeeping) -> list[SourceRecord]:
    async with bookkeeping.connection() as connection:
        return [_source_record(row) for row in await connection.fetch(_SOURCES_SQL)]


async def read_source_record(bookkeeping: Bookkeeping, source_id: int) -> SourceRecord:
    """Return the record of a source in the bookkeeping. Raises TargetFencedError."""
    async with bookkeeping.connection() as connection:
        rows = await connection.fetch(
            f"select * from ({_SOURCES_SQL}) s where source_id = $1", source_id
        )
    if not rows:
        raise TargetFencedError("target: the bookkeeping of this source was removed")
    return _source_record(rows[0])


async def set_source_identity(
    bookkeeping: Bookkeeping,
    source_id: int,
    system_identifier: str,
    timeline: int,
    timeline_history: str,
    database_oid: int,
) -> None:
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.source set system_identifier = $2, timeline = $3,"
            " timeline_history = $4, database_oid = $5 where id = $1",
            source_id,
            system_identifier,
            timeline,
            timeline_history,
            database_oid,
        )


async def follow_timeline(
    bookkeeping: Bookkeeping, claim: Claim, known: int, timeline: int, timeline_history: str
) -> None:
    """Store a later timeline of the same server, while *claim* holds the lock of its source."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.source set timeline = $4, timeline_history = $5"
            " where id = $1 and lock_token = $2 and timeline = $3",
            claim.source_id,
            claim.token,
            known,
            timeline,
            timeline_history,
        )


async def set_source_state(
    bookkeeping: Bookkeeping,
    source_id: int,
    state: str,
    error: ErrorReport | None = None,
    *,
    waiting_for: str | None = None,
) -> None:
    """Store the state of a source. *waiting_for*: what its start waits for."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.source set state = $2, error = $3, error_code = $4, waiting_for = $5,"
            " error_remedy = $6::text::jsonb where id = $1",
            source_id,
            state,
            error and error.text,
            error and error.code,
            waiting_for,
            error and error.stored_remedy,
        )


async def report_source_failure(
    bookkeeping: Bookkeeping, source_id: int, state: str, error: ErrorReport, holder: str
) -> None:
    """Store why *holder* cannot stream a source, unless another process streams it."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            _REPORT_FAILURE_SQL,
            source_id,
            state,
            error.text,
            error.code,
            holder,
            LOCK_CLASS,
            error.stored_remedy,
        )


async def set_heartbeat_overdue(
    bookkeeping: Bookkeeping, source_id: int, seconds: float | None
) -> None:
    """Say for how long a heartbeat has been on its way, or that none has for too long."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.source"
            " set heartbeat_since = now() - make_interval(secs => $2::float8) where id = $1",
            source_id,
            seconds,
        )


async def reset_acknowledged(bookkeeping: Bookkeeping, source_id: int, lsn: Lsn) -> None:
    """A new slot begins at *lsn*."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.source set acknowledged_lsn = $2::text::pg_lsn,"
            " last_transaction = null where id = $1",
            source_id,
            str(lsn),
        )


async def set_backlog(
    bookkeeping: Bookkeeping, source_id: int, backlog: dict[str, Any] | None
) -> None:
    """Store the state of a source's backlog; copies obey its ``throttled``."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.source set backlog = $2::text::jsonb where id = $1",
            source_id,
            None if backlog is None else json.dumps(backlog),
        )


async def set_copy_rounds(bookkeeping: Bookkeeping, source_id: int, rounds: int) -> None:
    """Store how many rounds of copies share the rows per second of a source."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.source set copy_rounds = $2 where id = $1", source_id, rounds
        )


async def forget_source(bookkeeping: Bookkeeping, source_id: int) -> None:
    """Remove a source and its relations. A purge still knows the tables that hold rows of it."""
    async with bookkeeping.connection() as connection, transaction(connection):
        await connection.execute(_KEEP_TARGETS_SQL, source_id)
        await keep_columns(connection, source_id)
        await connection.execute("delete from streamer.source where id = $1", source_id)
