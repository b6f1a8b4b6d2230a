"""Applies changes of a definition without a message, if refused rows need the changes.

The capture gives a warning if it cannot send a message: a session holds the lock of a table, or the
event triggers are disabled. The next message of the table replaces the lost message. A row may come
before that message, with a column, a label or an attribute that the stored definition lacks. The
drainer then reads the present definition of the source beside the stream. The drainer applies the
parts of the difference that the row needs, before the row, and tries the row again.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import structlog

from streamer.apply.lanes.lane import LaneOwner, MappedRelation
from streamer.apply.lanes.lane_transaction import LaneTransaction
from streamer.apply.write.planner import Planner
from streamer.bookkeeping.ddl_records import DdlPlace
from streamer.bookkeeping.relation_definitions import read_definition
from streamer.decode.pgoutput import Redefinition, Relation, new_row, to_datetime
from streamer.errors.error_classes import StreamerError
from streamer.mapping.rule_options import DdlCapture, OnDdl
from streamer.schema.composite_values import attribute_counts
from streamer.schema.definition_message import RowEvidence, with_needed_parts
from streamer.schema.source_definition import SourceDefinition, all_differences
from streamer.schema_changes.changed_table import ChangedTable, SourceCommand
from streamer.schema_changes.table_change import TableChange
from streamer.target.connection import TargetConnection, transaction

log = structlog.get_logger()


class Refused:
    """The changes that the target just refused: lane transactions, or pieces of a large one.

    For a large transaction, the object retains only the payloads of the newest piece.
    """

    def __init__(self) -> None:
        self.relations: dict[MappedRelation, list[Relation]] = {}
        self._newest: Sequence[LaneTransaction] = ()

    def __bool__(self) -> bool:
        return bool(self._newest)

    def add(self, pieces: Sequence[LaneTransaction]) -> None:
        """Add *pieces* to the refused changes."""
        self._newest = pieces
        for piece in pieces:
            for mapped, changes in piece.changes:
                relations = self.relations.setdefault(mapped, [])
                is_of_rows = not isinstance(changes.relation, Redefinition)
                if is_of_rows and changes.relation not in relations:
                    relations.append(changes.relation)

    @property
    def first(self) -> LaneTransaction:
        return self._newest[0]

    def may_have(self, label: str) -> bool:
        """Whether a row of the newest pieces may contain a label of an enum."""
        if not label.isascii() or any(character in label for character in '"\\'):
            return True  # arrays and the source's encoding may escape the label
        text = label.encode()
        return any(text in payload for _, payload in self._rows())

    def _rows(self) -> Iterator[tuple[Relation, bytes]]:
        """Yield the messages of the newest pieces."""
        for piece in self._newest:
            for _, changes in piece.changes:
                if not isinstance(changes.relation, Redefinition):
                    for payload in changes.payloads:
                        yield changes.relation, payload

    def attribute_counts(self, definition: SourceDefinition) -> dict[int, set[int]]:
        """Return the numbers of attributes of composite values, by the OID of the type."""
        types = {entry.quoted: entry for entry in definition.types or ()}
        kinds = {entry.name: entry.type for entry in definition.columns if "." in entry.type}
        counts: dict[int, set[int]] = {}
        for relation, payload in self._rows() if types else ():
            if relation.relid != definition.oid:
                continue
            for column, value in zip(relation.columns, new_row(payload), strict=False):
                if column.name in kinds and value[:1] == b"t":
                    text = bytes(value[5:]).decode(errors="replace")
                    for oid, count in attribute_counts(text, kinds[column.name], types):
                        counts.setdefault(oid, set()).add(count)
        return counts


async def apply_lost_definitions(
    target: TargetConnection, owner: LaneOwner, planner: Planner, refused: Refused
) -> bool:
    """Apply definition changes whose message was lost, if the *refused* rows need the changes.

    Return whether any change was applied.

    *target* is in no transaction. Raises DefinitionStopError if an operator must decide,
    TargetContentionError.
    """
    if owner.source.ddl is not DdlCapture.CAPTURE or not refused:
        return False
    are_applied = [
        await _apply_to_table(target, owner, planner, refused, mapped)
        for mapped in refused.relations
    ]
    return any(are_applied)


async def _apply_to_table(
    target: TargetConnection,
    owner: LaneOwner,
    planner: Planner,
    refused: Refused,
    mapped: MappedRelation,
) -> bool:
    relations = refused.relations[mapped]
    stored = await read_definition(target, mapped.relation_id)
    if stored is None or not stored.is_whole or not relations or mapped.obstacle is not None:
        return False
    try:
        message, columns = await planner.describe_columns(mapped, relations)
    except StreamerError as exc:
        # The caller then raises the refusal, and the next attempt of the lane queries the source
        # again.
        log.info(
            "cannot read the definition of a table whose target refuses rows",
            table=str(mapped.mapping.source),
            error=exc.message,
        )
        return False
    if message is None or message.definition is None or message.definition.oid != stored.oid:
        return False
    eases = {kind for kind, reaction in owner.source.on_ddl.items() if reaction is OnDdl.APPLY}
    counts = refused.attribute_counts(message.definition)
    evidence = RowEvidence(columns, refused.may_have, eases, counts)
    definition = with_needed_parts(stored, message.definition, evidence)
    changes = all_differences(stored, definition)
    if not changes:
        return False
    first = refused.first.transaction
    table = ChangedTable(
        target,
        owner.source,
        owner,
        mapped,
        read_types=partial(planner.describe_types, mapped),
        read_present=partial(planner.describe_present, mapped),
    )
    command = SourceCommand(
        DdlPlace(mapped.relation_id, first.final_lsn, 0),
        message,
        definition,
        at=str(to_datetime(first.commit_time)),
        reason="the source sent no message about this change, and a row needs the change",
        is_late=True,
    )
    change = TableChange(table, command)
    try:
        async with transaction(target):
            await change.make(changes)
    finally:
        await change.after_rollback()
    mapped.plan, mapped.is_doubtful = None, True
    return True
