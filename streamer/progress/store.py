"""The bookkeeping tables in the target: what survives this process.

Progress rows themselves are moved by `streamer.apply.commit`, in the transactions whose progress
they are.
"""

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from streamer.errors import TargetConnectionError, TargetError, TargetFencedError
from streamer.lsn import Lsn
from streamer.mapping.resync import Resync
from streamer.mapping.rules import Initial, RelationMapping, SourceLabel
from streamer.migrations import read_migrations
from streamer.postgres import origin
from streamer.progress.audit import prune_acts, write_act, write_acts
from streamer.progress.former import bring_back, keep_former
from streamer.source.history import Landmark
from streamer.target.claim import LOCK_CLASS, Claim
from streamer.target.connection import KeptConnection, TargetAddress, TargetConnection, transaction

CHANNEL: Final = "streamer"
"""Notified when an operator makes a request, or `WAITING` when one waits for the sources."""

WAITING: Final = "wait"
WAITING_FOR_TABLES: Final = "wait tables"
"""Payload of a notification by `streamer wait`: store positions now, not when it suits."""

TABLES: Final = (
    "audit",
    "held",
    "request",
    "quarantine",
    "deferred_index",
    "sync_partition",
    "former_relation",
    "relation",
    "source",
    "installation",
    "migration",
)
"""All that is ours in the schema."""

_MIGRATION_LOCK: Final = 0x73747265616D  # "stream"


async def migrate(connection: TargetConnection) -> None:
    """Bring the bookkeeping schema up to date. Raises TargetError for one that is newer than we
    are.
    """
    migrations = read_migrations("target")
    # All or none: who looks at the bookkeeping meanwhile must not find it half made.
    async with transaction(connection):
        await connection.execute("select pg_advisory_xact_lock($1)", _MIGRATION_LOCK)
        await connection.execute(
            "create schema if not exists streamer;"
            " create table if not exists streamer.migration (number integer primary key,"
            " name text not null, applied_at timestamptz not null default now())"
        )
        rows = await connection.fetch("select number from streamer.migration")
        applied = {int(row["number"]) for row in rows}
        if applied and max(applied) > migrations[-1].number:
            raise TargetError(
                "the bookkeeping in the target was made by a newer streamer "
                f"(migration {max(applied)})",
                hint="run that version or a later one",
            )
        for migration in migrations:
            if migration.number not in applied:
                await connection.execute(migration.sql)
                await connection.execute(
                    "insert into streamer.migration (number, name) values ($1, $2)",
                    migration.number,
                    migration.name,
                )
        await prune_acts(connection)


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """A row of streamer.source."""

    source_id: int
    database: str
    sid: str | None
    system_identifier: str | None
    timeline: int | None
    slot: str
    publication: str
    state: str
    error: str | None
    acknowledged_lsn: Lsn
    visible_time: datetime | None
    last_transaction: Landmark | None
    backlog: dict[str, Any] | None
    """What was stored of it last: see `set_backlog`."""
    heartbeat_seconds: float | None
    heartbeat_overdue_seconds: float | None
    holder: str | None = None
    """Host and pid of the process whose session has the source's lock now."""

    @property
    def label(self) -> str:
        return SourceLabel(self.database, self.sid)


@dataclass(frozen=True, slots=True)
class RelationRecord:
    """A row of streamer.relation. ``source`` and ``target``: as `RelationName` prints them."""

    relation_id: int
    source_id: int
    source: str
    target: str
    type: str
    state: str
    snapshot_lsn: Lsn | None
    end_lsn: Lsn
    attempt: int
    rows_copied: int
    bytes_copied: int
    rows_total: int | None
    error: str | None
    waiting_for: str | None
    lag_since: datetime | None
    visible_lsn: Lsn | None
    target_created: bool
    declared: bool
    owns_rows: bool
    resync: Resync
    publication_mark: str | None
    identity: str | None
    needs_resync: bool
    expressions: str | None
    quarantined: int
    has_returned: bool = False
    """It was mapped before, not all the time, and is mapped again as of now."""


