"""The definitions of source tables that the target has, and the changes of them, in the
bookkeeping.

A row of streamer.ddl is one command at the source, for one table. A running process writes it with
the statements it ran at the target, or before it stops for an operator's decision.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from streamer.lsn import Lsn
from streamer.mapping.definition import SourceDefinition
from streamer.mapping.former_label_columns import FormerColumns, follow_labels, former_columns
from streamer.mapping.names import RelationName, parse_name
from streamer.mapping.resync import Resync
from streamer.progress.audit import write_acts
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.requests import CHANNEL
from streamer.target.connection import TargetConnection, transaction

WAITING: Final = "waiting"
APPLY: Final = "apply"
SKIP: Final = "skip"


@dataclass(frozen=True, slots=True)
class DdlPlace:
    """The command at the source: its table, its transaction, and its number in that."""

    relation_id: int
    lsn: Lsn
    number: int


@dataclass(frozen=True, slots=True)
class DdlDecision:
    """The state of a command that had to wait.

    ``state``: `WAITING`, or the operator's decision. ``statements``: those to run in place of
    streamer's own. ``reason``: why it waits.
    """

    state: str
    statements: tuple[str, ...] | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class DdlRecord:
    """A command at the source, and its way to the target."""

    id: int
    database: str
    sid: str | None
    table: str
    state: str
    changes: list[str]
    query: str
    statements: list[str]
    reason: str | None
    lsn: str
    at: str


_READ_SQL: Final = """
select d.id, s.database, s.sid, r.source as table, d.state, d.changes, d.query, d.statements,
       d.reason, d.lsn::text as lsn, d.changed_at::text as at
from streamer.ddl d
join streamer.relation r on r.id = d.relation_id join streamer.source s on s.id = r.source_id
where ($1 or d.state not in ('applied', 'skipped'))
order by d.id
"""
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
returning number
"""
# The stream tries again by itself, and a copy does not.
_RESUME_COPY_SQL: Final = """
insert into streamer.request (relation_id, action) select id, 'resume' from streamer.relation
where id = $1 and state = 'error'
"""
_COLUMNS_SQL: Final = """
coalesce((select jsonb_agg(distinct case when m ? c then m->>c else c end)
            from jsonb_array_elements_text({columns}) c, (select $2::text::jsonb) v (m)
           where m->c is distinct from 'null'::jsonb), '[]')
"""
_RENAME_SQL: Final = (
    """
    update streamer.relation
    set unfilled = array(select jsonb_array_elements_text({columns}) order by 1)
    where id = $1 and unfilled <> '{{}}'
    """.format(columns=_COLUMNS_SQL.format(columns="to_jsonb(unfilled)")),
    """
    update streamer.relation set resync = jsonb_set(resync, '{{columns}}', {columns})
    where id = $1 and resync ? 'columns'
    """.format(columns=_COLUMNS_SQL.format(columns="resync->'columns'")),
    """
    update streamer.request set options = jsonb_set(options, '{{columns}}', {columns})
    where relation_id = $1 and options ? 'columns'
    """.format(columns=_COLUMNS_SQL.format(columns="options->'columns'")),
)


async def read_definition(
    connection: TargetConnection, relation_id: int
) -> SourceDefinition | None:
    """Return the source's definition that the target's rows have; None if it is not known."""
    return SourceDefinition.from_json(
        await connection.fetch_value(
            "select definition::text from streamer.relation where id = $1", relation_id
        )
    )


async def read_definitions(
    connection: TargetConnection, relation_ids: Sequence[int]
) -> dict[int, SourceDefinition]:
    """Return the same of several relations by id, where it is known."""
    rows = await connection.fetch(
        "select id, definition::text as definition from streamer.relation"
        " where id = any ($1::int8[])",
        list(relation_ids),
    )
    found = {row["id"]: SourceDefinition.from_json(row["definition"]) for row in rows}
    return {key: definition for key, definition in found.items() if definition is not None}


async def read_unknown(bookkeeping: Bookkeeping, relation_ids: Sequence[int]) -> set[int]:
    """Return those of some relations in sync whose definitions are not known."""
    async with bookkeeping.connection() as connection:
        rows = await connection.fetch(
            "select id from streamer.relation where id = any ($1::int8[])"
            " and not coalesce(definition ? 'objects', false) and snapshot_lsn is not null",
            list(relation_ids),
        )
    return {row["id"] for row in rows}


async def store_definition(
    connection: TargetConnection, relation_id: int, definition: SourceDefinition
) -> None:
    """Store the definition that the target's rows have from now on."""
    await connection.execute(
        "update streamer.relation set definition = $2::text::jsonb where id = $1",
        relation_id,
        definition.to_json(),
    )


