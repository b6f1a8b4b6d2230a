"""Plans changes of a table's indexes and constraints, and reads the facts for the plans.

The transaction of the change stores the plans. So streamer creates and ends each plan exactly once.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from streamer.bookkeeping.planned_definitions import (
    put_plans,
    read_plans,
    read_taken,
    withdraw_plans,
)
from streamer.mapping.rule_options import DdlKind
from streamer.schema.definition_message import DefinitionMessage
from streamer.schema.indexes_constraints_types import DefinedObject
from streamer.schema.planned_definition import ObjectKind, TargetLimits, TargetPlace
from streamer.schema.render_definitions import Renderer
from streamer.schema.source_definition import (
    ColumnChange,
    DefinedColumn,
    SourceDefinition,
    columns_after,
)
from streamer.schema.target_relation import TargetRelation
from streamer.schema_changes.changed_table import ChangedTable
from streamer.schema_changes.read_definitions import objects_of, read_at_target, read_places
from streamer.schema_changes.translate.object_translator import ObjectTranslation, ObjectTranslator
from streamer.target.connection import may_replace_role

_OF_COLUMNS: Final = frozenset({ObjectKind.DEFAULT, ObjectKind.NOT_NULL})
_VOIDS: Final = frozenset(
    {DdlKind.DROP_COLUMN, DdlKind.RENAME_COLUMN, DdlKind.DROP_NOT_NULL, DdlKind.SET_DEFAULT}
)
"""Changes of a column that make a plan for the column obsolete."""


class Objects:
    """The indexes and constraints of a table in a message about its definition."""

    def __init__(self, table: ChangedTable, message: DefinitionMessage) -> None:
        self._target = table.session
        self._tables = table.tables
        self._mapped = table.mapped
        self._definition = objects_of(message)

    async def translator(
        self,
        relation: TargetRelation,
        peers: Sequence[SourceDefinition],
        columns: frozenset[str],
    ) -> ObjectTranslator:
        """Return a translator that knows the target's table, which will have *columns*.

        *peers*: see `ObjectTranslator`.
        """
        place = TargetPlace.at(self._mapped.mapping, relation)
        place = replace(place, columns=columns)
        names = [*self._definition.all_indexes]
        referred = map(self._tables.find_mapping, self._definition.referenced)
        mappings = [mapping for mapping in referred if mapping is not None]
        return ObjectTranslator(
            place,
            await read_places(self._target, mappings),
            self._definition,
            (await read_at_target(self._target, [relation.oid]))[relation.oid],
            peers=peers if relation.is_shared(place.mapping) else (),
            taken=await read_taken(self._target, place.mapping.target, names),
            limits=TargetLimits(
                self._target.server_version, acts=not await may_replace_role(self._target)
            ),
        )

    async def store(self, translation: ObjectTranslation) -> None:
        """Store new plans and the ends of plans, for work after the commit of this transaction."""
        relation_id = self._mapped.relation_id
        await withdraw_plans(self._target, relation_id, translation.ended)
        await put_plans(self._target, relation_id, translation.planned)

    async def plan_lost(
        self,
        relation: TargetRelation,
        peers: Sequence[SourceDefinition],
        objects: Sequence[DefinedObject],
        former: frozenset[str],
    ) -> None:
        """Plan again the source's *objects* that the target lost with a dropped column.

        *former*: the names of the objects that the target's table had.
        """
        if lost := former - relation.object_names:
            translator = await self.translator(relation, peers, frozenset(relation.columns))
            await self.store(translator.plan_lost(objects, lost))

    async def renew_plans(self, relation: TargetRelation) -> None:
        """Adapt the pending plans to the columns that the target has now."""
        relation_id = self._mapped.relation_id
        records = await read_plans(self._target, relation_id)
        if not records:
            return
        translator = await self.translator(relation, [], frozenset(relation.columns))
        renewed = []
        for record in records:
            planned = translator.planned(record.kind, record.name)
            if planned is not None and planned.online != record.online:
                renewed.append(planned)
        await put_plans(self._target, relation_id, renewed)

    async def plan_columns(
        self,
        relation: TargetRelation,
        changes: Sequence[ColumnChange],
        unfinished: Sequence[DefinedColumn],
    ) -> None:
        """Plan the rest of *unfinished* columns; earlier plans for columns follow *changes*."""
        mapping, relation_id = self._mapped.mapping, self._mapped.relation_id
        pending = await read_plans(self._target, relation_id)
        open_ = {(plan.kind, plan.name) for plan in pending if plan.kind in _OF_COLUMNS}
        void, columns = [], list(unfinished)
        for former, column in columns_after(c for c in changes if c.kind in _VOIDS).items():
            plans = [key for key in open_ if key[1] == mapping.target_column(former)]
            void += plans
            if plans and column is not None:
                columns.append(column)
        await withdraw_plans(self._target, relation_id, void)
        names = [c.sequence.name for c in columns if c.sequence is not None]
        used = await read_taken(self._target, mapping.target, names) if names else frozenset()
        place = TargetPlace.at(mapping, relation)
        renderer = Renderer(self._definition, place, lambda _: None, used)
        planned = [plan for c in columns if (plan := renderer.filled(c)) is not None]
        await put_plans(self._target, relation_id, planned)