@dataclass(frozen=True, slots=True)
class HeldRecord:
    """A row of streamer.held: changes of a relation that wait in its process.

    The source has to keep its WAL from ``behind_lsn`` on for them; None if they are part of a
    transaction that has not ended.
    """

    relation_id: int
    changes: int
    bytes: int
    behind_lsn: Lsn | None


@dataclass(frozen=True, slots=True)
class Request:
    """A row of streamer.request: what an operator asks for."""

    request_id: int
    relation_id: int
    action: str
    options: dict[str, Any]

    @property
    def resync(self) -> Resync:
        return Resync.from_json(self.options)


_IS_LOCKED_SQL: Final = """exists (
    select from pg_catalog.pg_locks l
    where l.locktype = 'advisory' and l.objsubid = 2 and l.granted
      and l.database = (select d.oid from pg_catalog.pg_database d
                        where d.datname = pg_catalog.current_database())
      and l.classid = {class_}::int8::oid and l.objid = {id}::int8::oid)"""
_SOURCES_SQL: Final = f"""
select id as source_id, database, sid, system_identifier, timeline, slot, publication, state, error,
       acknowledged_lsn::text as acknowledged_lsn, visible_time, last_transaction,
       backlog,
       heartbeat_seconds,
       extract(epoch from now() - heartbeat_since)::float8 as heartbeat_overdue_seconds,
       case when {_IS_LOCKED_SQL.format(class_=LOCK_CLASS, id="source.id")}
            then holder end as holder
from streamer.source order by database, sid
"""
_RELATIONS_SQL: Final = """
select id as relation_id, source_id, source, target, type, state,
       snapshot_lsn::text as snapshot_lsn, end_lsn::text as end_lsn, attempt,
       rows_copied, bytes_copied, rows_total, error, waiting_for, lag_since,
       visible_lsn::text as visible_lsn, target_created,
       declared, owns_rows, resync, publication_mark, identity, needs_resync, expressions,
       (select count(*) from streamer.quarantine q where q.relation_id = relation.id) as quarantined
from streamer.relation
"""
_REPORT_FAILURE_SQL: Final = f"""
update streamer.source set state = $2, error = $3
where id = $1 and (holder = $4 or not {_IS_LOCKED_SQL.format(class_="$5", id="$1")})
"""
_HELD_SQL: Final = """
select relation_id, changes, bytes, behind_lsn::text as behind_lsn from streamer.held
"""
_SET_HELD_SQL: Final = """
with gone as (
    delete from streamer.held h using streamer.relation r
    where r.id = h.relation_id and r.source_id = $1 and h.relation_id <> all ($2::int8[]))
insert into streamer.held
select v.id, v.changes, v.bytes, v.behind_lsn::pg_lsn
from unnest($2::int8[], $3::int8[], $4::int8[], $5::text[]) v (id, changes, bytes, behind_lsn)
join streamer.relation r on r.id = v.id and r.source_id = $1
on conflict (relation_id) do update
set changes = excluded.changes, bytes = excluded.bytes, behind_lsn = excluded.behind_lsn
"""


_DROP_SCHEMA_SQL: Final = """
do $$ begin
    drop schema streamer;
exception when dependent_objects_still_exist or insufficient_privilege then
    null;
end $$
"""


def _source_record(row: Any) -> SourceRecord:
    fields = dict(row)
    fields["acknowledged_lsn"] = Lsn.parse(fields["acknowledged_lsn"])
    if fields["last_transaction"] is not None:
        fields["last_transaction"] = Landmark.from_json(fields["last_transaction"])
    if fields["backlog"] is not None:
        fields["backlog"] = json.loads(fields["backlog"])
    return SourceRecord(**fields)


def _relation_record(row: Any) -> RelationRecord:
    fields = dict(row)
    fields["end_lsn"] = Lsn.parse(fields["end_lsn"])
    if fields["snapshot_lsn"] is not None:
        fields["snapshot_lsn"] = Lsn.parse(fields["snapshot_lsn"])
    if fields["visible_lsn"] is not None:
        fields["visible_lsn"] = Lsn.parse(fields["visible_lsn"])
    fields["resync"] = _resync(fields["resync"])
    return RelationRecord(**fields)


