"""The rows of streamer.request: the queue of operators' requests, which is also their audit.

A request is ``queued`` until the process that streams its source has stored the requested state
(`taken_requests`). Then it is ``taken``, and finally ``done`` or ``failed``. The row stays as
history, beside the actions of commands that do their work themselves. Each request removes rows
older than `KEPT_DAYS`.
"""

import enum
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_table import ELSEWHERE, BookkeepingTable, Codec, Executor
from streamer.control.mass_delete import MassDelete
from streamer.control.resync_options import Mode, Resync
from streamer.errors.error_classes import MappingError, StreamerError, TargetError
from streamer.errors.error_reports import ErrorReport

CHANNEL: Final = "streamer"
"""The channel of notifications about operators' requests, and about clients that wait
(`WAITING`).
"""

AUTOMATIC: Final = "automatic"
"""Marks a request that streamer made itself. Such a request must not end a pause."""

WAITING: Final = "wait"
WAITING_FOR_TABLES: Final = "wait tables"
"""The payload of a notification by `streamer wait`, which requests stored positions at once."""

TEARDOWN: Final = "teardown"
BUILD_INDEX: Final = "build index"
END_SESSION: Final = "end session"
PURGE: Final = "purge"
EXECUTE: Final = "execute"
CUTOVER: Final = "cutover"
RESTART: Final = "restart"
_OBJECTS: Final = dict.fromkeys((TEARDOWN, PURGE, EXECUTE, CUTOVER, RESTART), "source") | {
    BUILD_INDEX: "index",
    END_SESSION: "session",
}
KEPT_DAYS: Final = 400
"""The age in days at which the audits of the target and of the mapping database drop a row."""


class RequestState(enum.StrEnum):
    QUEUED = "queued"
    TAKEN = "taken"
    RUNNING = "running"
    """A command does the work itself, and stores the outcome."""
    DONE = "done"
    FAILED = "failed"


_IS_OPEN: Final = "q.state in ('queued', 'taken') and coalesce(q.relation_id, q.source_id) is"
_OPEN: Final = f"{_IS_OPEN} not null"
_STATE_SQL: Final = f"case when {_IS_OPEN} null then 'failed' else {{}} end"


@dataclass(frozen=True, slots=True)
class Request:
    """A row of streamer.request. ``label``: source and table, source, or target table.

    ``actor``: the operator who made the request; None for streamer itself.
    """

    request_id: Annotated[int, Codec("q.id")]
    relation_id: int | None
    action: str
    options: dict[str, Any]
    state: Annotated[RequestState, Codec(_STATE_SQL, RequestState)] = RequestState.QUEUED
    """Failed for a request about a table or source that is not mapped now."""
    error: ErrorReport | None = None
    actor: str | None = None
    label: str | None = None
    requested_at: datetime | None = None
    taken_at: datetime | None = None
    ended_at: datetime | None = None
    source_id: Annotated[
        int | None,
        Codec(
            "coalesce(q.source_id, (select r.source_id from streamer.relation r"
            " where r.id = q.relation_id))"
        ),
    ] = None
    is_to_point: Annotated[bool, ELSEWHERE] = False
    """Whether the resync of a table in sync first applies the stream up to the copy's point."""
    stays_paused: Annotated[bool, ELSEWHERE] = False
    """Whether the automatic resync of a paused table begins only when an operator resumes the
    table.
    """

    @property
    def resync(self) -> Resync:
        return Resync.from_json(self.options)

    @property
    def decided(self) -> MassDelete | None:
        """The mass delete that a taken request to resume decides about."""
        mass_delete = self.options.get("mass_delete")
        return None if mass_delete is None else MassDelete.from_json(mass_delete)

    @property
    def is_open(self) -> bool:
        return self.state in (RequestState.QUEUED, RequestState.TAKEN)

    @property
    def verb(self) -> str:
        return self.action.replace("_", " ")

    @property
    def object(self) -> str:
        """The kind of the object that ``label`` names."""
        return _OBJECTS.get(self.action, "table")

    @property
    def reason(self) -> str | None:
        """The reason why the request failed, or why changes stayed in quarantine."""
        if self.error is None:
            return f"the {self.object} is no longer mapped" if self.has_failed else None
        return self.error.text

    @property
    def has_failed(self) -> bool:
        return self.state is RequestState.FAILED

    @property
    def shown_options(self) -> dict[str, Any]:
        """The options with the number of keys instead of the keys, which are values of rows."""
        scope = self.options.get("scope")
        if not scope or isinstance(scope.get("keys"), int):
            return self.options
        count = sum(len(keys["rows"]) for keys in scope.get("keys", ()))
        return {**self.options, "scope": {**scope, "keys": count}}

    def to_json(self) -> dict[str, Any]:
        times = {name: getattr(self, name) for name in ("requested_at", "taken_at", "ended_at")}
        return {
            "id": self.request_id,
            "action": self.verb,
            "table": self.label,
            "options": self.shown_options,
            "actor": self.actor,
            "state": self.state,
            "error": self.reason,
            "code": self.error and self.error.code,
            **{name: at and at.isoformat() for name, at in times.items()},
        }


