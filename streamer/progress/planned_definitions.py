"""Definitions that target tables are to get beside their columns, and how that stands.

The round that copies a table stores them (`streamer.sync.target_definitions`). A row is `pending`
until the object is there (`made`) or the target refused it (`failed`). An `unmade` one cannot be
made.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from streamer.definitions.planned import ObjectKind, Planned
from streamer.mapping.names import RelationName, parse_name
from streamer.progress.bookkeeping import Bookkeeping
from streamer.target.connection import TargetConnection, transaction

_OPEN_SQL: Final = """
select d.id, d.relation_id, r.target, r.source, d.kind, d.name, d.state, d.index_name,
       d.statements::text, d.online::text, d.sql, d.reason, d.attempts, d.referenced
from streamer.definition d join streamer.relation r on r.id = d.relation_id
"""
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


@dataclass(frozen=True, slots=True)
class DefinitionRecord:
    """A definition in the bookkeeping.

    ``statements`` and ``online``: see `streamer.definitions.render.Planned`. ``attempts``: failed
    ones.
    """

    id: int
    relation_id: int
    source: str
    target: RelationName
    kind: ObjectKind
    name: str
    state: str
    index: str | None
    statements: tuple[str, ...]
    online: tuple[str, ...]
    sql: str
    reason: str | None
    attempts: int
    referenced: str | None

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


async def read_taken(
    connection: TargetConnection, target: RelationName, wanted: Sequence[str]
) -> frozenset[str]:
    """Return those names of *wanted* that other relations in the schema of *target* have or get."""
    rows = await connection.fetch(
        _TAKEN_SQL, target.namespace, target.name, list(wanted), str(target)
    )
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


async def put_plans(
    connection: TargetConnection, relation_id: int, planned: Sequence[Planned]
) -> None:
    """Store plans in place of those of the same kind and name."""
    for each in planned:
        await connection.execute(
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
    connection: TargetConnection, relation_id: int, ended: Sequence[tuple[ObjectKind, str]]
) -> None:
    """Take plans back. One that may be under way becomes `unwanted`, so that its result goes."""
    kinds, names = [kind.value for kind, _ in ended], [name for _, name in ended]
    for sql in _END_SQL if ended else ():
        await connection.execute(sql, relation_id, kinds, names)


async def hold_plans(connection: TargetConnection, target: RelationName) -> None:
    """Keep the states of the plans for a target table until this transaction ends.

    A session that makes one of them meanwhile cannot store that. So the caller finds the objects of
    all `made` plans when it looks at the table, and any other counts as unfinished.
    """
    await connection.fetch(
        "select from streamer.definition d where d.relation_id in"
        " (select id from streamer.relation where target = $1) order by d.id for no key update",
        str(target),
    )


async def read_plans(connection: TargetConnection, relation_id: int) -> list[DefinitionRecord]:
    """Return the plans of a relation that no session has made yet."""
    rows = await connection.fetch(
        _OPEN_SQL
        + "where (d.state = 'pending' or d.made_again) and d.relation_id = $1 order by d.id",
        relation_id,
    )
    return [_record(row) for row in rows]


async def read_unwanted(connection: TargetConnection) -> list[DefinitionRecord]:
    """Return the plans that the stream took back while a session may have made them."""
    rows = await connection.fetch(_OPEN_SQL + "where d.state = 'unwanted' order by d.id")
    return [_record(row) for row in rows]


async def read_given_up(connection: TargetConnection) -> list[DefinitionRecord]:
    """Return the definitions that streamer does not try to make."""
    rows = await connection.fetch(_OPEN_SQL + "where d.state in ('failed', 'unmade')")
    return [_record(row) for row in rows]


async def forget_unwanted(connection: TargetConnection, record_id: int) -> None:
    """Forget a plan whose result is gone, or have another of that name made."""
    await connection.execute(
        "update streamer.definition set state = 'pending', made_again = false"
        " where id = $1 and state = 'unwanted' and made_again",
        record_id,
    )
    await connection.execute(
        "delete from streamer.definition where id = $1 and state = 'unwanted'", record_id
    )


async def is_pending(connection: TargetConnection, record: DefinitionRecord) -> bool:
    """Whether the stream has neither changed nor taken back *record*, and no session made it."""
    found = await connection.fetch_value(
        "select state = 'pending' and online::text = $2 from streamer.definition where id = $1",
        record.id,
        json.dumps(record.online),
    )
    return bool(found)


async def read_pending(
    connection: TargetConnection, relation_id: int | None = None
) -> list[DefinitionRecord]:
    """Return the definitions to make now: those of one relation, or those of all ready ones.

    A foreign key has to wait until both of its tables are ready.
    """
    rows = await connection.fetch(_OPEN_SQL + _PENDING_SQL, relation_id)
    return [_record(row) for row in rows]


async def read_definitions(bookkeeping: Bookkeeping) -> dict[int, list[DefinitionRecord]]:
    """Return the definitions that are not made, by the id of their relation."""
    async with bookkeeping.connection() as connection:
        rows = await connection.fetch(f"{_OPEN_SQL} where d.state <> 'made' order by d.id")
    found: dict[int, list[DefinitionRecord]] = {}
    for row in rows:
        record = _record(row)
        found.setdefault(record.relation_id, []).append(record)
    return found


async def set_made(connection: TargetConnection, record: DefinitionRecord) -> None:
    """Store that a session made *record*, unless the stream has changed or taken it back."""
    await connection.execute(
        "update streamer.definition set state = 'made', reason = null"
        " where id = $1 and state <> 'unwanted' and online::text = $2",
        record.id,
        json.dumps(record.online),
    )


async def set_failed(connection: TargetConnection, record: DefinitionRecord, reason: str) -> None:
    """Store the reason why *record* is not made yet."""
    await connection.execute(
        "update streamer.definition set reason = $2, attempts = attempts + 1"
        " where id = $1 and state = 'pending' and online::text = $3",
        record.id,
        reason,
        json.dumps(record.online),
    )


async def give_up(
    connection: TargetConnection, record: DefinitionRecord, reason: str, left: Sequence[str]
) -> None:
    """Store the reason why *record* is not made until the next copy, and the statements *left* for
    an operator.
    """
    await connection.execute(
        "update streamer.definition set state = 'failed', reason = $2, attempts = attempts + 1,"
        " online = $3::text::json, sql = $4"
        " where id = $1 and state = 'pending' and online::text = $5",
        record.id,
        reason,
        json.dumps(left),
        "; ".join(left),
        json.dumps(record.online),
    )


def _record(row: Any) -> DefinitionRecord:
    fields = dict(row)
    return DefinitionRecord(
        target=parse_name(fields.pop("target")),
        kind=ObjectKind(fields.pop("kind")),
        index=fields.pop("index_name"),
        statements=tuple(json.loads(fields.pop("statements"))),
        online=tuple(json.loads(fields.pop("online"))),
        **fields,
    )
