"""Changes of a table's indexes, constraints and types: facts that they need, and their plans.

Everything happens in the target transaction of the change's place in the stream. So a plan for an
index is there exactly once, and so is its end.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

from streamer.apply.lane import MappedRelation
from streamer.apply.sql.object_changes import ObjectTranslation, ObjectTranslator, referenced
from streamer.apply.sql.type_changes import TypeTranslation, TypeTranslator
from streamer.definitions.model import TableDefinition
from streamer.definitions.planned import ObjectKind, Places, TargetPlace
from streamer.definitions.read import objects_of, read_at_target, read_places
from streamer.definitions.render import Renderer
from streamer.lsn import Lsn
from streamer.mapping.definition import (
    ColumnChange,
    DefinedColumn,
    SourceDefinition,
    columns_after,
)
from streamer.mapping.definition_message import DefinitionMessage
from streamer.mapping.names import RelationName
from streamer.mapping.objects import DefinedObject, DefinedType, TypeChange, base_type
from streamer.mapping.options import DdlKind
from streamer.mapping.rules import RelationMapping
from streamer.postgres.describing import NAMED_TYPES_SQL, USED_TYPES
from streamer.progress.definition_changes import DdlPlace
from streamer.progress.planned_definitions import end_plans, put_plans, read_plans, read_taken
from streamer.progress.relation_definitions import (
    read_known_types,
    read_other_users,
    read_own_targets,
)
from streamer.target.catalog import TargetRelation
from streamer.target.connection import TargetConnection, may_replace_role
from streamer.target.former_types import read_uses

_USED_TYPES_SQL: Final = f"select ({USED_TYPES})::text from pg_catalog.pg_class c where c.oid = $1"
_TYPES_LOCK: Final = 0x7479706573  # "types"
_OF_COLUMNS: Final = frozenset({ObjectKind.DEFAULT, ObjectKind.NOT_NULL})
_VOIDS: Final = frozenset(
    {DdlKind.DROP_COLUMN, DdlKind.RENAME_COLUMN, DdlKind.DROP_NOT_NULL, DdlKind.SET_DEFAULT}
)
"""Changes of a column after which a plan for it is another one."""


class Tables(Protocol):
    """The tables of a source; see `streamer.apply.lane.LaneOwner`."""

    def find_mapping(self, name: RelationName) -> RelationMapping | None: ...
    def is_behind(self, name: RelationName, lsn: Lsn) -> bool: ...


async def lock_types(target: TargetConnection) -> None:
    """Let no other lane change types of the target, or the use of types, in this transaction.

    Another one may come to the same change now: it makes it, or finds it made.
    """
    await target.fetch("select pg_catalog.pg_advisory_xact_lock($1)", _TYPES_LOCK)


async def translate_types(
    target: TargetConnection,
    mapped: MappedRelation,
    table: TargetRelation,
    columns: Sequence[DefinedColumn],
    changes: Sequence[TypeChange],
    place: DdlPlace,
    kept: Mapping[str, Sequence[str]],
) -> TypeTranslation:
    """Return the statements for changes of types. Raises TargetSchemaError, see `TypeTranslator`.

    *columns*: of the source's table after the changes. *place*: of these. *kept*: see
    `streamer.apply.kept_labels`.
    """
    named = {type_ for change in changes for type_ in (change.before, change.after) if type_}
    found = await target.fetch_value(
        NAMED_TYPES_SQL, [t.namespace for t in named], [t.name for t in named]
    )
    types = [*map(DefinedType.of, json.loads(found or "[]")), *await read_used_types(target, table)]
    there = {each.full_name: each for each in types}
    by_name = {each.quoted: each for each in types}
    of_columns = {}
    for column in columns:
        name = mapped.mapping.target_column(column.name)
        if name is not None and name in table.columns:
            of_columns[base_type(column.type)] = by_name.get(base_type(table.columns[name].type))
    own = {
        change.before.full_name: its
        for change in changes
        if change.before is not None and (its := of_columns.get(change.after.quoted)) is not None
    }
    names = [each.full_name for each in named]
    # Tables of other sources share a type with this one, also in other target tables.
    words = [str(change) for change in changes]
    others = await read_other_users(target, place, names, words)
    return TypeTranslator(
        there,
        [other.used_types for other in others],
        uses=await read_uses(target, types, await read_own_targets(target, mapped.relation_id)),
        own=own,
        known=await read_known_types(target, mapped.relation_id, names),
        kept=kept,
    ).translate(changes)


async def read_used_types(target: TargetConnection, table: TargetRelation) -> list[DefinedType]:
    """Return the types of the columns of a target table, and their parts."""
    found = await target.fetch_value(_USED_TYPES_SQL, table.oid)
    return [DefinedType.of(each) for each in json.loads(found or "[]")]


async def read_there(target: TargetConnection, table: TargetRelation) -> TableDefinition:
    """Return the definition that a target table has."""
    return (await read_at_target(target, [table.oid]))[table.oid]


class Objects:
    """The indexes and constraints of one table, as a message about its definition has them."""

    def __init__(
        self,
        target: TargetConnection,
        tables: Tables,
        mapped: MappedRelation,
        message: DefinitionMessage,
    ) -> None:
        self._target = target
        self._tables = tables
        self._mapped = mapped
        self._definition = objects_of(message)

    async def translator(
        self,
        there: TargetRelation,
        others: Sequence[SourceDefinition],
        columns: frozenset[str],
    ) -> ObjectTranslator:
        """Return a translator that knows the target's table, which will have *columns*.

        *others*: see `ObjectTranslator`.
        """
        mapped = self._mapped
        place = replace(TargetPlace.at(mapped.mapping, mapped.source.sid, there), columns=columns)
        wanted = [index.name for index in self._definition.indexes]
        return ObjectTranslator(
            place,
            await self._places(),
            self._definition,
            await read_there(self._target, there),
            others=others if place.has_sid else (),
            taken=await read_taken(self._target, mapped.mapping.target, wanted),
            acts=not await may_replace_role(self._target),
        )

    async def store(self, translation: ObjectTranslation) -> None:
        """Store the plans, and the end of others, to be made when this transaction is committed."""
        relation_id = self._mapped.relation_id
        await end_plans(self._target, relation_id, translation.ended)
        await put_plans(self._target, relation_id, translation.planned)

    async def read_names(self, there: TargetRelation) -> frozenset[str]:
        """Return the names of the indexes and constraints that the target's table has."""
        present = await read_there(self._target, there)
        indexes = [index.name for index in present.indexes]
        return frozenset([*indexes, *(constraint.name for constraint in present.constraints)])

    async def plan_lost(
        self,
        there: TargetRelation,
        others: Sequence[SourceDefinition],
        objects: Sequence[DefinedObject],
        before: frozenset[str],
    ) -> None:
        """Plan those of the source's *objects* anew that went with a former column of the target.

        *before*: the names that the target's table had.
        """
        if lost := before - await self.read_names(there):
            translator = await self.translator(there, others, frozenset(there.columns))
            await self.store(translator.plan_lost(objects, lost))

    async def renew_plans(self, there: TargetRelation) -> None:
        """Have the plans that are still to be made fit the columns that the target has now."""
        relation_id = self._mapped.relation_id
        records = await read_plans(self._target, relation_id)
        if not records:
            return
        translator = await self.translator(there, [], frozenset(there.columns))
        renewed = []
        for record in records:
            planned = translator.planned(record.kind, record.name)
            if planned is not None and planned.online != record.online:
                renewed.append(planned)
        await put_plans(self._target, relation_id, renewed)

    async def plan_columns(
        self,
        there: TargetRelation,
        changes: Sequence[ColumnChange],
        unfinished: Sequence[DefinedColumn],
    ) -> None:
        """Store what *unfinished* columns are still to get; such plans follow *changes*."""
        mapping, relation_id = self._mapped.mapping, self._mapped.relation_id
        pending = await read_plans(self._target, relation_id)
        open_ = {(each.kind, each.name) for each in pending if each.kind in _OF_COLUMNS}
        void, wanted = [], list(unfinished)
        for before, column in columns_after(c for c in changes if c.kind in _VOIDS).items():
            found = [each for each in open_ if each[1] == mapping.target_column(before)]
            void += found
            if found and column is not None:
                wanted.append(column)
        await end_plans(self._target, relation_id, void)
        names = [each.sequence.name for each in wanted if each.sequence is not None]
        taken = await read_taken(self._target, mapping.target, names) if names else frozenset()
        place = TargetPlace.at(mapping, self._mapped.source.sid, there)
        renderer = Renderer(self._definition, place, lambda _: None, taken)
        planned = [plan for each in wanted if (plan := renderer.filled(each)) is not None]
        await put_plans(self._target, relation_id, planned)

    async def _places(self) -> Places:
        """Return where the tables go that foreign keys refer to."""
        names = referenced(self._definition)
        mappings = [each for name in names if (each := self._tables.find_mapping(name)) is not None]
        return await read_places(self._target, mappings, self._mapped.source.sid)
