"""The definitions of source tables as of the rows in the target, in ``streamer.relation``."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from streamer.bookkeeping.bookkeeping_table import Executor
from streamer.bookkeeping.ddl_records import DdlPlace
from streamer.bookkeeping.relation_records import RELATIONS
from streamer.bookkeeping.requests import RENAMED_SQL, rename_requested
from streamer.control.resync_options import Resync
from streamer.mapping.relation_names import RelationName, parse_name
from streamer.schema.former_label_columns import FormerColumns, follow_labels, former_columns
from streamer.schema.source_definition import SourceDefinition

_RENAME_SQL: Final = (
    """
    update streamer.relation
    set unfilled = array(select jsonb_array_elements_text({columns}) order by 1)
    where id = $1 and unfilled <> '{{}}'
    """.format(columns=RENAMED_SQL.format(columns="to_jsonb(unfilled)")),
    """
    update streamer.relation set resync = jsonb_set(resync, '{{columns}}', {columns})
    where id = $1 and resync ? 'columns'
    """.format(columns=RENAMED_SQL.format(columns="resync->'columns'")),
)


_OTHERS_SQL: Final = """
select o.definition::text as definition from streamer.relation r
  join streamer.relation o on o.target = r.target and o.id <> r.id
 where r.id = $1 and {condition}
"""
_UNCHANGED_SQL: Final = """
not exists (select from streamer.ddl d where d.relation_id = o.id and d.edited is null
    and (d.state in ('waiting', 'apply') and d.changes {alike} $2::text[]
         or d.state in ('waiting', 'apply', 'made') and exists (
        select from streamer.ddl own where own.relation_id = r.id and own.lsn = $3::text::pg_lsn
           and own.state = 'applied' and own.changes {alike} d.changes)))
"""
"""The condition for relations `o` that do not wait for a change of relation `r`.

If several sources write a table, the last source to reach a change makes the change for all. So the
condition skips each relation `o` that already waits to make the change of `r`, or an earlier change
of the same transaction.
"""


async def read_definition(session: Executor, relation_id: int) -> SourceDefinition | None:
    """Return the source's definition as of the target's rows; None if unknown."""
    return SourceDefinition.from_json(
        await session.fetch_value(
            "select definition::text from streamer.relation where id = $1", relation_id
        )
    )


async def read_definitions(
    session: Executor, relation_ids: Sequence[int]
) -> dict[int, SourceDefinition]:
    """Return the stored definitions of several relations, by id."""
    rows = await session.fetch(
        "select id, definition::text as definition from streamer.relation"
        " where id = any ($1::int8[])",
        list(relation_ids),
    )
    stored = {row["id"]: SourceDefinition.from_json(row["definition"]) for row in rows}
    return {key: definition for key, definition in stored.items() if definition is not None}


async def read_without_definition(session: Executor, relation_ids: Sequence[int]) -> set[int]:
    """Return the ids of relations in sync without a stored definition."""
    rows = await session.fetch(
        "select id from streamer.relation where id = any ($1::int8[])"
        " and not coalesce(definition ? 'objects', false) and snapshot_lsn is not null",
        list(relation_ids),
    )
    return {row["id"] for row in rows}


async def store_definition(
    session: Executor, relation_id: int, definition: SourceDefinition
) -> None:
    """Store the source's *definition* under which the target gets its next rows."""
    await RELATIONS.set(session, relation_id, {"definition": definition})


async def store_former_labels(
    session: Executor,
    relation_id: int,
    renamed: Mapping[int, Mapping[str, str]],
    definition: SourceDefinition,
) -> None:
    """Store labels that the source has *renamed*, by the OID of their type.

    A label that a type of *definition* contains again is no longer a former label.
    """
    stored = await session.fetch_value(
        "select former_labels::text from streamer.relation where id = $1", relation_id
    )
    labels = follow_labels(json.loads(stored), renamed, definition.types or ())
    await RELATIONS.set(session, relation_id, {"former_labels": labels})


async def read_former_labels(
    session: Executor, relation_ids: Collection[int]
) -> dict[int, FormerColumns]:
    """Return the columns of relations, by id, whose enums had labels under former names."""
    rows = await session.fetch(
        "select id, former_labels::text as labels from streamer.relation"
        " where id = any ($1::int8[]) and former_labels <> '{}'",
        list(relation_ids),
    )
    columns = {}
    for row in rows:
        definition = await read_definition(session, row["id"])
        if definition is not None:
            columns[row["id"]] = former_columns(definition, json.loads(row["labels"]))
    return columns


async def store_first_definitions(
    session: Executor, definitions: Mapping[int, SourceDefinition]
) -> None:
    """Store *definitions*, by relation id, for relations without a definition."""
    rows = ({"id": key, "definition": definition} for key, definition in definitions.items())
    await RELATIONS.update_each(session, rows, "and r.definition is null")


