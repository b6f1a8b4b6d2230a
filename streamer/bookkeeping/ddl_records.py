"""The rows of streamer.ddl: changes of the definitions of source tables.

A row is a command at the source, for a single table. The process writes the row together with the
statements that it runs at the target, or before it stops for an operator's decision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from streamer.bookkeeping.bookkeeping_table import BookkeepingTable, Codec, Executor
from streamer.bookkeeping.requests import CHANNEL, request_resume
from streamer.util.lsn import Lsn

WAITING: Final = "waiting"
APPLY: Final = "apply"
SKIP: Final = "skip"
MADE: Final = "made"


@dataclass(frozen=True, slots=True)
class DdlPlace:
    """The command at the source: its table, its transaction, and its number in the transaction."""

    relation_id: int
    lsn: Lsn
    number: int


@dataclass(frozen=True, slots=True)
class DdlDecision:
    """The state of a command.

    ``state``: `WAITING`, `MADE`, or the operator's decision; None if the command did not have to
    wait. ``statements``: the operator's statements, which replace streamer's. ``reason``: the
    reason for the wait. ``made``: the changes that a peer source has made at the target for all
    sources.
    """

    state: str | None = None
    made: Sequence[str] = ()
    statements: tuple[str, ...] | None = None
    reason: str | None = None

    @property
    def is_decided(self) -> bool:
        """Whether the state is the decision of an operator."""
        return self.state in (APPLY, SKIP)

    @property
    def is_edited(self) -> bool:
        """Whether the operator has replaced streamer's statements."""
        return self.is_decided and self.statements is not None


@dataclass(frozen=True, slots=True)
class DdlRecord:
    """A command at the source, and its application at the target."""

    id: int
    database: Annotated[str, Codec("s.database")]
    sid: Annotated[str | None, Codec("s.sid")]
    table: Annotated[str, Codec("r.source")]
    row_sid: Annotated[str | None, Codec("r.row_sid")]
    state: str
    changes: list[str]
    query: str
    statements: list[str]
    reason: str | None
    lsn: Annotated[str, Codec("d.lsn::text")]
    at: Annotated[str, Codec("d.changed_at::text")]


DDL: Final = BookkeepingTable(
    "ddl",
    "d",
    DdlRecord,
    "join streamer.relation r on r.id = d.relation_id join streamer.source s on s.id = r.source_id",
)
_PUT_SQL: Final = """
insert into streamer.ddl
    (relation_id, lsn, number, query, changes, statements, reason, state)
values ($1, $2::text::pg_lsn, $3, $4, $5::text[], $6::text[], $7, $8)
on conflict (relation_id, lsn, number) do update set
    statements = excluded.statements, reason = excluded.reason, state = excluded.state,
    changed_at = now()
where excluded.state <> 'waiting' or ddl.state = coalesce($9, 'waiting')
"""
_DECIDE_SQL: Final = """
update streamer.ddl set state = $2, edited = $3::text[], changed_at = now()
where id = (select min(id) from streamer.ddl where relation_id = $1 and state = 'waiting')
returning id, number
"""


async def read_decision(session: Executor, place: DdlPlace) -> DdlDecision:
    """Return the decision about a command so far."""
    rows = await session.fetch(
        "select state, edited, reason, case when is_made then changes else '{}' end as made"
        " from streamer.ddl where relation_id = $1"
        " and lsn = $2::text::pg_lsn and number = $3 and state not in ('applied', 'skipped')",
        place.relation_id,
        str(place.lsn),
        place.number,
    )
    if not rows:
        return DdlDecision()
    edited = rows[0]["edited"]
    statements = None if edited is None else tuple(edited)
    return DdlDecision(rows[0]["state"], rows[0]["made"], statements, rows[0]["reason"])


_MADE_SQL: Final = """
insert into streamer.ddl (relation_id, lsn, number, query, changes, statements, state, is_made)
select distinct on (w.relation_id) w.relation_id, w.lsn, w.number + $3 - own.number, $4,
       $5::text[], '{}', 'made', true
  from streamer.relation r
  join streamer.relation o on o.target = r.target and o.id <> r.id
  join streamer.ddl w on w.relation_id = o.id and w.state in ('waiting', 'apply', 'made')
   and w.edited is null and w.lsn = (select max(e.lsn) from streamer.ddl e
       where e.relation_id = o.id and e.state in ('waiting', 'apply', 'made'))
  join streamer.ddl own on own.relation_id = r.id and own.lsn = $2::text::pg_lsn
   and own.state = 'applied' and own.changes = w.changes
 where r.id = $1 order by w.relation_id, w.number, own.number
on conflict (relation_id, lsn, number) do update
   set is_made = true, reason = null, changed_at = now(),
       state = case ddl.state when 'apply' then 'apply' else 'made' end
 where ddl.state in ('waiting', 'apply') and ddl.edited is null and ddl.changes = excluded.changes
returning relation_id
"""


