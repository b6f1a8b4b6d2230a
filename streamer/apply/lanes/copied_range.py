"""The changes of copied rows, for a table in a chunked copy.

A later chunk copies the other rows, with their changes, so the drainer leaves those changes out. An
update that moves a row into or out of the copied range becomes an insert or a delete. Pure.

PostgreSQL documentation, "Logical Replication Message Formats", describes the messages.
"""

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from streamer.control.chunked_copy import ChunkedCopy
from streamer.decode.pgoutput import (
    DELETE,
    INSERT,
    NEW_TUPLE,
    TRUNCATE,
    UPDATE,
    Redefinition,
    Relation,
)
from streamer.decode.transactions import Changes
from streamer.decode.tuples import KIND_BINARY, KIND_NULL, KIND_TEXT, KIND_UNCHANGED
from streamer.errors.error_classes import ProtocolError, SyncError
from streamer.mapping.rule_options import TableType
from streamer.postgres.key_values import KeyValue, read_key_value

if TYPE_CHECKING:
    from streamer.apply.lanes.lane_transaction import LaneTransaction

_TUPLE_AT: Final = 6
_length_at: Final = struct.Struct(">I").unpack_from


class UnknownRowError(Exception):
    """The effect of a change on the copied range is unknown.

    The key is unknown, a row that enters the range lacks values, or the target keeps a row that
    leaves the range.
    """


class CopiedRange:
    """The range of keys that earlier chunks copied, for changes under one definition of the table.

    *keeps_deleted*: the target keeps rows that the source deletes.
    """

    def __init__(
        self, copied: ChunkedCopy, relation: Relation, *, keeps_deleted: bool = False
    ) -> None:
        """Raises UnknownRowError if a column of the key is not in the changes."""
        self._keeps_deleted = keeps_deleted
        self._types = copied.types
        self._last = copied.last_key
        self._width = len(relation.columns)
        numbers = {column.name: number for number, column in enumerate(relation.columns)}
        try:
            self._positions = [numbers[name] for name in copied.columns]
        except KeyError as exc:
            raise UnknownRowError(f"a change has no key column {exc}") from None

    def effect_of(self, payload: bytes) -> bytes | None:
        """Return the message that has the effect of a change on the range; None for no effect.

        Raises UnknownRowError, ProtocolError.
        """
        kind = payload[0]
        if kind == TRUNCATE:
            return payload
        if kind not in (INSERT, UPDATE, DELETE):
            raise ProtocolError(f"unexpected row message {chr(kind)!r}")
        first, end = self._read(payload, _TUPLE_AT)
        if kind != UPDATE or payload[5] == NEW_TUPLE:
            return payload if self._has(first) else None
        if payload[end] != NEW_TUPLE:
            raise ProtocolError(f"unexpected tuple at offset {end} of an update")
        second, _ = self._read(payload, end + 1)
        new = [
            old if _is_unchanged(item) else item for item, old in zip(second, first, strict=True)
        ]
        if self._has(first):
            if self._has(new):
                return payload
            if self._keeps_deleted:
                raise UnknownRowError(
                    "an update moved a key to a later chunk, and the rule keeps deleted rows"
                )
            return b"D" + bytes(payload[1:end])
        if not self._has(new):
            return None
        # Except with REPLICA IDENTITY FULL, the old tuple contains only the key.
        if any(map(_is_unchanged, new)) or (
            payload[5] != ord("O") and any(map(_is_unchanged, second))
        ):
            raise UnknownRowError("an update of a key omits unchanged large values")
        head = b"I" + bytes(payload[1:5]) + b"N" + len(new).to_bytes(2, "big")
        return head + b"".join(map(bytes, new))

    def _read(self, payload: bytes, position: int) -> tuple[list[bytes], int]:
        items, end = _read_items(payload, position)
        if len(items) != self._width:
            raise ProtocolError(f"a row message has {len(items)} columns instead of {self._width}")
        return items, end

    def _has(self, items: list[bytes]) -> bool:
        pairs = zip(self._positions, self._types, strict=True)
        return tuple(_value(items[position], kind) for position, kind in pairs) <= self._last


def _value(item: bytes, kind: str) -> KeyValue:
    if item[0] in (KIND_NULL, KIND_UNCHANGED):
        raise UnknownRowError("a change lacks the key of its row")
    try:
        return read_key_value(bytes(item[5:]), kind, is_text=item[0] == KIND_TEXT)
    except ValueError:
        raise UnknownRowError(f"a key column is no longer of type {kind}") from None


def only_copied(lane_transaction: "LaneTransaction") -> "LaneTransaction":
    """Return the transaction without changes of rows that a later chunk copies.

    Raises SyncError if a change fits no range; the copy must then begin again, in one piece.
    """
    if all(mapped.state.chunks is None for mapped, _ in lane_transaction.changes):
        return lane_transaction
    changes = []
    for mapped, items in lane_transaction.changes:
        copied = mapped.state.chunks
        is_applied = mapped.has(lane_transaction.transaction)
        if copied is None or is_applied or isinstance(items.relation, Redefinition):
            changes.append((mapped, items))
            continue
        mapping = mapped.mapping
        keeps_deleted = mapping.type is TableType.APPEND or mapping.rule.deleted_at is not None
        try:
            range_ = CopiedRange(copied, items.relation, keeps_deleted=keeps_deleted)
            results = map(range_.effect_of, items.payloads)
            payloads = [payload for payload in results if payload is not None]
            changes.append((mapped, Changes(items.relation, payloads)))
        except UnknownRowError as exc:
            mapped.become(mapped.state.unfit_for_chunks(str(exc)))
            error = SyncError(
                f'table "{mapped.mapping.source}" cannot be copied in chunks: {exc}',
                hint="no action is needed: streamer copies the table again as a whole",
            )
            error.subject = mapped
            raise error from None
    return replace(lane_transaction, changes=changes)


def _is_unchanged(item: bytes) -> bool:
    return item[0] == KIND_UNCHANGED


def _read_items(data: bytes, position: int) -> tuple[list[bytes], int]:
    """Return the columns of a tuple, each with kind and length, and the end of the tuple.

    Raises ProtocolError.
    """
    items = []
    try:
        count = data[position] << 8 | data[position + 1]
        position += 2
        for _ in range(count):
            kind, end = data[position], position + 1
            if kind in (KIND_TEXT, KIND_BINARY):
                end += 4 + _length_at(data, end)[0]
            items.append(data[position:end])
            position = end
    except (IndexError, struct.error) as exc:
        raise ProtocolError("a row message is truncated") from exc
    return items, position
