"""Columns with facts about the last change of a row: the rule's ``metadata``.

streamer appends the values to the source's rows, as if the source had sent a relation with more
columns. Sets, exact order and both transports treat all values alike. The compiled implementation
appends the values to the messages of a transaction in one call. Pure, but for the clock of
`synced_at`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from streamer.apply.rows.copydata import commit_time_value, constant
from streamer.compiled import choice
from streamer.decode.pgoutput import (
    DELETE,
    INSERT,
    KEY_TUPLE,
    NEW_TUPLE,
    TRUNCATE,
    UPDATE,
    from_datetime,
)
from streamer.decode.tuples import KIND_BINARY, KIND_TEXT, KIND_UNCHANGED, MixedRow, Row, Value
from streamer.mapping.rule_options import MetadataKind

if TYPE_CHECKING:
    from streamer.apply.rows.fold import OrderedChange
    from streamer.decode.transactions import Transaction

_TUPLES_AT: Final = 5  # the offset after kind and relid
_NULL: Final = b"n"
_OPERATIONS: Final = {INSERT: "insert", UPDATE: "update", DELETE: "delete", TRUNCATE: "truncate"}


@dataclass(frozen=True, slots=True)
class RowMetadata:
    """The metadata of one plan: *kinds* of values after the *count* columns of the source."""

    kinds: tuple[MetadataKind, ...]
    count: int
    binary: bool
    key: frozenset[int] | None = None
    """Positions of the key, if deletes mark rows."""
    is_filtered: bool = False
    """A delete that marks a row stays a delete, with the metadata in its old row. Each update
    carries a time for the mark, because the target decides whether the row leaves the filter.
    """

    def _values(self, transaction: "Transaction", kind: int) -> list[Value]:
        null = constant(None, binary=self.binary)
        values = [self._value(transaction, kind, fact) for fact in self.kinds]
        return [null if value is None else value for value in values]

    def _value(self, transaction: "Transaction", kind: int, fact: MetadataKind) -> Value | None:
        binary = self.binary
        match fact:
            case MetadataKind.DELETED_AT if kind == INSERT:
                return None
            case MetadataKind.DELETED_AT if kind == UPDATE and not self.is_filtered:
                return None
            case MetadataKind.DELETED_AT:
                return commit_time_value(transaction.commit_time, binary)
            case MetadataKind.COMMITTED_AT:
                return commit_time_value(transaction.commit_time, binary)
            case MetadataKind.SYNCED_AT:
                return commit_time_value(from_datetime(datetime.now(UTC)), binary)
            case MetadataKind.LSN if binary:
                return constant(int(transaction.final_lsn), binary=True, int_size=8)
            case MetadataKind.LSN:
                return constant(str(transaction.final_lsn), binary=False)
            case MetadataKind.OPERATION:
                return constant(_OPERATIONS[kind], binary=binary)

    def _encoded(self, transaction: "Transaction", kind: int) -> bytes:
        """Return the values in the form of a tuple of pgoutput."""
        parts = []
        for value in (self._value(transaction, kind, fact) for fact in self.kinds):
            if value is None:
                parts.append(_NULL)
            elif self.binary:
                parts.append(bytes([KIND_BINARY]) + value)
            else:
                parts.append(bytes([KIND_TEXT]) + len(value).to_bytes(4, "big") + value)
        return b"".join(parts)

    def extend(self, transaction: "Transaction", payloads: list[bytes]) -> list[bytes] | None:
        """Return row messages with the values in each new row, and NULL in each old row.

        If deletes mark rows of a table with a filter, the old row of a delete has the values. A
        malformed message stays unchanged. Return None if a message is too large to copy: exact
        order then uses `extended_change`.
        """
        if not payloads:
            return payloads
        if self.key is not None and all(type(payload) is bytes for payload in payloads):
            mark = self._extend_deletes if self.is_filtered else self._mark
            payloads = mark(payloads, self._encoded(transaction, DELETE))
        tails = self._encoded(transaction, INSERT), self._encoded(transaction, UPDATE)
        if choice.compiled is not None:
            extended: list[bytes] | None = choice.compiled.extend(
                payloads, self.count, len(self.kinds), *tails
            )
            return extended
        if not all(type(payload) is bytes for payload in payloads):
            return None
        nulls = _NULL * len(self.kinds)
        return [self._extended(payload, *tails, nulls) for payload in payloads]

    def _extend_deletes(self, payloads: list[bytes], tail: bytes) -> list[bytes]:
        """Return each delete with *tail* in the old row, which is then too wide for `extend`."""
        return [
            self._extended(payload, b"", b"", tail) if payload[0] == DELETE else payload
            for payload in payloads
        ]

    def _mark(self, payloads: list[bytes], tail: bytes) -> list[bytes]:
        """Return each delete as an extended update, which changes no value of the source."""
        if choice.compiled is not None:
            flags = bytes(position in (self.key or ()) for position in range(self.count))
            marked: list[bytes] = choice.compiled.mark_deletes(
                payloads, flags, len(self.kinds), tail
            )
            return marked
        return [
            self._marking(payload, tail) if payload[0] == DELETE else payload
            for payload in payloads
        ]

    def _marking(self, payload: bytes, tail: bytes) -> bytes:
        """Return the update that replaces a delete; a malformed message stays unchanged."""
        try:
            end = self._end_of_tuple(payload, _TUPLES_AT + 1)
        except IndexError:
            end = None
        if end != len(payload):
            return payload
        width = (self.count + len(self.kinds)).to_bytes(2, "big")
        parts = [bytes([UPDATE]), payload[1:_TUPLES_AT]]
        is_whole = payload[_TUPLES_AT] != KEY_TUPLE
        if is_whole:
            parts += [payload[_TUPLES_AT : _TUPLES_AT + 1], width, payload[_TUPLES_AT + 3 :]]
            parts.append(_NULL * len(self.kinds))
        parts += [bytes([NEW_TUPLE]), width]
        position = _TUPLES_AT + 3
        for number in range(self.count):
            begin = position
            position += 1
            if payload[begin] in (KIND_TEXT, KIND_BINARY):
                position += 4 + int.from_bytes(payload[begin + 1 : begin + 5], "big")
            is_sent = is_whole or number in (self.key or ())
            parts.append(payload[begin:position] if is_sent else bytes([KIND_UNCHANGED]))
        parts.append(tail)
        return b"".join(parts)

    def _extended(self, payload: bytes, on_insert: bytes, on_update: bytes, in_old: bytes) -> bytes:
        kind = payload[0]
        if kind not in (INSERT, UPDATE, DELETE):
            return payload
        tail = on_insert if kind == INSERT else on_update
        parts = [payload[:_TUPLES_AT]]
        position = _TUPLES_AT
        try:
            while position < len(payload):
                end = self._end_of_tuple(payload, position + 1)
                if end is None or end > len(payload):
                    return payload
                more = tail if payload[position] == NEW_TUPLE else in_old
                count = (self.count + len(self.kinds)).to_bytes(2, "big")
                parts += [payload[position : position + 1], count, payload[position + 3 : end]]
                parts.append(more)
                position = end
        except IndexError:
            return payload
        return b"".join(parts)

    def _end_of_tuple(self, payload: bytes, position: int) -> int | None:
        if payload[position] << 8 | payload[position + 1] != self.count:
            return None
        position += 2
        for _ in range(self.count):
            if payload[position] in (KIND_TEXT, KIND_BINARY):
                position += 5 + int.from_bytes(payload[position + 1 : position + 5], "big")
            else:
                position += 1
        return position

    def extended_change(
        self, transaction: "Transaction", change: "OrderedChange"
    ) -> "OrderedChange":
        """Return a change whose new row also has the metadata values. A delete that marks a row
        gets a new row of NULLs, followed by these values.
        """
        if change.new is None and self.key is not None:
            nulls = [constant(None, binary=self.binary)] * self.count
            return replace(change, new=[*nulls, *self._values(transaction, change.kind)])
        if change.new is None:
            return change
        return replace(change, new=_longer(change.new, self._values(transaction, change.kind)))


def _longer(row: Row, values: Iterable[Value]) -> Row:
    if not isinstance(row, MixedRow):
        return [*row, *values]
    longer = MixedRow()
    longer.extend(row)
    longer.extend(values)
    longer.null_count, longer.unchanged_count = row.null_count, row.unchanged_count
    return longer