REQUESTS: Final = BookkeepingTable("request", "q", Request)
# A request to resume concerns the transaction that the operator has seen.
_INSERT_SQL: Final = """
insert into streamer.request (relation_id, action, options, actor, label)
select r.id, $2, $3::text::jsonb || case when $2 = 'resume' and r.mass_delete is not null
       then jsonb_build_object('lsn', r.mass_delete->>'lsn') else '{}' end, $4,
       pg_catalog.concat_ws(':', s.database, s.sid) || ' ' || r.source
from streamer.relation r join streamer.source s on s.id = r.source_id
where r.id = any ($1::int8[])
"""
_SHARING_SQL: Final = """
select distinct o.id from streamer.relation r
join streamer.relation o on o.target = r.target and o.disjoint
where r.id = any ($1::int8[]) and r.disjoint
"""
"""The relations of targets whose rows only keys distinguish."""
_UNLESS_QUEUED: Final = """
and not exists (select from streamer.request
                where relation_id = r.id and action = $2 and options = $3::text::jsonb
                  and state = 'queued')
"""
_ACT_SQL: Final = """
insert into streamer.request (action, options, state, actor, label)
values ($1, $2::text::jsonb, 'running', $3, $4) returning id
"""
_INTERRUPTED: Final = ErrorReport("the command was interrupted", StreamerError.code)
_OF_SOURCE: Final = """
left join streamer.relation r on r.id = q.relation_id
where coalesce(q.source_id, r.source_id) = $1
"""
_RESTART_SQL: Final = """
insert into streamer.request (source_id, action, actor, label)
select s.id, 'restart', $2, pg_catalog.concat_ws(':', s.database, s.sid)
from streamer.source s where s.id = $1 returning id
"""
SUMMARY_SQL: Final = """
select q.label, q.action, q.state, q.error_code, q.requested_at, q.taken_at, q.ended_at
from streamer.request q order by q.id desc limit 200
"""


RENAMED_SQL: Final = """
coalesce((select jsonb_agg(distinct case when m ? c then m->>c else c end)
            from jsonb_array_elements_text({columns}) c, (select $2::text::jsonb) v (m)
           where m->c is distinct from 'null'::jsonb), '[]')
"""
"""The names in the array ``{columns}`` after the renames in ``$2``; null for a dropped column."""
_RENAME_SQL: Final = """
update streamer.request set options = jsonb_set(options, '{{columns}}', {columns})
where relation_id = $1 and state = 'queued' and options ? 'columns'
""".format(columns=RENAMED_SQL.format(columns="options->'columns'"))


async def make_request(
    bookkeeping: Bookkeeping,
    relation_id: int,
    action: str,
    options: dict[str, Any] | None = None,
    *,
    actor: str = "unknown",
) -> int:
    """Return the id of the request. Raises MappingError for a table that is not mapped now."""
    made = await make_requests(bookkeeping, [relation_id], action, options, actor=actor)
    if relation_id not in made:
        raise MappingError("the table is no longer mapped", hint="`streamer status` lists tables")
    return made[relation_id]


async def make_requests(
    bookkeeping: Bookkeeping,
    relation_ids: Sequence[int],
    action: str,
    options: dict[str, Any] | None = None,
    *,
    actor: str = "unknown",
) -> dict[int, int]:
    """Make a request for several relations at once, so that a starting process reads all requests
    or none. A resync of all rows of a table that shares its target by disjoint keys includes all
    tables with this target.

    A source that needs a copy of all tables cannot start with requests for only some tables. Return
    the ids of the requests by the ids of the relations. *actor*: the operator.
    """
    stored = json.dumps(options or {})
    async with bookkeeping.transaction() as connection:
        ids = set(relation_ids)
        if action == "resync" and not Resync.from_json(options).compares:
            ids |= {row["id"] for row in await connection.fetch(_SHARING_SQL, list(ids))}
        rows = await connection.fetch(
            f"{_INSERT_SQL} order by r.id returning id, relation_id",
            list(ids),
            action,
            stored,
            actor,
        )
        await prune_requests(connection)
        await connection.execute(f"notify {CHANNEL}")
    return {row["relation_id"]: row["id"] for row in rows}


