"""Applies changes of source definitions at the target, at their position in the stream.

A drainer writes each lane transaction with such a change separately. Earlier changes of the lane
are in the target by then, and later changes follow. The statements, the new definition and the
lane's progress commit together, so a crash leaves all of these or none.

A change that must wait for an operator ends the transaction
(`streamer.schema_changes.table_change`). The drainer repeats the attempt every few seconds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from streamer.apply.lanes.lane import LaneOwner, MappedRelation
from streamer.apply.lanes.lane_transaction import LaneTransaction
from streamer.apply.quarantine.quarantine_writer import QuarantineWriter
from streamer.apply.write.planner import Planner
from streamer.bookkeeping.ddl_records import DdlPlace
from streamer.bookkeeping.relation_definitions import read_definition, store_definition
from streamer.decode.pgoutput import Redefinition, to_datetime
from streamer.schema.definition_message import DefinitionMessage, definition_after
from streamer.schema.source_definition import AnyChange, all_differences
from streamer.schema_changes.changed_table import ChangedTable, SourceCommand
from streamer.schema_changes.table_change import TableChange
from streamer.target.connection import TargetConnection


def cut(piece: LaneTransaction) -> Iterator[LaneTransaction]:
    """Split a piece into parts: groups of rows, and messages about definitions. Pure."""
    rows: list[int] = []
    for number, (_, changes) in enumerate(piece.changes):
        if isinstance(changes.relation, Redefinition):
            if rows:
                yield _part(piece, rows)
            rows = []
            yield _part(piece, [number])
        else:
            rows.append(number)
    if rows:
        yield _part(piece, rows)


def _part(piece: LaneTransaction, numbers: Sequence[int]) -> LaneTransaction:
    return replace(piece, changes=[piece.changes[number] for number in numbers])


class Definitions:
    """Applies the messages about definitions in a target transaction."""

    def __init__(self, writer: QuarantineWriter, owner: LaneOwner, planner: Planner) -> None:
        self._writer = writer
        self._planner = planner
        self._owner = owner
        self._counts: dict[MappedRelation, int] = {}
        self._change: TableChange | None = None

    @property
    def has_applied(self) -> bool:
        """Whether the transaction has met a message about a definition."""
        return bool(self._counts)

    @property
    def _target(self) -> TargetConnection:
        return self._writer.target

    async def apply(self, part: LaneTransaction) -> list[MappedRelation]:
        """Apply a part that `cut` returned; return the relations with a message.

        After a StreamerError, call `after_rollback`.
        """
        concerned = []
        at = str(to_datetime(part.transaction.commit_time))
        for mapped, changes in part.changes:
            for payload in changes.payloads:
                if mapped.has(part.transaction):
                    continue
                mapped.check()
                number = self._counts[mapped] = self._counts.get(mapped, 0) + 1
                place = DdlPlace(mapped.relation_id, part.transaction.final_lsn, number)
                message = DefinitionMessage.parse(payload)
                assert message is not None
                await self._apply(mapped, place, message, at)
                concerned.append(mapped)
        return concerned

    def forget_plans(self) -> None:
        """Discard the plans of all relations whose definitions this transaction tried to change."""
        for mapped in self._counts:
            mapped.plan = None

    async def after_rollback(self) -> None:
        """Run the steps of the last change that precede the next attempt."""
        if self._change is not None:
            await self._change.after_rollback()

    async def _apply(
        self, mapped: MappedRelation, place: DdlPlace, message: DefinitionMessage, at: str
    ) -> None:
        stored = await read_definition(self._target, mapped.relation_id)
        outcome = definition_after(stored, message, mapped.mapping.source.namespace, mapped.relid)
        mapped.is_doubtful |= outcome.is_doubtful
        definition = outcome.definition
        if definition is None:
            return
        changes: list[AnyChange] = []
        if stored is not None:
            changes = all_differences(
                stored,
                definition,
                computes_values=message.computes_values,
                dropped_types=message.dropped.types,
            )
        if stored is None or not stored.is_whole or changes:
            owner = self._owner
            table = ChangedTable(
                self._target,
                owner.source,
                owner,
                mapped,
                read_types=partial(self._planner.describe_types, mapped),
                read_present=partial(self._planner.describe_present, mapped),
            )
            command = SourceCommand(place, message, definition, at)
            change = self._change = TableChange(table, command)
            await change.make(changes)
            if change.quarantined:
                self._writer.record_quarantine_change(mapped, change.quarantined)
        elif stored != definition:
            await store_definition(self._target, mapped.relation_id, definition)
        mapped.plan = None