async def store_former_labels(
    connection: TargetConnection,
    relation_id: int,
    renamed: Mapping[int, Mapping[str, str]],
    definition: SourceDefinition,
) -> None:
    """Store labels that the source has *renamed*, by the OID of their type. Labels that a type of
    *definition* has again are former ones no more.
    """
    stored = await connection.fetch_value(
        "select former_labels::text from streamer.relation where id = $1", relation_id
    )
    labels = follow_labels(json.loads(stored), renamed, definition.types or ())
    await connection.execute(
        "update streamer.relation set former_labels = $2::text::jsonb where id = $1",
        relation_id,
        json.dumps(labels),
    )


async def read_former_labels(
    connection: TargetConnection, relation_ids: Collection[int]
) -> dict[int, FormerColumns]:
    """Return the columns of relations, by id, whose enums had labels under other names."""
    rows = await connection.fetch(
        "select id, former_labels::text as labels from streamer.relation"
        " where id = any ($1::int8[]) and former_labels <> '{}'",
        list(relation_ids),
    )
    found = {}
    for row in rows:
        definition = await read_definition(connection, row["id"])
        if definition is not None:
            found[row["id"]] = former_columns(definition, json.loads(row["labels"]))
    return found


async def store_first_definitions(
    connection: TargetConnection, definitions: Mapping[int, SourceDefinition]
) -> None:
    """Store definitions by relation id, of relations that have none."""
    await connection.execute(
        "update streamer.relation r set definition = d.definition::jsonb"
        " from unnest($1::int8[], $2::text[]) d (id, definition)"
        " where r.id = d.id and r.definition is null",
        list(definitions),
        [definition.to_json() for definition in definitions.values()],
    )


async def read_resync(connection: TargetConnection, relation_id: int) -> Resync | None:
    """Return the options of the copy that is due, whose columns may have been renamed."""
    stored = await connection.fetch_value(
        "select resync::text from streamer.relation where id = $1", relation_id
    )
    return None if stored is None else Resync.from_json(json.loads(stored))


async def read_users(
    connection: TargetConnection, relation_id: int, types: Collection[int]
) -> list[RelationName]:
    """Return the tables of the same source that have a column of one of *types*, given as OIDs."""
    rows = await connection.fetch(
        "select o.source from streamer.relation r"
        " join streamer.relation o on o.source_id = r.source_id"
        " where r.id = $1 and exists (select from jsonb_array_elements(o.definition->'types') t"
        " where (t->>'oid')::int8 = any ($2::int8[])) order by 1",
        relation_id,
        list(types),
    )
    return [parse_name(row["source"]) for row in rows]


async def read_known_types(
    connection: TargetConnection, relation_id: int, names: Sequence[RelationName]
) -> dict[RelationName, frozenset[int]]:
    """Return the OIDs of the types by *names* that other tables of the same source have."""
    rows = await connection.fetch(
        "select w.namespace, w.name, array_agg(distinct (t->>'oid')::int8) as oids"
        " from streamer.relation r"
        " join streamer.relation o on o.source_id = r.source_id and o.id <> r.id"
        " cross join lateral jsonb_array_elements(o.definition->'types') t"
        " join unnest($2::text[], $3::text[]) w (namespace, name)"
        " on (w.namespace, w.name) = (t->>'namespace', t->>'name')"
        " where r.id = $1 and o.definition ? 'types' group by 1, 2",
        relation_id,
        [name.namespace for name in names],
        [name.name for name in names],
    )
    return {RelationName(e["namespace"], e["name"]): frozenset(e["oids"]) for e in rows}


async def read_own_targets(connection: TargetConnection, relation_id: int) -> list[RelationName]:
    """Return the target tables that only the same source fills."""
    rows = await connection.fetch(
        "select o.target from streamer.relation r"
        " join streamer.relation o on o.source_id = r.source_id where r.id = $1"
        " and not exists (select from streamer.relation e"
        " where e.target = o.target and e.source_id <> o.source_id)",
        relation_id,
    )
    return [parse_name(row["target"]) for row in rows]


async def lock_definition(connection: TargetConnection, target: RelationName) -> None:
    """Let no other source change the definition of a target table before this transaction ends.

    Otherwise each of two sources could believe that the other still has a former column. Neither
    would drop it.
    """
    await connection.execute(
        "select pg_advisory_xact_lock(hashtextextended('streamer definition ' || $1, 0))",
        str(target),
    )


async def read_others(connection: TargetConnection, relation_id: int) -> list[SourceDefinition]:
    """Return the definitions of other source tables that go to the same target table."""
    rows = await connection.fetch(
        "select o.definition::text as definition from streamer.relation r"
        " join streamer.relation o on o.target = r.target and o.id <> r.id where r.id = $1",
        relation_id,
    )
    found = (SourceDefinition.from_json(row["definition"]) for row in rows)
    return [definition for definition in found if definition is not None]