async def read_queued_resyncs(
    session: Executor, relation_ids: Sequence[int] | None = None
) -> dict[int, int]:
    """Return the requests for copies that no process has taken, by relation. None: of all."""
    rows = await session.fetch(
        "select relation_id, max(id) as id from streamer.request"
        " where ($1::int8[] is null or relation_id = any ($1)) and relation_id is not null"
        " and action = 'resync' and state = 'queued' group by relation_id",
        None if relation_ids is None else list(relation_ids),
    )
    return {row["relation_id"]: row["id"] for row in rows}


def name_requests(ids: Sequence[int]) -> str:
    """Return requests in words, such as ``requests 3 to 5``. *ids*: in order. Pure."""
    first, last = ids[0], ids[-1]
    if first == last:
        return f"request {first}"
    if last - first == len(ids) - 1:
        return f"requests {first} {'to' if len(ids) > 2 else 'and'} {last}"
    return f"requests {', '.join(map(str, ids[:-1]))} and {last}"


async def request_restart(bookkeeping: Bookkeeping, source_id: int, *, actor: str) -> int | None:
    """Request a new attempt from the process that streams a source; return the id of the request.

    None for a source that has left the mapping meanwhile.
    """
    async with bookkeeping.transaction() as connection:
        number: int | None = await connection.fetch_value(_RESTART_SQL, source_id, actor)
        await prune_requests(connection)
        await connection.execute(f"notify {CHANNEL}")
    return number


async def end_restarts(session: Executor, source_id: int, error: ErrorReport | None = None) -> None:
    """Store the outcome of the taken restarts of a source, which an attempt has begun or failed
    to begin.
    """
    state = RequestState.DONE if error is None else RequestState.FAILED
    await REQUESTS.update(
        session,
        {"state": state, "error": error},
        "where source_id = $2 and action = 'restart' and state = 'taken'",
        source_id,
        also="ended_at = now()",
    )


async def begin_act(
    bookkeeping: Bookkeeping,
    actor: str,
    action: str,
    label: str,
    options: dict[str, Any] | None = None,
) -> int:
    """Store an action of a command on *label* before its work begins; return the id.

    An earlier action of the same kind without an outcome belongs to a killed command.
    """
    stored = json.dumps(options or {})
    async with bookkeeping.transaction() as connection:
        await REQUESTS.update(
            connection,
            {"state": RequestState.FAILED, "error": _INTERRUPTED},
            "where action = $2 and label = $3 and options = $4::text::jsonb and state = 'running'",
            action,
            label,
            stored,
            also="ended_at = now()",
        )
        number = await connection.fetch_value(_ACT_SQL, action, stored, actor, label)
        await prune_requests(connection)
    return int(number)


@dataclass(slots=True)
class Act:
    """The work of a command. ``error``: the reason of a failure without an exception."""

    error: ErrorReport | None = None


@asynccontextmanager
async def acting(
    bookkeeping: Bookkeeping,
    actor: str,
    action: str,
    label: str,
    options: dict[str, Any] | None = None,
) -> AsyncIterator[Act]:
    """Store an action of a command on *label*, and the outcome at the end of the block."""
    number, act = await begin_act(bookkeeping, actor, action, label, options), Act()
    try:
        yield act
    except StreamerError as exc:
        with suppress(TargetError):
            await end_request(bookkeeping, number, ErrorReport.of(exc))
        raise
    await end_request(bookkeeping, number, act.error)


async def prune_requests(session: Executor) -> None:
    """Remove rows that are too old, except for open requests."""
    await REQUESTS.delete(
        session,
        "where requested_at < pg_catalog.now() - pg_catalog.make_interval(days => $1)"
        f" and ({_OPEN}) is not true",
        KEPT_DAYS,
    )


