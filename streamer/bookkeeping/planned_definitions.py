"""The indexes, constraints and other definitions that streamer plans for target tables, with their
states.

The round that copies a table stores its definitions (`streamer.schema_changes.target_definitions`).
A row is `pending` until the object exists (`made`) or the target refused the object (`failed`).
Objects of `unmade` rows cannot be created.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Self

from streamer.bookkeeping.bookkeeping_table import BookkeepingTable, Codec, Executor, to_json
from streamer.errors.error_classes import ConflictError, StreamerError, TargetSchemaError
from streamer.mapping.relation_names import RelationName, parse_name
from streamer.postgres.quoting import quote_qualified
from streamer.schema.planned_definition import ObjectKind, Planned
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

_REMADE: Final = "d.state = 'unwanted' and excluded.state = 'pending'"
_PUT: Final = {
    "state": f"case when {_REMADE} then d.state else excluded.state end",
    "made_again": _REMADE,
    "attempts": "0",
}
_WITHDRAWN: Final = (
    "d.relation_id = {0} and (d.kind, d.name) in (select * from unnest({1}::text[], {2}::text[]))"
)
_UNCHANGED: Final = "and online::jsonb = $3::text::jsonb"
"""The condition that the stream has not changed the record since a session read the record."""
_PENDING: Final = f"{_UNCHANGED} and state = 'pending'"
_FAILED: Final = "attempts = attempts + 1"
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
# Whether the referenced table of a foreign key, or its index, does not exist yet. The positions of
# both tables are null unless their streams have applied all read changes.
_REFERENCED_SQL: Final = """
select pg_catalog.to_regclass($3) is null or exists (
           select from streamer.definition d join streamer.relation r on r.id = d.relation_id
            where r.target = $2 and d.state = 'pending' and d.kind in ('index', 'unique'))
           as is_missing,
       (select case when bool_and(r.state = 'ready' and r.end_lsn <= s.acknowledged_lsn)
                    then pg_catalog.string_agg(r.end_lsn::text, ' ' order by r.id) end
          from streamer.relation r join streamer.source s on s.id = r.source_id
         where r.target in ($1, $2)) as positions
"""


@dataclass(frozen=True, slots=True)
class DefinitionRecord:
    """A definition in the bookkeeping.

    ``statements`` and ``online``: see `streamer.schema.planned_definition.Planned`. ``attempts``:
    the number of failed attempts.
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
        """Whether streamer has given up creating the object."""
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
    """The tables of a foreign key. ``is_missing``: the referenced table, or its index, is missing.

    ``positions``: the positions of the tables' streams, if these have applied all read changes.
    """

    is_missing: bool
    positions: str | None

    def may_succeed_later(self, now: Self, error: StreamerError) -> bool:
        """Whether creating the foreign key may succeed later, although *error* refused it.

        While both tables stream, a row may arrive before the row that it references. *now*: the
        facts after the error. Pure.
        """
        if isinstance(error, ConflictError):
            return self.positions is None or self.positions != now.positions
        return isinstance(error, TargetSchemaError) and self.is_missing


async def read_reference(session: Executor, record: DefinitionRecord) -> ReferenceFacts:
    referencing, referenced_name = str(record.target), record.referenced or str(record.target)
    name = parse_name(referenced_name)
    quoted = quote_qualified(name.namespace, name.name)
    (row,) = await session.fetch(_REFERENCED_SQL, referencing, referenced_name, quoted)
    return ReferenceFacts(**row)


async def is_remade(session: Executor, record: DefinitionRecord) -> bool:
    """Return whether a different plan creates an object with the name of *record* on the same
    target.
    """
    return bool(await session.fetch_value(_REMADE_SQL, record.id))


async def read_taken(
    session: Executor, target: RelationName, names: Sequence[str]
) -> frozenset[str]:
    """Return the *names* that objects or plans of other tables in *target*'s schema have."""
    rows = await session.fetch(_TAKEN_SQL, target.namespace, target.name, list(names), str(target))
    return frozenset(row["name"] for row in rows)


async def store_definitions(
    connection: TargetConnection, relation_id: int, planned: Sequence[Planned]
) -> None:
    """Replace the plans of a relation, except its NOT NULL constraints, by *planned*. A later check
    recognizes existing objects.
    """
    async with transaction(connection):
        await DEFINITIONS.delete(
            connection, "where relation_id = $1 and kind <> 'not null'", relation_id
        )
        await put_plans(connection, relation_id, planned)


async def put_plans(session: Executor, relation_id: int, planned: Sequence[Planned]) -> None:
    """Store plans, and replace plans of the same kind and name."""
    rows = {
        (plan.kind, plan.name): {
            "relation_id": relation_id,
            "kind": plan.kind,
            "name": plan.name,
            "state": "pending" if plan.reason is None else "unmade",
            "index_name": plan.index,
            "statements": plan.statements,
            "online": plan.online,
            "sql": plan.sql,
            "reason": plan.reason,
            "referenced": plan.referenced,
        }
        for plan in planned
    }
    await DEFINITIONS.put(session, rows.values(), "relation_id, kind, name", computed=_PUT)