async def mark_made_for_peers(
    session: Executor, place: DdlPlace, query: str, changes: Sequence[str]
) -> None:
    """Mark the command of *place* as made for all peers that wait to make the same change.

    A peer waits at the first command of its transaction that all sources must make. The number
    of each later command follows from its distance to that first command.
    """
    rows = await session.fetch(
        _MADE_SQL, place.relation_id, str(place.lsn), place.number, query, list(changes)
    )
    for row in rows:
        await request_resume(session, row["relation_id"])
    if rows:
        await session.execute(f"notify {CHANNEL}")


async def delete_made(session: Executor, place: DdlPlace) -> None:
    """Delete the commands before *place* that peers made, and that the table's stream lacks."""
    await session.execute(
        "delete from streamer.ddl where relation_id = $1 and state = 'made'"
        " and (lsn, number) < ($2::text::pg_lsn, $3)",
        place.relation_id,
        str(place.lsn),
        place.number,
    )


_COPY_PLACE_SQL: Final = """
select lsn::text as lsn, changes from streamer.ddl
where relation_id = $1 and number = 0 and state in ('waiting', 'apply', 'skip')
"""
_SUPERSEDE_SQL: Final = """
delete from streamer.ddl
where relation_id = $1 and state in ('waiting', 'made', 'apply', 'skip')
  and (lsn, number) is distinct from ($2::text::pg_lsn, 0)
"""


async def place_of_copy(
    session: Executor, relation_id: int, changes: Sequence[str], lsn: Lsn
) -> DdlPlace:
    """Return the place, with number 0, of *changes* that a copy includes.

    If the same changes already wait, return their place. *lsn*: the position of the source.
    """
    for row in await session.fetch(_COPY_PLACE_SQL, relation_id):
        if row["changes"] == list(changes):
            lsn = Lsn.parse(row["lsn"])
    return DdlPlace(relation_id, lsn, 0)


async def supersede(session: Executor, place: DdlPlace) -> None:
    """Delete the waiting commands of a table, because a copy includes their changes at *place*."""
    await session.execute(_SUPERSEDE_SQL, place.relation_id, str(place.lsn))


async def remove_copied(session: Executor, relation_ids: Sequence[int]) -> None:
    """Delete the commands whose changes a copy has included."""
    await DDL.delete(
        session,
        "where relation_id = any ($1::int8[]) and state not in ('applied', 'skipped')",
        relation_ids,
    )


async def put_ddl(
    session: Executor,
    place: DdlPlace,
    *,
    query: str,
    changes: Sequence[str],
    statements: Sequence[str],
    reason: str | None,
    state: str,
    former_state: str | None = None,
) -> None:
    """Store a command in the state *state*.

    With `WAITING`, an operator's decision stays if it is newer than *former_state*, the state that
    the caller has read.
    """
    await session.execute(
        _PUT_SQL,
        place.relation_id,
        str(place.lsn),
        place.number,
        query,
        list(changes),
        list(statements),
        reason,
        state,
        former_state,
    )


async def read_ddl(session: Executor, *, with_done: bool) -> list[DdlRecord]:
    """Return the commands that await a decision, or the effect of a decision.

    *with_done*: return all commands.
    """
    return await DDL.read(
        session,
        "where ($1 or d.state not in ('applied', 'skipped', 'made')) order by d.id",
        with_done,
    )


async def read_waiting(session: Executor) -> set[int]:
    """Return the relations with a command that waits for a decision."""
    rows = await session.fetch("select relation_id from streamer.ddl where state = 'waiting'")
    return {row["relation_id"] for row in rows}


async def decide(
    session: Executor, relation_id: int, decision: str, statements: Sequence[str] | None
) -> int | None:
    """Store the decision about the command for which a table waits; return the id of the command.

    Return None if the table waits for no decision.
    """
    stored = None if statements is None else list(statements)
    for row in await session.fetch(_DECIDE_SQL, relation_id, decision, stored):
        if row["number"] == 0:
            await request_resume(session, relation_id)
            await session.execute(f"notify {CHANNEL}")
        return int(row["id"])
    return None


async def read_progress(session: Executor, ddl_id: int) -> tuple[str, str | None]:
    """Return the state and the reason of a command; `MADE` if a copy has replaced the command."""
    rows = await session.fetch("select state, reason from streamer.ddl where id = $1", ddl_id)
    return (rows[0]["state"], rows[0]["reason"]) if rows else (MADE, None)