def _held_record(row: Any) -> HeldRecord:
    fields = dict(row)
    if fields["behind_lsn"] is not None:
        fields["behind_lsn"] = Lsn.parse(fields["behind_lsn"])
    return HeldRecord(**fields)


def _resync(stored: str | None) -> Resync:
    return Resync.from_json(None if stored is None else json.loads(stored))


_REQUESTS_SQL: Final = """
select q.id as request_id, q.relation_id, q.action, q.options
from streamer.request q join streamer.relation r on r.id = q.relation_id
where r.source_id = $1 and q.action like 'quarantine%' order by q.id
"""


class Store:
    """The bookkeeping tables, over one connection that many tasks share, one at a time."""

    def __init__(self, address: TargetAddress, name: str = "streamer bookkeeping") -> None:
        self._kept = KeptConnection(address, name)
        self._lock = asyncio.Lock()
        self._claim: Claim | None = None

    def under(self, claim: Claim) -> "Store":
        """Return the same store for the holder of *claim*: it works where that was taken only."""
        other = copy.copy(self)
        other._claim = claim
        return other

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[TargetConnection]:
        """Have the connection for a block, made anew if it was lost.

        Raises TargetConnectionError, TargetRejectedError.
        """
        async with self._lock:
            connection = await self._kept.get(self._claim)
            try:
                yield connection
            except (TargetConnectionError, asyncio.CancelledError):
                connection.terminate()
                raise

    async def close(self) -> None:
        async with self._lock:
            await self._kept.close()

    async def migrate(self) -> None:
        async with self.connection() as connection:
            await migrate(connection)

    async def exists(self) -> bool:
        """Whether the bookkeeping tables are there, as this version makes them."""
        async with self.connection() as connection:
            if await connection.fetch_value("select to_regclass('streamer.migration') is null"):
                return False
            newest = await connection.fetch_value("select max(number) from streamer.migration")
            return bool(newest is not None and newest >= read_migrations("target")[-1].number)

    async def installation(self) -> str:
        """Return the id of this installation, which is that of its bookkeeping."""
        async with self.connection() as connection:
            return str(await connection.fetch_value("select id from streamer.installation"))

    # ---- sources -------------------------------------------------------------------------------

    async def sources(self) -> list[SourceRecord]:
        async with self.connection() as connection:
            return [_source_record(row) for row in await connection.fetch(_SOURCES_SQL)]

    async def read_source(self, source_id: int) -> SourceRecord:
        """Return the record of a source that is registered. Raises TargetFencedError."""
        async with self.connection() as connection:
            rows = await connection.fetch(
                f"select * from ({_SOURCES_SQL}) s where source_id = $1", source_id
            )
        if not rows:
            raise TargetFencedError("target: the bookkeeping of this source was removed")
        return _source_record(rows[0])

    async def set_identity(self, source_id: int, system_identifier: str, timeline: int) -> None:
        async with self.connection() as connection:
            await connection.execute(
                "update streamer.source set system_identifier = $2, timeline = $3 where id = $1",
                source_id,
                system_identifier,
                timeline,
            )

    async def set_source_state(self, source_id: int, state: str, error: str | None = None) -> None:
        async with self.connection() as connection:
            await connection.execute(
                "update streamer.source set state = $2, error = $3 where id = $1",
                source_id,
                state,
                error,
            )

    async def report_failure(self, source_id: int, state: str, error: str, holder: str) -> None:
        """Store why *holder* cannot stream a source, unless another process streams it."""
        async with self.connection() as connection:
            await connection.execute(
                _REPORT_FAILURE_SQL, source_id, state, error, holder, LOCK_CLASS
            )

    async def set_heartbeat_overdue(self, source_id: int, seconds: float | None) -> None:
        """Say for how long a heartbeat has been on its way, or that none has for too long."""
        async with self.connection() as connection:
            await connection.execute(
                "update streamer.source"
                " set heartbeat_since = now() - make_interval(secs => $2::float8) where id = $1",
                source_id,
                seconds,
            )

    async def reset_acknowledged(self, source_id: int, lsn: Lsn) -> None:
        """A new slot begins at *lsn*."""
        async with self.connection() as connection:
            await connection.execute(
                "update streamer.source set acknowledged_lsn = $2::text::pg_lsn,"
                " last_transaction = null where id = $1",
                source_id,
                str(lsn),
            )

    async def set_backlog(self, source_id: int, backlog: dict[str, Any] | None) -> None:
        """Store what is known of a source's backlog; copies go by its ``throttled``."""
        async with self.connection() as connection:
            await connection.execute(
                "update streamer.source set backlog = $2::text::jsonb where id = $1",
                source_id,
                None if backlog is None else json.dumps(backlog),
            )

    async def need_resync(self, source_id: int, error: str) -> None:
        """Changes of a source are lost for good: say so of every relation that is not to be copied
        anyway.
        """
        async with self.connection() as connection:
            await connection.execute(
                "update streamer.relation set error = $2, changed_at = now(),"
                " state = case state when 'paused' then state else 'error' end"
                " where source_id = $1 and snapshot_lsn is not null"
                " and error is distinct from $2",
                source_id,
                error,
            )

    async def forget_source(self, source_id: int) -> None:
        async with self.connection() as connection:
            await connection.execute("delete from streamer.source where id = $1", source_id)

    async def drop_if_empty(self) -> None:
        """Drop the bookkeeping and our replication origins when no source is left in it; the
        schema, too, if nobody else has anything there.
        """
        async with self.connection() as connection, transaction(connection):
            if not await connection.fetch_value("select exists (select from streamer.source)"):
                tables = ", ".join(f"streamer.{name}" for name in TABLES)
                await connection.execute(f"drop table if exists {tables}")
                await connection.execute(_DROP_SCHEMA_SQL)
                await connection.execute(origin.DROP_SQL)

    # ---- audit ---------------------------------------------------------------------------------

    async def write_act(
        self, actor: str, action: str, label: str, options: dict[str, Any] | None = None
    ) -> None:
        """Write an operator's act that makes no request."""
        async with self.connection() as connection, transaction(connection):
            await write_act(connection, actor, action, label, options)

    # ---- relations -----------------------------------------------------------------------------

    async def relations(self, source_id: int | None = None) -> list[RelationRecord]:
        async with self.connection() as connection:
            rows = await connection.fetch(
                f"{_RELATIONS_SQL} where $1::int8 is null or source_id = $1"
                " order by source_id, source",
                source_id,
            )
            return [_relation_record(row) for row in rows]

    async def register_relation(
        self, source_id: int, mapping: RelationMapping, *, may_resume: bool = False
    ) -> RelationRecord:
        """Return the record of a mapped relation, made if it is new.

        One that was mapped before is copied over its own rows. With *may_resume*, when the stream
        is about to begin at the acknowledged position, it goes on if that has not moved since.
        With another target it is new: a copy fills that one. With another type, or other
        expressions, the same target is filled anew, unless the mapping says that it is not to be
        copied.
        """
        is_copied = mapping.rule.initial is not Initial.NONE
        key = (source_id, str(mapping.source))
        async with self.connection() as connection, transaction(connection):
            await connection.execute(
                "delete from streamer.relation"
                " where source_id = $1 and source = $2 and target <> $3",
                *key,
                str(mapping.target),
            )
            has_returned = await bring_back(
                connection, *key, str(mapping.target), may_resume=may_resume
            )
            await connection.execute(
                "insert into streamer.relation (source_id, source, target, type, expressions)"
                " values ($1, $2, $3, $4, $6) on conflict (source_id, source) do update"
                " set type = $4, expressions = $6,"
                " state = case when $5 then 'init' else relation.state end,"
                " snapshot_lsn = case when $5 then null else relation.snapshot_lsn end,"
                " error = null, needs_resync = false"
                " where relation.type <> $4 or relation.expressions is distinct from $6",
                *key,
                str(mapping.target),
                mapping.type.value,
                is_copied,
                mapping.rule.expressions_mark,
            )
            rows = await connection.fetch(
                f"{_RELATIONS_SQL} where source_id = $1 and source = $2", *key
            )
        return replace(_relation_record(rows[0]), has_returned=has_returned)

    async def forget_relation(self, relation_id: int) -> None:
        async with self.connection() as connection, transaction(connection):
            await keep_former(connection, relation_id)
            await connection.execute("delete from streamer.relation where id = $1", relation_id)

    async def set_published(self, published: dict[int, tuple[str | None, str | None]]) -> None:
        """Store the publication marks and replica identities that relations, by their id, have."""
        async with self.connection() as connection:
            await connection.execute(
                "update streamer.relation r set publication_mark = p.mark, identity = p.identity"
                " from unnest($1::int8[], $2::text[], $3::text[]) p (id, mark, identity)"
                " where r.id = p.id",
                list(published),
                [mark for mark, _ in published.values()],
                [identity for _, identity in published.values()],
            )

    async def require_resync(self, relation_id: int, error: str) -> None:
        """Changes of a relation are missing for good: it waits for somebody to ask for a copy."""
        async with self.connection() as connection:
            await connection.execute(
                "update streamer.relation set error = $2, needs_resync = true, changed_at = now(),"
                " state = case state when 'paused' then state else 'error' end,"
                " attempt = attempt + 1, snapshot_lsn = null, waiting_for = null,"
                " resync = coalesce(resync, $3::text::jsonb) where id = $1",
                relation_id,
                error,
                json.dumps(Resync().to_json()),
            )

    async def demand_copy(self, relation_id: int) -> None:
        """A relation that was in step is to be copied again, as by a resync."""
        async with self.connection() as connection:
            await connection.execute(
                "update streamer.relation set error = null, needs_resync = false,"
                " state = case state when 'paused' then state else 'init' end,"
                " waiting_for = null, changed_at = now(),"
                " attempt = attempt + 1, snapshot_lsn = null, resync = $2::text::jsonb"
                " where id = $1",
                relation_id,
                json.dumps(Resync().to_json()),
            )

    async def fail_copy(self, relation_id: int, error: str) -> None:
        """A relation cannot be copied."""
        async with self.connection() as connection:
            await connection.execute(
                "update streamer.relation set state = 'error', error = $2, waiting_for = null,"
                " changed_at = now() where id = $1",
                relation_id,
                error,
            )

    async def set_waiting(self, relation_ids: list[int], reason: str | None) -> None:
        """Store what relations wait for, or that they wait no longer."""
        async with self.connection() as connection:
            await connection.execute(
                "update streamer.relation set waiting_for = $2 where id = any ($1::int8[])"
                " and waiting_for is distinct from $2",
                relation_ids,
                reason,
            )

    async def leaves(self, relation_ids: list[int]) -> dict[int, dict[int, str]]:
        """Return the partitions whose rows are copied or streamed, of relations that have some.

        With each, what attached it; empty where an older version did not store that.
        """
        async with self.connection() as connection:
            rows = await connection.fetch(
                "select id, leaves, leaf_joins from streamer.relation"
                " where id = any ($1::int8[]) and leaves is not null",
                relation_ids,
            )
        return {
            row["id"]: dict(
                zip(row["leaves"], row["leaf_joins"] or [""] * len(row["leaves"]), strict=True)
            )
            for row in rows
        }

    async def set_leaves(self, relation_id: int, leaves: dict[int, str]) -> None:
        """Store the partitions whose rows are copied or streamed, and what attached each."""
        async with self.connection() as connection:
            await connection.execute(
                "update streamer.relation set leaves = $2, leaf_joins = $3 where id = $1",
                relation_id,
                list(leaves),
                list(leaves.values()),
            )

    async def tell_of_gap(self, relation_id: int, error: str) -> bool:
        """Show what a relation in step lacks, if nothing else is shown of it; tell whether that is
        new.
        """
        async with self.connection() as connection:
            told = await connection.execute(
                "update streamer.relation set error = $2"
                " where id = $1 and state = 'ready' and error is null",
                relation_id,
                error,
            )
        return bool(told)

    async def set_streaming_state(
        self, relation_id: int, state: str, error: str | None = None
    ) -> None:
        """Store how applying changes fares, unless an operator wants something else meanwhile."""
        async with self.connection() as connection:
            await connection.execute(
                "update streamer.relation set state = $2, error = $3, changed_at = now()"
                " where id = $1 and state in ('catching_up', 'ready', 'error')"
                " and snapshot_lsn is not null and resync is null",
                relation_id,
                state,
                error,
            )

    # ---- what is held --------------------------------------------------------------------------

    async def held(self) -> dict[int, HeldRecord]:
        """Return what is held of relations, by their id, as their process said last."""
        async with self.connection() as connection:
            records = map(_held_record, await connection.fetch(_HELD_SQL))
            return {record.relation_id: record for record in records}

    async def set_held(self, source_id: int, held: Collection[HeldRecord]) -> None:
        """Say what is held of the relations of a source: of those that are not named, nothing."""
        async with self.connection() as connection:
            await connection.execute(
                _SET_HELD_SQL,
                source_id,
                [record.relation_id for record in held],
                [record.changes for record in held],
                [record.bytes for record in held],
                [None if r.behind_lsn is None else str(r.behind_lsn) for r in held],
            )

    # ---- requests ------------------------------------------------------------------------------

    async def make_request(
        self,
        relation_id: int,
        action: str,
        options: dict[str, Any] | None = None,
        *,
        actor: str = "unknown",
    ) -> None:
        await self.make_requests([relation_id], action, options, actor=actor)

    async def make_requests(
        self,
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
        async with self.connection() as connection, transaction(connection):
            await connection.execute(
                "insert into streamer.request (relation_id, action, options)"
                " select relation_id, $2, $3 from pg_catalog.unnest($1::int8[]) r (relation_id)",
                list(relation_ids),
                action,
                json.dumps(options or {}),
            )
            await write_acts(connection, relation_ids, actor, action, options)
            await connection.execute(f"notify {CHANNEL}")

    async def take_requests(
        self, source_id: int, pause: Callable[[int], None] = lambda _: None
    ) -> list[Request]:
        """Take the requests for a source's relations, in order, storing the states they ask for.

        *pause* is called with each relation that is to be paused, before anybody can see that it
        is. Requests that concern rows in quarantine stay, see `quarantine_requests`.
        """
        async with self.connection() as connection, transaction(connection):
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
                    requests.append(await _take_resync(connection, request))
                    continue
                if request.action == "pause":
                    pause(request.relation_id)
                await connection.execute(_REQUESTED_STATE_SQL[request.action], request.relation_id)
                requests.append(request)
        return requests

    async def quarantine_requests(self, source_id: int) -> list[Request]:
        """Return the requests that the lanes of a source fulfil, and then remove, in order."""
        async with self.connection() as connection:
            return [_request(row) for row in await connection.fetch(_REQUESTS_SQL, source_id)]


def _request(row: Any) -> Request:
    return Request(row["request_id"], row["relation_id"], row["action"], json.loads(row["options"]))


async def _take_resync(connection: TargetConnection, request: Request) -> Request:
    """Store that a resync is wanted; return what will be done."""
    stored = await connection.fetch_value(
        _RESYNC_SQL, request.relation_id, json.dumps(Resync.from_json(request.options).to_json())
    )
    return replace(request, options=json.loads(stored))


# A copy that is under way will do.
_RESYNC_SQL: Final = """
update streamer.relation set
    state = 'init', error = null, waiting_for = null, needs_resync = false, changed_at = now(),
    resync = $2::text::jsonb,
    attempt = case when snapshot_lsn is null then attempt else attempt + 1 end,
    snapshot_lsn = null
where id = $1 returning resync::text
"""
# A table whose copy never finished has no snapshot_lsn: resumed, it is copied.
_REQUESTED_STATE_SQL: Final = {
    "pause": "update streamer.relation set state = 'paused', changed_at = now() where id = $1",
    "resume": "update streamer.relation set"
    " state = case when snapshot_lsn is null or resync is not null then 'init' else 'ready' end,"
    " error = null, needs_resync = false,"
    " changed_at = now() where id = $1 and state in ('paused', 'error')",
}