async def withdraw_plans(
    session: Executor, relation_id: int, withdrawn: Sequence[tuple[ObjectKind, str]]
) -> None:
    """Withdraw plans. A plan that a session may be executing becomes `unwanted`, so that streamer
    removes its object.
    """
    kinds, names = [kind for kind, _ in withdrawn], [name for _, name in withdrawn]
    parameters = (relation_id, kinds, names)
    values = {"state": "unwanted", "made_again": False}
    where = f"where {_WITHDRAWN.format('$2', '$3', '$4')} and state in ('pending', 'unwanted')"
    if withdrawn:
        await DEFINITIONS.update(session, values, where, *parameters)
        condition = _WITHDRAWN.format("$1", "$2", "$3")
        where = f"where {condition} and state not in ('pending', 'unwanted')"
        await DEFINITIONS.delete(session, where, *parameters)


async def lock_plans(session: Executor, target: RelationName) -> None:
    """Lock the plans for a target table until this transaction ends, so that their states stay.

    A session that completes a plan meanwhile cannot store the new state. So the caller finds the
    objects of all `made` plans in the catalog, and all other plans count as unfinished.
    """
    await session.fetch(
        "select from streamer.definition d where d.relation_id in"
        " (select id from streamer.relation where target = $1) order by d.id for no key update",
        str(target),
    )


async def read_plans(session: Executor, relation_id: int) -> list[DefinitionRecord]:
    """Return the plans of a relation that no session has completed yet."""
    return await DEFINITIONS.read(
        session,
        "where (d.state = 'pending' or d.made_again) and d.relation_id = $1 order by d.id",
        relation_id,
    )


async def read_unwanted(session: Executor) -> list[DefinitionRecord]:
    """Return the plans that the stream withdrew while a session may have completed them."""
    return await DEFINITIONS.read(session, "where d.state = 'unwanted' order by d.id")


async def read_given_up(session: Executor) -> list[DefinitionRecord]:
    """Return the definitions that streamer has given up creating."""
    return await DEFINITIONS.read(session, "where d.state in ('failed', 'unmade') order by d.id")


async def forget_unwanted(session: Executor, record_id: int) -> None:
    """Delete a plan whose object no longer exists, or renew the plan for a new object of that
    name.
    """
    values = {"state": "pending", "made_again": False}
    condition = "and state = 'unwanted' and made_again"
    if not await DEFINITIONS.set(session, record_id, values, condition):
        await DEFINITIONS.delete(session, "where id = $1 and state = 'unwanted'", record_id)


async def is_pending(session: Executor, record: DefinitionRecord) -> bool:
    """Whether *record* is still pending and unchanged: no stream changed or withdrew it, and no
    session completed it.
    """
    condition = "where d.id = $1 and d.state = 'pending'"
    stored = await DEFINITIONS.find(session, condition, record.id)
    return stored is not None and stored.online == record.online


async def read_pending(session: Executor, relation_id: int | None = None) -> list[DefinitionRecord]:
    """Return the definitions to create now: of a relation, or of all ready relations.

    A foreign key must wait until both of its tables are ready.
    """
    return await DEFINITIONS.read(session, _PENDING_SQL, relation_id)


async def read_definitions(session: Executor) -> dict[int, list[DefinitionRecord]]:
    """Return the definitions that streamer has not created at the target, by relation id."""
    by_relation: dict[int, list[DefinitionRecord]] = {}
    for record in await DEFINITIONS.read(session, "where d.state <> 'made' order by d.id"):
        by_relation.setdefault(record.relation_id, []).append(record)
    return by_relation


async def set_made(session: Executor, record: DefinitionRecord) -> None:
    """Store that a session completed *record*, unless the stream has changed or withdrawn it."""
    values, condition = {"state": "made", "reason": None}, f"{_UNCHANGED} and state <> 'unwanted'"
    await DEFINITIONS.set(session, record.id, values, condition, to_json(record.online))


async def set_failed(session: Executor, record: DefinitionRecord, reason: str) -> None:
    """Store why the object of *record* does not exist yet."""
    values, online = {"reason": reason}, to_json(record.online)
    await DEFINITIONS.set(session, record.id, values, _PENDING, online, also=_FAILED)


async def give_up(
    session: Executor, record: DefinitionRecord, reason: str, steps: Sequence[str]
) -> None:
    """Store the reason why streamer does not create *record* until the next copy, and an operator's
    *steps*.
    """
    values = {"state": "failed", "reason": reason, "online": tuple(steps), "sql": "; ".join(steps)}
    online = to_json(record.online)
    await DEFINITIONS.set(session, record.id, values, _PENDING, online, also=_FAILED)
