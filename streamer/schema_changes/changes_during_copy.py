"""Changes of definitions before a copy, at a source that captures definitions (`ddl: capture`).

A copy of all rows drops the messages of the stream before the consistent point. So streamer changes
the target before the copy begins. The change is the difference between the stored definition, which
the target follows, and the present definition. `on_ddl` decides by kind, as in the stream.

A copy of some rows, or a comparing copy, leaves the relation in sync. The lane makes the changes,
because the copy waits until the stream is up to date.

The round reads the definition again under the snapshot. If the definition changed by then, the next
round repeats this step.
"""

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Final, Protocol

import structlog

from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.rows.make_plan import missing_columns
from streamer.bookkeeping.ddl_records import place_of_copy, supersede
from streamer.bookkeeping.deferred_indexes import restore_indexes
from streamer.bookkeeping.relation_definitions import (
    read_definition,
    read_definitions,
    read_others,
    read_resync,
    store_first_definitions,
)
from streamer.errors.error_classes import DefinitionStopError, SyncError, TargetContentionError
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import DdlKind
from streamer.mapping.rules import SourceMapping
from streamer.schema.definition_message import parts_of
from streamer.schema.indexes_constraints_types import TypeChange
from streamer.schema.source_definition import SourceDefinition, all_differences
from streamer.schema_changes.changed_table import ChangedTable, SourceCommand, Tables
from streamer.schema_changes.create_tables import published_relation
from streamer.schema_changes.read_definitions import read_target_types
from streamer.schema_changes.table_change import TableChange
from streamer.schema_changes.translate.joining_source import part_of_target
from streamer.source.capture.ddl_capture import read_present
from streamer.source.catalog import SourceRelation, flush_wal, read_relations
from streamer.source.connection import Connection
from streamer.source.tables.user_defined_types import read_named_types
from streamer.target.catalog import read_partitions, read_relation
from streamer.target.connection import TargetConnection, transaction
from streamer.util.lsn import Lsn

log = structlog.get_logger()

Pair = tuple[MappedRelation, SourceRelation]
CHECK_SECONDS: Final = 0.05
STREAM_SECONDS: Final = 2.0
"""How long a copy waits for the stream before the next copy gets its turn."""
READS_MAX: Final = 5
"""How many times a copy reads a definition that keeps changing."""


_ALTERS_VALUES: Final = frozenset(
    {
        DdlKind.RENAME_ENUM_VALUE,
        DdlKind.ADD_ATTRIBUTE,
        DdlKind.DROP_ATTRIBUTE,
        DdlKind.CHANGE_ATTRIBUTE,
    }
)


def alters_values(former: SourceDefinition, after: SourceDefinition) -> bool:
    """Whether a change of types alters the text of values. Pure."""
    return any(change.kind in _ALTERS_VALUES for change in all_differences(former, after))


class StreamOfCopy(Tables, Protocol):
    """The stream beside a copy, for changes of definitions."""

    async def reach(self, mapped: MappedRelation, point: Lsn) -> None:
        """Apply the changes of *mapped* that commit before *point*. Raises SyncError."""
        ...

    def has_delivered(self, lsn: Lsn) -> bool:
        """Whether the stream has delivered all transactions that committed before *lsn*."""
        ...