async def read_resync(session: Executor, relation_id: int) -> Resync | None:
    """Return the options of the due copy, whose columns may have been renamed."""
    stored = await session.fetch_value(
        "select resync::text from streamer.relation where id = $1", relation_id
    )
    return None if stored is None else Resync.from_json(json.loads(stored))


async def read_users(
    session: Executor, relation_id: int, types: Collection[int]
) -> list[RelationName]:
    """Return the tables of the same source with a column of one of *types*, given as OIDs."""
    rows = await session.fetch(
        "select o.source from streamer.relation r"
        " join streamer.relation o on o.source_id = r.source_id"
        " where r.id = $1 and exists (select from jsonb_array_elements(o.definition->'types') t"
        " where (t->>'oid')::int8 = any ($2::int8[])) order by 1",
        relation_id,
        list(types),
    )
    return [parse_name(row["source"]) for row in rows]


async def read_known_types(
    session: Executor, relation_id: int, names: Sequence[RelationName]
) -> dict[RelationName, frozenset[int]]:
    """Return the OIDs of the types with *names* in the other tables of the source."""
    rows = await session.fetch(
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


async def read_own_targets(session: Executor, relation_id: int) -> list[RelationName]:
    """Return the target tables that only this source fills."""
    rows = await session.fetch(
        "select o.target from streamer.relation r"
        " join streamer.relation o on o.source_id = r.source_id where r.id = $1"
        " and not exists (select from streamer.relation e"
        " where e.target = o.target and e.source_id <> o.source_id)",
        relation_id,
    )
    return [parse_name(row["target"]) for row in rows]


async def lock_definition(session: Executor, target: RelationName) -> None:
    """Lock the definition of a target table against all sources until this transaction ends.

    Otherwise, if two sources drop a column at the same time, each could still see the column in
    the other source's definition. Then neither would drop the target's column.
    """
    await session.execute(
        "select pg_advisory_xact_lock(hashtextextended('streamer definition ' || $1, 0))",
        str(target),
    )


async def read_others(session: Executor, relation_id: int) -> list[SourceDefinition]:
    """Return the definitions of the other source tables that go to the same target table."""
    rows = await session.fetch(_OTHERS_SQL.format(condition="true"), relation_id)
    return _definitions(rows)


async def read_unchanged(
    session: Executor, place: DdlPlace, changes: Sequence[str]
) -> list[SourceDefinition]:
    """Return the definitions of `read_others`, without relations that wait to make *changes*.

    *place*: the command of this source with *changes*.
    """
    rows = await session.fetch(
        _OTHERS_SQL.format(condition=_UNCHANGED_SQL.format(alike="=")),
        place.relation_id,
        list(changes),
        str(place.lsn),
    )
    return _definitions(rows)


async def read_other_users(
    session: Executor,
    place: DdlPlace,
    names: Sequence[RelationName],
    changes: Sequence[str],
) -> list[SourceDefinition]:
    """Return the definitions of peer sources' tables, of any target, with types called *names*.

    The list omits tables that wait to make one of *changes*, the changes of the command at *place*.
    """
    rows = await session.fetch(
        "select o.definition::text as definition from streamer.relation r"
        " join streamer.relation o on o.source_id <> r.source_id"
        " where r.id = $1 and exists (select from jsonb_array_elements(o.definition->'types') t"
        " join unnest($4::text[], $5::text[]) w (namespace, name)"
        " on (w.namespace, w.name) = (t->>'namespace', t->>'name'))"
        " and " + _UNCHANGED_SQL.format(alike="&&"),
        place.relation_id,
        list(changes),
        str(place.lsn),
        [name.namespace for name in names],
        [name.name for name in names],
    )
    return _definitions(rows)


def _definitions(rows: Iterable[Any]) -> list[SourceDefinition]:
    definitions = (SourceDefinition.from_json(row["definition"]) for row in rows)
    return [definition for definition in definitions if definition is not None]


async def rename_unfilled(
    session: Executor, relation_id: int, moved: Mapping[str, str | None]
) -> None:
    """Rename columns of the target whose values existing rows lack; None for a dropped column.

    Also rename the columns in requests and in a due copy.
    """
    if not moved:
        return
    names = json.dumps(moved)
    for statement in _RENAME_SQL:
        await session.execute(statement, relation_id, names)
    await rename_requested(session, relation_id, names)


async def store_created(session: Executor, definitions: Mapping[int, SourceDefinition]) -> None:
    """Record that streamer created the target tables of relations, by these definitions."""
    await RELATIONS.update_each(
        session,
        (
            {"id": key, "target_created": True, "definition": definition}
            for key, definition in definitions.items()
        ),
    )


async def has_other_streams(session: Executor, relation_id: int) -> bool:
    """Return whether a second relation writes, or has begun to write, to the same target table."""
    return bool(
        await session.fetch_value(
            "select exists (select from streamer.relation o"
            " join streamer.relation r on r.target = o.target"
            " where r.id = $1 and o.id <> r.id and o.state not in ('init'))",
            relation_id,
        )
    )
