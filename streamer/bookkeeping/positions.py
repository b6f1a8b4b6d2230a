"""The positions of tables and sources. The target contains all changes of a table up to its
position, and streamer acknowledges the position of a source.

The transaction that writes changes of a table moves the position of the table. The session that
holds the lock of a source stores the acknowledged position. Both updates fail without the lock.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_table import Executor, fields_of, plain, to_json
from streamer.bookkeeping.relation_records import RELATIONS
from streamer.bookkeeping.source_lock import LockSession
from streamer.bookkeeping.sources import set_source
from streamer.errors.error_classes import TargetFencedError
from streamer.mapping.rules import SourceLabel
from streamer.source.history_check import CommittedTransaction
from streamer.target.connection import TargetConnection
from streamer.target.fencing_token import FencingToken
from streamer.util.lsn import Lsn

_POSITIONS_SQL: Final = """
select s.database, s.sid, s.acknowledged_lsn::text as acknowledged_lsn,
       r.id as relation_id, r.source, r.row_sid, r.state, r.visible_lsn::text as visible_lsn,
       exists (select from streamer.request q where q.relation_id = r.id and q.state = 'queued')
           as has_request
from streamer.source s left join streamer.relation r on r.source_id = s.id
order by s.database, s.sid, r.source
"""
_ACKNOWLEDGE_SQL: Final = """
update streamer.source s set
    acknowledged_lsn = p.lsn,
    visible_time = greatest(
        least(s.visible_time, clock_timestamp()),
        clock_timestamp() - make_interval(secs => p.visible_seconds)),
    last_transaction = coalesce(p.last_transaction, s.last_transaction),
    heartbeat_seconds = p.heartbeat_seconds
from pg_catalog.json_to_recordset($1::text::json) p (
    id int8, token text, stored_lsn pg_lsn, lsn pg_lsn, visible_seconds float8,
    last_transaction jsonb, heartbeat_seconds float8)
where s.id = p.id and s.lock_token = p.token and s.acknowledged_lsn = p.stored_lsn
returning s.lock_token as token
"""
VISIBLE_UNTIL_SQL: Final = """
select coalesce(min(coalesce(
           case when r.snapshot_lsn is not null or r.state = 'ready'
                then least(s.visible_time, r.lag_since) end, 'epoch')), 'epoch') as visible_until
from streamer.relation r join streamer.source s on s.id = r.source_id
where r.target = {target}
"""
"""The time up to which a target table shows all commits of its sources, for other programs.