class ChangedDefinitions:
    """Gives the target tables of a source the definitions that its copies read."""

    def __init__(self, source: SourceMapping, events: StreamOfCopy) -> None:
        self._source = source
        self._events = events

    async def prepare_targets(
        self, source: Connection, target: TargetConnection, pairs: Sequence[Pair]
    ) -> list[Pair]:
        """Prepare target tables for copies of *pairs*; return pairs with present definitions.

        Raises DefinitionStopError if an operator must decide, TargetSchemaError, and SyncError.
        """
        definitions = await read_definitions(target, [mapped.relation_id for mapped, _ in pairs])
        prepared = []
        for mapped, relation in pairs:
            if mapped.relation_id not in definitions and not mapped.state.follows:
                await self._store_part_of_peers(target, mapped, relation)
                definitions = await read_definitions(target, [m.relation_id for m, _ in pairs])
            if _differs(definitions.get(mapped.relation_id), relation):
                prepared.append(
                    (mapped, await self._prepare_target(source, target, mapped, relation))
                )
            else:
                prepared.append((mapped, relation))
            if mapped.state.resync.columns is not None:  # a command may have renamed columns
                stored = await read_resync(target, mapped.relation_id)
                if stored is not None:
                    mapped.become(mapped.state.with_options(stored))
        return prepared

    async def _store_part_of_peers(
        self, target: TargetConnection, mapped: MappedRelation, relation: SourceRelation
    ) -> None:
        """Store the part of the definition that peer sources have already given the target table.

        These sources may lack a column, an enum value or a partition of this source, or have
        narrower types. The target gets missing parts as in the stream.
        """
        table = await read_relation(target, mapped.mapping.target)
        if table is None or not table.is_shared(mapped.mapping):
            return
        if not await read_others(target, mapped.relation_id):
            return
        missing = missing_columns(published_relation(relation), mapped.mapping, table)
        present = part_of_target(
            relation.definition,
            mapped.mapping,
            table,
            await read_target_types(target, table),
            await read_partitions(target, table),
            {name for name, _ in missing},
        )
        if present == relation.definition:
            return
        await store_first_definitions(target, {mapped.relation_id: present})

    async def store_definitions(self, target: TargetConnection, pairs: Sequence[Pair]) -> None:
        """Store the source's definition for each relation without a stored definition.

        A repeated copy compares with this definition. The method skips relations in sync: their
        lanes may be behind the present definition, and read definitions from the stream.
        """
        definitions = {
            mapped.relation_id: relation.definition
            for mapped, relation in pairs
            if not mapped.state.follows
        }
        await store_first_definitions(target, definitions)
        for mapped, relation in pairs:
            if mapped.parts is not None or mapped.relation_id in definitions:
                mapped.add_parts(parts_of(relation.definition, relation.name.namespace))

    async def _prepare_target(
        self,
        source: Connection,
        target: TargetConnection,
        mapped: MappedRelation,
        relation: SourceRelation,
    ) -> SourceRelation:
        """Apply the changes to the target table; repeat this if the source changes the table
        meanwhile.
        """
        if await read_relation(target, mapped.mapping.target) is None:
            return relation  # the copy creates it
        for _ in range(READS_MAX):
            if mapped.state.follows:
                await self._events.reach(mapped, await flush_wal(source))
            else:
                await self._apply_unsent(source, target, mapped)
            now = (await read_relations(source, [relation.name])).get(relation.name)
            if now is None:
                raise SyncError(f'table "{relation.name}" does not exist at the source')
            relation = now
            stored = await read_definition(target, mapped.relation_id)
            if not _differs(stored, relation):
                return relation
        log.warning(
            "the catalog and the stream have different definitions of a table",
            source=self._source.label,
            table=str(relation.name),
        )
        return relation

    async def _wait_for_stream(self, lsn: Lsn) -> None:
        """Wait until the stream has delivered all changes before *lsn*.

        Then the lanes show which tables with the changed type have unapplied changes.
        Raises TargetContentionError if that takes long.
        """
        until = time.monotonic() + STREAM_SECONDS
        while not self._events.has_delivered(lsn):
            if time.monotonic() > until:
                raise TargetContentionError(
                    "the copy must change a type at the target, and the stream has not reached "
                    f"{lsn}"
                )
            await asyncio.sleep(CHECK_SECONDS)

    async def _apply_unsent(
        self, source: Connection, target: TargetConnection, mapped: MappedRelation
    ) -> None:
        """Apply the changes whose messages the stream does not send again."""
        message = await read_present(source, self._source, mapped.mapping.source)
        definition = message.definition
        assert definition is not None
        lsn = await flush_wal(source)
        stored = await read_definition(target, mapped.relation_id)
        assert stored is not None
        changes = all_differences(stored, definition)
        if any(isinstance(change, TypeChange) for change in changes):
            await self._wait_for_stream(lsn)
        # Stored definitions of indexes have the former names of columns.
        await restore_indexes(target, mapped.mapping.target, mapped.relation_id)
        table = ChangedTable(
            target,
            self._source,
            self._events,
            mapped,
            read_types=partial(read_named_types, source),
            read_present=partial(_present, source, mapped.mapping.source),
        )
        change = None
        try:
            async with transaction(target):
                stored = await read_definition(target, mapped.relation_id)
                assert stored is not None
                changes = all_differences(stored, definition)
                words = [str(difference) for difference in changes]
                place = await place_of_copy(target, mapped.relation_id, words, lsn)
                await supersede(target, place)
                command = SourceCommand(
                    place,
                    message,
                    definition,
                    at=str(datetime.now(UTC)),
                    reason="the source changed the table, and a copy of it is due",
                    copy_follows=True,
                )
                change = TableChange(table, command)
                await change.make(changes)
        except (DefinitionStopError, TargetContentionError):
            if change is not None:
                async with transaction(target):
                    await supersede(target, place)
                    await change.after_rollback()
            raise


async def _present(source: Connection, name: RelationName) -> SourceDefinition | None:
    now = (await read_relations(source, [name])).get(name)
    return None if now is None else now.definition


def _differs(stored: SourceDefinition | None, relation: SourceRelation) -> bool:
    return stored is not None and bool(all_differences(stored, relation.definition))
