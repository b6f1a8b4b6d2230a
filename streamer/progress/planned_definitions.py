"""Definitions that target tables are to get beside their columns, and how that stands.

The round that copies a table stores them (`streamer.sync.target_definitions`). A row is `pending`
until the object is there (`made`) or the target refused it (`failed`). An `unmade` one cannot be
made.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Self

from streamer.definitions.planned import ObjectKind, Planned
from streamer.errors import ConflictError, StreamerError, TargetSchemaError
from streamer.mapping.names import RelationName, parse_name
from streamer.postgres.quoting import quote_qualified
from streamer.progress.table import BookkeepingTable, Codec, Executor
from streamer.target.connection import TargetConnection, transaction

_PENDING_SQL: Final = """
where d.state = 'pending'
  and not (d.kind in ('default', 'not null') and d.name = any (r.unfilled))
  and not (d.kind in ('unique', 'exclusion', 'check', 'foreign key') and r.unfilled <> '{}')
  and case when $1::int8 is not null then d.relation_id = $1 and d.kind <> 'foreign key'
      else r.state = 'ready' and (d.referenced is null or not exists (
           select from streamer.relation o
            where o.source_id = r.source_id and o.target = d.referenced and o.state <> 'ready')) end
order by d.attempts, d.id
"""

_PUT_SQL: Final = """
insert into streamer.definition
    (relation_id, kind, name, state, index_name, statements, online, sql, reason, referenced)
values ($1, $2, $3, $4, $5, $6::text::json, $7::text::json, $8, $9, $10)
on conflict (relation_id, kind, name) do update set
    state = case when definition.state = 'unwanted' and excluded.state = 'pending'
                 then 'unwanted' else excluded.state end,
    made_again = definition.state = 'unwanted' and excluded.state = 'pending',
    index_name = excluded.index_name, statements = excluded.statements,
    online = excluded.online, sql = excluded.sql, reason = excluded.reason, attempts = 0,
    referenced = excluded.referenced
"""
_END_SQL: Final = (
    """
update streamer.definition d set state = 'unwanted', made_again = false
from unnest($2::text[], $3::text[]) as e (kind, name)
where d.relation_id = $1 and d.kind = e.kind and d.name = e.name
  and d.state in ('pending', 'unwanted')
""",
    """
delete from streamer.definition d using unnest($2::text[], $3::text[]) as e (kind, name)
where d.relation_id = $1 and d.kind = e.kind and d.name = e.name
  and d.state not in ('pending', 'unwanted')
""",
)
_TAKEN_SQL: Final = """
select x.relname as name
from pg_catalog.pg_class x
join pg_catalog.pg_namespace n on n.oid = x.relnamespace
where n.nspname = $1 and x.relname = any ($3::text[])
  and not exists (select from pg_catalog.pg_index i
                    join pg_catalog.pg_class c on c.oid = i.indrelid
                   where i.indexrelid = x.oid and c.relname = $2 and c.relnamespace = n.oid)
  and not exists (select from pg_catalog.pg_depend d
                    join pg_catalog.pg_class c on c.oid = d.refobjid
                   where d.objid = x.oid and d.deptype in ('a', 'i')
                     and d.classid = 'pg_catalog.pg_class'::regclass
                     and d.refclassid = 'pg_catalog.pg_class'::regclass
                     and c.relname = $2 and c.relnamespace = n.oid)
  and not exists (select from pg_catalog.pg_depend d
                    join pg_catalog.pg_attrdef a on a.oid = d.objid
                    join pg_catalog.pg_class c on c.oid = a.adrelid
                   where d.refobjid = x.oid
                     and d.classid = 'pg_catalog.pg_attrdef'::regclass
                     and d.refclassid = 'pg_catalog.pg_class'::regclass
                     and c.relname = $2 and c.relnamespace = n.oid)
union
select d.name from streamer.definition d join streamer.relation r on r.id = d.relation_id
where d.state = 'pending' and d.kind in ('index', 'unique', 'exclusion') and r.target <> $4
"""

_REMADE_SQL: Final = """
select exists (select from streamer.definition d
                 join streamer.relation r on r.id = d.relation_id
                 join streamer.definition u on u.id = $1
                 join streamer.relation ur on ur.id = u.relation_id
                where r.target = ur.target and d.id <> u.id and d.name = u.name
                  and d.state in ('pending', 'made'))