*target*: the name of the table as a string constant. The time is the epoch before the first copy.
"""


@dataclass(frozen=True, slots=True)
class RelationPosition:
    """A mapped table: its state, and the position up to which all its changes are visible.

    ``has_request``: the process has not fulfilled a request of an operator yet.
    """

    relation_id: int
    source: str
    row_sid: str | None
    state: str
    visible_lsn: Lsn | None
    has_request: bool


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """A source with its mapped tables, in the order of their names."""

    label: SourceLabel
    acknowledged_lsn: Lsn
    relations: list[RelationPosition] = field(default_factory=list)


async def read_positions(bookkeeping: Bookkeeping) -> dict[str, SourcePosition]:
    """Return the positions of each source by its label, in a single snapshot.

    Waiting clients request positions several times a second, so the query reads few columns.
    """
    rows = await bookkeeping.fetch(_POSITIONS_SQL)
    sources: dict[str, SourcePosition] = {}
    for row in rows:
        label = SourceLabel(row["database"], row["sid"])
        if label not in sources:
            sources[label] = SourcePosition(label, Lsn.parse(row["acknowledged_lsn"]))
        if row["relation_id"] is not None:
            visible = row["visible_lsn"]
            sources[label].relations.append(
                RelationPosition(
                    row["relation_id"],
                    row["source"],
                    row["row_sid"],
                    row["state"],
                    None if visible is None else Lsn.parse(visible),
                    row["has_request"],
                )
            )
    return sources


# ---- of tables ---------------------------------------------------------------------------------


def move_sql(moved: Sequence[tuple[int, Lsn, Lsn]], fences: Collection[FencingToken]) -> str:
    """Return the statement that moves the positions of relations, as the last statement of the
    transaction that writes their changes. Pure.

    *moved*: the id of each relation, its present and its next position. The statement fails if
    another process has moved a position, or has taken the lock of its source.
    """
    parameters: list[tuple[str, Iterable[object]]] = [
        ("int8", (relation_id for relation_id, _, _ in moved)),
        ("pg_lsn", (stored_lsn for _, stored_lsn, _ in moved)),
        ("pg_lsn", (lsn for _, _, lsn in moved)),
        ("int8", (fence.source_id for fence in fences)),
        ("text", (fence.token for fence in fences)),
    ]
    # The values are numbers, positions and hexadecimal tokens, which need no quotes.
    arrays = [f"'{{{','.join(map(str, values))}}}'::{kind}[]" for kind, values in parameters]
    return f"select streamer.set_progress({', '.join(arrays)})"


async def lock_positions(session: Executor, relation_ids: Sequence[int]) -> dict[int, Lsn]:
    """Return the positions of relations, whose rows stay locked until the transaction ends."""
    rows = await session.fetch(
        "select id, end_lsn::text as end_lsn from streamer.relation"
        " where id = any ($1::int8[]) for update",
        relation_ids,
    )
    return {row["id"]: Lsn.parse(row["end_lsn"]) for row in rows}


async def set_visible(session: Executor, visible: Mapping[int, Lsn | None]) -> None:
    """Store the position up to which all changes of relations, by id, are visible."""
    rows = ({"id": key, "visible_lsn": lsn} for key, lsn in visible.items())
    await RELATIONS.update_each(session, rows, "and r.visible_lsn is distinct from v.visible_lsn")


# ---- of sources --------------------------------------------------------------------------------


async def reset_acknowledged(session: Executor, source_id: int, lsn: Lsn) -> None:
    """Store *lsn* as the start of a new slot."""
    await set_source(session, source_id, acknowledged_lsn=lsn, last_transaction=None)


@dataclass(frozen=True, slots=True)
class AcknowledgedPosition:
    """The next position to acknowledge to a source; it replaces ``stored_lsn``."""

    stored_lsn: Lsn
    lsn: Lsn
    visible_seconds: float | None
    """Seconds since the latest time for which the target shows all commits of the source."""
    last_transaction: CommittedTransaction | None
    """A transaction up to ``lsn``, newer than the stored transaction."""
    heartbeat_seconds: float | None


class AcknowledgedPositions:
    """Stores acknowledged positions of a process, over the session that holds its locks.

    Positions that several sources acknowledge while a statement runs go into the next statement.
    """

    def __init__(self, locks: LockSession) -> None:
        self._locks = locks
        self._waiting: dict[FencingToken, AcknowledgedPosition] = {}
        """The positions that the next statement stores."""
        self._next: asyncio.Task[set[str]] | None = None
        """The task of that statement, which returns the valid tokens."""

    async def acknowledge(self, fence: FencingToken, position: AcknowledgedPosition) -> None:
        """Store *position* before streamer reports it to the source.

        After a TargetConnectionError the position may or may not be stored, so the attempt must
        end. Raises TargetFencedError if the bookkeeping has a different position than
        ``stored_lsn``.
        """
        self._locks.require(fence)
        self._waiting[fence] = position
        if self._next is None:
            self._next = self._locks.use_held(self._store_waiting)
        if fence.token not in await asyncio.shield(self._next):
            self._locks.require(fence)
            raise TargetFencedError(
                "target: another process has moved the acknowledged position, or the target was "
                "restored to an earlier time"
            )

    async def _store_waiting(self, held: Mapping[FencingToken, TargetConnection]) -> set[str]:
        waiting, self._waiting, self._next = self._waiting, {}, None
        positions = [
            {"id": fence.source_id, "token": fence.token}
            | {name: plain(value) for name, value in fields_of(position).items()}
            for fence, position in waiting.items()
            if fence in held
        ]
        if not positions:
            return set()
        session = next(iter(held.values()))
        rows = await session.fetch(_ACKNOWLEDGE_SQL, to_json(positions))
        return {row["token"] for row in rows}
