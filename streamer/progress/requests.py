"""The rows of streamer.request: operators' requests, and the notification that wakes the
process.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from streamer.mapping.mass_delete import MassDelete
from streamer.mapping.resync import Mode, Resync
from streamer.progress.audit import write_acts
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.table import ELSEWHERE, BookkeepingTable, Codec, Executor

CHANNEL: Final = "streamer"
"""Notified when an operator makes a request, or `WAITING` when one waits for the sources."""

AUTOMATIC: Final = "automatic"
"""The option of a request that no operator has made: a pause of the table wins."""

WAITING: Final = "wait"
WAITING_FOR_TABLES: Final = "wait tables"
"""Payload of a notification by `streamer wait`: store positions now, not when it suits."""


@dataclass(frozen=True, slots=True)
class Request:
    """A row of streamer.request: an operator's request."""

    request_id: Annotated[int, Codec("q.id")]
    relation_id: int
    action: str
    options: dict[str, Any]
    is_to_point: Annotated[bool, ELSEWHERE] = False
    """A resync of a table in sync, which applies changes up to the copy's point."""
    stays_paused: Annotated[bool, ELSEWHERE] = False
    """No operator has asked for this resync: it begins when one resumes the table."""

    @property
    def resync(self) -> Resync:
        return Resync.from_json(self.options)

    @property
    def decided(self) -> MassDelete | None:
        """The mass delete about which a taken request to resume has decided."""
        brake = self.options.get("brake")
        return None if brake is None else MassDelete.from_json(brake)


# A request to resume is about the transaction that the operator has seen.
_INSERT_SQL: Final = """
insert into streamer.request (relation_id, action, options)
select r.id, $2, $3::text::jsonb || case when $2 = 'resume' and r.brake is not null
       then jsonb_build_object('lsn', r.brake->>'lsn') else '{}' end
from streamer.relation r where r.id = any ($1::int8[]) order by r.id
"""


REQUESTS: Final = BookkeepingTable("request", "q", Request)
SUMMARY_SQL: Final = """
select r.source, q.action, q.requested_at
from streamer.request q join streamer.relation r on r.id = q.relation_id order by q.id
"""
_TAKE_SQL: Final = f"""
delete from streamer.request q using streamer.relation r
where r.id = q.relation_id and r.source_id = $1 and q.action in ('resync', 'resume', 'pause')
returning {REQUESTS.listed}
"""
_AUTOMATIC_SQL: Final = """
insert into streamer.request (relation_id, action, options)
select $1, 'resync', $2::text::jsonb
where not exists (select from streamer.request
                  where relation_id = $1 and action = 'resync' and options = $2::text::jsonb)
"""


RENAMED_SQL: Final = """
coalesce((select jsonb_agg(distinct case when m ? c then m->>c else c end)
            from jsonb_array_elements_text({columns}) c, (select $2::text::jsonb) v (m)
           where m->c is distinct from 'null'::jsonb), '[]')
"""
"""The names in the array ``{columns}`` after renames, which ``$2`` maps; null: dropped."""
_RENAME_SQL: Final = """
update streamer.request set options = jsonb_set(options, '{{columns}}', {columns})
where relation_id = $1 and options ? 'columns'
""".format(columns=RENAMED_SQL.format(columns="options->'columns'"))


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
    async with bookkeeping.transaction() as connection:
        await connection.execute(
            _INSERT_SQL,
            list(relation_ids),
            action,
            json.dumps(options or {}),
        )
        await write_acts(connection, relation_ids, actor, action, options)
        await connection.execute(f"notify {CHANNEL}")


async def has_requests(session: Executor) -> bool:
    """Whether any request waits, for whichever source. The bookkeeping may not exist yet."""
    if not await session.fetch_value("select to_regclass('streamer.request') is not null"):
        return False
    return bool(await session.fetch_value("select exists (select from streamer.request)"))


async def take(session: Executor, source_id: int) -> list[Request]:
    """Remove the requests for a source's relations, in order; return them.

    Requests about rows in quarantine stay: the lanes fulfil them.
    """
    taken = map(REQUESTS.record, await session.fetch(_TAKE_SQL, source_id))
    return sorted(taken, key=lambda request: request.request_id)


async def read_quarantine_requests(session: Executor, source_id: int) -> list[Request]:
    """Return the requests that the lanes of a source fulfil, and then remove, in order."""
    return await REQUESTS.read(
        session,
        "join streamer.relation r on r.id = q.relation_id"
        " where r.source_id = $1 and q.action like 'quarantine%' order by q.id",
        source_id,
    )


async def remove_request(session: Executor, request_id: int) -> bool:
    """Remove a request that is fulfilled; False if another process has done so."""
    return bool(await REQUESTS.delete(session, "where id = $1", request_id))


def resync_of_unfilled(columns: Sequence[str] | None) -> Resync:
    """Return the copy that brings values which existing rows lack; None: of all columns. Pure."""
    return Resync(Mode.DIFF, columns=None if columns is None else tuple(columns))


async def request_automatic(session: Executor, relation_id: int, resync: Resync) -> None:
    """Make a request that no operator has made, unless the same one waits already."""
    options = resync.to_json() | {AUTOMATIC: True}
    await session.execute(_AUTOMATIC_SQL, relation_id, json.dumps(options))
    await session.execute(f"notify {CHANNEL}")


async def request_resume(session: Executor, relation_id: int) -> None:
    """Make a request to resume a relation that no operator has made, if it is in error."""
    await session.execute(
        "insert into streamer.request (relation_id, action)"
        " select id, 'resume' from streamer.relation where id = $1 and state = 'error'",
        relation_id,
    )


async def rename_requested(session: Executor, relation_id: int, names: str) -> None:
    """Rename columns for which requests ask. *names*: JSON, new names by former ones."""
    await session.execute(_RENAME_SQL, relation_id, names)