"""
# Of a foreign key: whether its other table is still to come, or to get an index. The positions are
# those of both tables, if their streams have applied all that they have read.
_REFERENCED_SQL: Final = """
select pg_catalog.to_regclass($3) is null or exists (
           select from streamer.definition d join streamer.relation r on r.id = d.relation_id
            where r.target = $2 and d.state = 'pending' and d.kind in ('index', 'unique'))
           as is_to_come,
       (select case when bool_and(r.state = 'ready' and r.end_lsn <= s.acknowledged_lsn)
                    then pg_catalog.string_agg(r.end_lsn::text, ' ' order by r.id) end
          from streamer.relation r join streamer.source s on s.id = r.source_id
         where r.target in ($1, $2)) as positions
"""


@dataclass(frozen=True, slots=True)
class DefinitionRecord:
    """A definition in the bookkeeping.

    ``statements`` and ``online``: see `streamer.definitions.render.Planned`. ``attempts``: failed
    ones.
    """

    id: int
    relation_id: int
    source: Annotated[str, Codec("r.source")]
    target: Annotated[RelationName, Codec("r.target")]
    kind: ObjectKind
    name: str
    state: str
    index: Annotated[str | None, Codec("d.index_name")]
    statements: tuple[str, ...]
    online: tuple[str, ...]
    sql: str
    reason: str | None
    attempts: int
    referenced: str | None
    source_id: Annotated[int, Codec("r.source_id")] = 0

    @property
    def is_given_up(self) -> bool:
        """Whether streamer does not try to make it."""
        return self.state in ("failed", "unmade")

    @property
    def label(self) -> str:
        return f'{self.kind} "{self.name}"'

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind.value,
            "name": self.name,
            "state": self.state,
            "sql": self.sql,
            "statements": list(self.online),
            "reason": self.reason,
        }


DEFINITIONS: Final = BookkeepingTable(
    "definition", "d", DefinitionRecord, "join streamer.relation r on r.id = d.relation_id"
)


@dataclass(frozen=True, slots=True)
class ReferenceFacts:
    """The tables of a foreign key. ``is_to_come``: the other one, or its index, is not made yet.
    ``positions``: of their streams, if these have applied all that they have read.
    """

    is_to_come: bool
    positions: str | None

    def may_become(self, now: Self, error: StreamerError) -> bool:
        """Whether a key that *error* has refused between these facts and *now* may be made later.

        A row may precede the row that it refers to while the tables stream. Pure.
        """
        if isinstance(error, ConflictError):
            return self.positions is None or self.positions != now.positions
        return isinstance(error, TargetSchemaError) and self.is_to_come


async def read_reference(session: Executor, record: DefinitionRecord) -> ReferenceFacts:
    own, other = str(record.target), record.referenced or str(record.target)
    name = parse_name(other)
    quoted = quote_qualified(name.namespace, name.name)
    (row,) = await session.fetch(_REFERENCED_SQL, own, other, quoted)
    return ReferenceFacts(**row)


async def is_remade(session: Executor, record: DefinitionRecord) -> bool:
    """Return whether another plan makes an object of the name of *record* on its target."""
    return bool(await session.fetch_value(_REMADE_SQL, record.id))


async def read_taken(
    session: Executor, target: RelationName, wanted: Sequence[str]
) -> frozenset[str]:
    """Return those names of *wanted* that other relations in the schema of *target* have or get."""
    rows = await session.fetch(_TAKEN_SQL, target.namespace, target.name, list(wanted), str(target))
    return frozenset(row["name"] for row in rows)


async def store_definitions(
    connection: TargetConnection, relation_id: int, planned: Sequence[Planned]
) -> None:
    """Store *planned* as all definitions of a relation; those that are there are found there."""
    async with transaction(connection):
        await connection.execute(
            "delete from streamer.definition where relation_id = $1 and kind <> 'not null'",
            relation_id,
        )
        await put_plans(connection, relation_id, planned)


async def put_plans(session: Executor, relation_id: int, planned: Sequence[Planned]) -> None:
    """Store plans in place of those of the same kind and name."""
    for each in planned:
        await session.execute(
            _PUT_SQL,
            relation_id,
            each.kind.value,
            each.name,
            "pending" if each.reason is None else "unmade",
            each.index,
            json.dumps(each.statements),
            json.dumps(each.online),
            each.sql,
            each.reason,
            None if each.referenced is None else str(each.referenced),
        )


async def end_plans(
    session: Executor, relation_id: int, ended: Sequence[tuple[ObjectKind, str]]
) -> None:
    """Take plans back. One that may be under way becomes `unwanted`, so that its result goes."""
    kinds, names = [kind.value for kind, _ in ended], [name for _, name in ended]
    for sql in _END_SQL if ended else ():
        await session.execute(sql, relation_id, kinds, names)


async def hold_plans(session: Executor, target: RelationName) -> None:
    """Keep the states of the plans for a target table until this transaction ends.

    A session that makes one of them meanwhile cannot store that. So the caller finds the objects of
    all `made` plans when it looks at the table, and any other counts as unfinished.
    """
    await session.fetch(
        "select from streamer.definition d where d.relation_id in"
        " (select id from streamer.relation where target = $1) order by d.id for no key update",
        str(target),
    )


async def read_plans(session: Executor, relation_id: int) -> list[DefinitionRecord]:
    """Return the plans of a relation that no session has made yet."""
    return await DEFINITIONS.read(
        session,
        "where (d.state = 'pending' or d.made_again) and d.relation_id = $1 order by d.id",
        relation_id,
    )


async def read_unwanted(session: Executor) -> list[DefinitionRecord]:
    """Return the plans that the stream took back while a session may have made them."""
    return await DEFINITIONS.read(session, "where d.state = 'unwanted' order by d.id")


async def read_given_up(session: Executor) -> list[DefinitionRecord]:
    """Return the definitions that streamer does not try to make."""
    return await DEFINITIONS.read(session, "where d.state in ('failed', 'unmade') order by d.id")


async def forget_unwanted(session: Executor, record_id: int) -> None:
    """Forget a plan whose result is gone, or have another of that name made."""
    await session.execute(
        "update streamer.definition set state = 'pending', made_again = false"
        " where id = $1 and state = 'unwanted' and made_again",
        record_id,
    )
    await session.execute(
        "delete from streamer.definition where id = $1 and state = 'unwanted'", record_id
    )


async def is_pending(session: Executor, record: DefinitionRecord) -> bool:
    """Whether the stream has neither changed nor taken back *record*, and no session made it."""
    found = await session.fetch_value(
        "select state = 'pending' and online::text = $2 from streamer.definition where id = $1",
        record.id,
        json.dumps(record.online),
    )
    return bool(found)


async def read_pending(session: Executor, relation_id: int | None = None) -> list[DefinitionRecord]:
    """Return the definitions to make now: those of one relation, or those of all ready ones.

    A foreign key has to wait until both of its tables are ready.
    """
    return await DEFINITIONS.read(session, _PENDING_SQL, relation_id)


async def read_definitions(session: Executor) -> dict[int, list[DefinitionRecord]]:
    """Return the definitions that are not made, by the id of their relation."""
    by_relation: dict[int, list[DefinitionRecord]] = {}
    for record in await DEFINITIONS.read(session, "where d.state <> 'made' order by d.id"):
        by_relation.setdefault(record.relation_id, []).append(record)
    return by_relation


async def set_made(session: Executor, record: DefinitionRecord) -> None:
    """Store that a session made *record*, unless the stream has changed or taken it back."""
    await session.execute(
        "update streamer.definition set state = 'made', reason = null"
        " where id = $1 and state <> 'unwanted' and online::text = $2",
        record.id,
        json.dumps(record.online),
    )


async def set_failed(session: Executor, record: DefinitionRecord, reason: str) -> None:
    """Store the reason why *record* is not made yet."""
    await session.execute(
        "update streamer.definition set reason = $2, attempts = attempts + 1"
        " where id = $1 and state = 'pending' and online::text = $3",
        record.id,
        reason,
        json.dumps(record.online),
    )


async def give_up(
    session: Executor, record: DefinitionRecord, reason: str, left: Sequence[str]
) -> None:
    """Store the reason why *record* is not made until the next copy, and the statements *left* for
    an operator.
    """
    await session.execute(
        "update streamer.definition set state = 'failed', reason = $2, attempts = attempts + 1,"
        " online = $3::text::json, sql = $4"
        " where id = $1 and state = 'pending' and online::text = $5",
        record.id,
        reason,
        json.dumps(left),
        "; ".join(left),
        json.dumps(record.online),
    )