async def read_other_users(
    connection: TargetConnection,
    place: DdlPlace,
    names: Sequence[RelationName],
    changes: Sequence[str],
) -> list[SourceDefinition]:
    """Return the definitions of other sources' tables, of any target, with types by *names*.

    The last of several sources to change a type makes the changes for all. So a table is left out
    if it waits with one of *changes*, or with a change that the transaction of *place* has made.
    """
    rows = await connection.fetch(
        "select o.definition::text as definition from streamer.relation r"
        " join streamer.relation o on o.source_id <> r.source_id"
        " where r.id = $1 and exists (select from jsonb_array_elements(o.definition->'types') t"
        " join unnest($2::text[], $3::text[]) w (namespace, name)"
        " on (w.namespace, w.name) = (t->>'namespace', t->>'name'))"
        " and not exists (select from streamer.ddl d where d.relation_id = o.id"
        " and d.state in ('waiting', 'apply') and (d.changes && $4::text[] or exists ("
        "select from streamer.ddl own where own.relation_id = r.id and own.lsn = $5::text::pg_lsn"
        " and own.state = 'applied' and own.changes && d.changes)))",
        place.relation_id,
        [name.namespace for name in names],
        [name.name for name in names],
        list(changes),
        str(place.lsn),
    )
    found = (SourceDefinition.from_json(row["definition"]) for row in rows)
    return [definition for definition in found if definition is not None]


async def read_decision(connection: TargetConnection, place: DdlPlace) -> DdlDecision | None:
    """Return how far the decision about a command is; None if it did not have to wait."""
    rows = await connection.fetch(
        "select state, edited, reason from streamer.ddl where relation_id = $1"
        " and lsn = $2::text::pg_lsn and number = $3 and state in ('waiting', 'apply', 'skip')",
        place.relation_id,
        str(place.lsn),
        place.number,
    )
    if not rows:
        return None
    edited = rows[0]["edited"]
    statements = None if edited is None else tuple(edited)
    return DdlDecision(rows[0]["state"], statements, rows[0]["reason"])


_COPY_PLACE_SQL: Final = """
select lsn::text as lsn, changes from streamer.ddl
where relation_id = $1 and number = 0 and state in ('waiting', 'apply', 'skip')
"""
_SUPERSEDE_SQL: Final = """
delete from streamer.ddl
where relation_id = $1 and state in ('waiting', 'apply', 'skip')
  and (lsn, number) is distinct from ($2::text::pg_lsn, 0)
"""


async def place_of_copy(
    connection: TargetConnection, relation_id: int, changes: Sequence[str], lsn: Lsn
) -> DdlPlace:
    """Return the place of *changes* that a copy takes in, which has the number 0.

    It is that of the same changes if they wait already. *lsn*: the position of the source.
    """
    for row in await connection.fetch(_COPY_PLACE_SQL, relation_id):
        if row["changes"] == list(changes):
            lsn = Lsn.parse(row["lsn"])
    return DdlPlace(relation_id, lsn, 0)


async def supersede(connection: TargetConnection, place: DdlPlace) -> None:
    """Forget the commands of a table that wait: a copy takes their changes in at *place*."""
    await connection.execute(_SUPERSEDE_SQL, place.relation_id, str(place.lsn))


async def rename_unfilled(
    connection: TargetConnection, relation_id: int, moved: Mapping[str, str | None]
) -> None:
    """Rename columns of the target whose values existing rows lack; None: such a column is gone.

    Requests for them, and a copy that is to bring them, follow.
    """
    if not moved:
        return
    names = json.dumps(moved)
    for statement in _RENAME_SQL:
        await connection.execute(statement, relation_id, names)


async def put_ddl(
    connection: TargetConnection,
    place: DdlPlace,
    *,
    query: str,
    changes: Sequence[str],
    statements: Sequence[str],
    reason: str | None,
    state: str,
    seen: str | None = None,
) -> None:
    """Store a command in the state *state*.

    A command that waits keeps a decision that came after the one that the caller has *seen*.
    """
    await connection.execute(
        _PUT_SQL,
        place.relation_id,
        str(place.lsn),
        place.number,
        query,
        list(changes),
        list(statements),
        reason,
        state,
        seen,
    )


async def read_ddl(bookkeeping: Bookkeeping, *, with_done: bool) -> list[DdlRecord]:
    """Return the commands that wait for a decision or its effect; *with_done*: all."""
    async with bookkeeping.connection() as connection:
        rows = await connection.fetch(_READ_SQL, with_done)
    return [DdlRecord(**dict(row)) for row in rows]


async def decide(
    bookkeeping: Bookkeeping,
    relation_id: int,
    action: str,
    statements: Sequence[str] | None = None,
    *,
    actor: str,
) -> bool:
    """Store the decision about the command for which a table waits; False if it waits for none.

    *actor*: the operator, for the audit.
    """
    async with bookkeeping.connection() as connection, transaction(connection):
        found = await connection.fetch_value(
            _DECIDE_SQL, relation_id, action, None if statements is None else list(statements)
        )
        if found == 0:
            await connection.execute(_RESUME_COPY_SQL, relation_id)
        if found is not None:
            await write_acts(connection, [relation_id], actor, f"ddl {action}", None)
            await connection.execute(f"notify {CHANNEL}")
    return found is not None