async def read_audited(session: Executor, limit: int) -> tuple[list[Request], int]:
    """Return the newest requests and actions of operators, and the number of all of them."""
    requests = await REQUESTS.read(
        session, "where q.actor is not null order by q.requested_at desc, q.id desc limit $1", limit
    )
    sql = "select pg_catalog.count(*) from streamer.request where actor is not null"
    return requests, await session.fetch_value(sql)


async def read_requests(
    session: Executor, ids: Sequence[int] | None = None, limit: int | None = None
) -> list[Request]:
    """Return the requests with these *ids*, or the newest *limit* requests, oldest first."""
    requests = await REQUESTS.read(
        session,
        "where $1::int8[] is null or q.id = any ($1) order by q.id desc limit $2",
        None if ids is None else list(ids),
        limit,
    )
    return requests[::-1]


async def has_requests(session: Executor) -> bool:
    """Whether a request is queued, for any source. The bookkeeping may not exist yet."""
    if not await session.fetch_value("select to_regclass('streamer.request') is not null"):
        return False
    sql = f"select exists (select from streamer.request q where {_OPEN} and q.state = 'queued')"
    return bool(await session.fetch_value(sql))


async def take(session: Executor, source_id: int) -> list[Request]:
    """Mark the requests for a source and its relations as taken; return them in order.

    Requests about rows in quarantine stay queued, because the lanes fulfil them.
    """
    requests = await REQUESTS.read(
        session,
        f"{_OF_SOURCE} and q.state = 'queued' and q.action not like 'quarantine%'"
        " order by q.id for update of q",
        source_id,
    )
    for request in requests:  # the copy has stored the keys
        values = {"state": RequestState.TAKEN, "options": request.shown_options}
        await REQUESTS.set(session, request.request_id, values, also="taken_at = now()")
    return requests


async def read_taken(session: Executor, source_id: int) -> list[Request]:
    """Return the unfinished requests for a source and its relations, in order."""
    return await REQUESTS.read(
        session, f"{_OF_SOURCE} and q.state = 'taken' order by q.id", source_id
    )


async def read_quarantine_requests(session: Executor, source_id: int) -> list[Request]:
    """Return the requests that the lanes of a source fulfil and end, in order."""
    return await REQUESTS.read(
        session,
        f"{_OF_SOURCE} and {_OPEN} and q.action like 'quarantine%' order by q.id",
        source_id,
    )


async def lock_request(session: Executor, request_id: int) -> bool:
    """Lock an open request until the transaction ends; False if another process has ended it."""
    sql = f"select true from streamer.request q where q.id = $1 and {_OPEN} for update"
    return bool(await session.fetch_value(sql, request_id))


async def end_request(
    session: Executor,
    request_id: int,
    error: ErrorReport | None = None,
    *,
    is_done: bool = False,
) -> None:
    """Store the outcome of a request, unless already stored.

    *is_done*: the request is fulfilled, and *error* concerns changes that stay in quarantine.
    """
    state = RequestState.DONE if error is None or is_done else RequestState.FAILED
    await REQUESTS.set(
        session,
        request_id,
        {"state": state, "error": error},
        "and state in ('queued', 'taken', 'running')",
        also="taken_at = coalesce(taken_at, now()), ended_at = now()",
    )


def resync_of_unfilled(columns: Sequence[str] | None) -> Resync:
    """Return the copy that writes values of *columns* which existing rows lack; None for all
    columns. Pure.
    """
    return Resync(Mode.DIFF, columns=None if columns is None else tuple(columns))


async def request_automatic(session: Executor, relation_id: int, resync: Resync) -> None:
    """Request *resync* for streamer itself, unless the same request is queued already."""
    options = resync.to_json() | {AUTOMATIC: True}
    await _insert(session, relation_id, "resync", options, _UNLESS_QUEUED)
    await session.execute(f"notify {CHANNEL}")


async def request_resume(session: Executor, relation_id: int) -> None:
    """Make an automatic request to resume a relation, if the relation is in error."""
    await _insert(session, relation_id, "resume", {}, "and r.state = 'error'")


async def _insert(
    session: Executor, relation_id: int, action: str, options: dict[str, Any], condition: str
) -> None:
    sql = f"{_INSERT_SQL} {condition}"
    await session.execute(sql, [relation_id], action, json.dumps(options), None)


async def rename_requested(session: Executor, relation_id: int, names: str) -> None:
    """Rename columns in requests. *names*: JSON, new names by former names."""
    await session.execute(_RENAME_SQL, relation_id, names)
