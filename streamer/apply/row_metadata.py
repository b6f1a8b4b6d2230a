"""Columns that tell where a row of the target comes from: the rule's ``metadata``.

The values are appended to the source's rows, as if the source had sent a relation with more
columns. All that follows treats them like any other value: sets, exact order, both transports. The
compiled implementation appends them to the messages of a transaction in one call. Pure, but for the
clock of `synced_at`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from streamer.apply.sql.copydata import commit_time_value, constant
from streamer.decode.pgoutput import DELETE, INSERT, NEW_TUPLE, UPDATE, from_datetime
from streamer.decode.tuples import KIND_BINARY, KIND_TEXT, MixedRow, Row, Value
from streamer.hot import choice
from streamer.mapping.rules import MetadataKind

if TYPE_CHECKING:
    from streamer.apply.fold import OrderedChange
    from streamer.decode.transactions import Transaction

_TUPLES_AT: Final = 5  # behind kind and relid
_NULL: Final = b"n"
_OPERATIONS: Final = {INSERT: "insert", UPDATE: "update"}


@dataclass(frozen=True, slots=True)
class RowMetadata:
    """The metadata of one plan: *kinds* of values behind the *count* columns of the source."""

    kinds: tuple[MetadataKind, ...]
    count: int
    binary: bool

    def _values(self, transaction: "Transaction", kind: int) -> list[Value]:
        return [self._value(transaction, kind, wanted) for wanted in self.kinds]

    def _value(self, transaction: "Transaction", kind: int, wanted: MetadataKind) -> Value:
        binary = self.binary
        match wanted:
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
        """Return the values as they stand in a tuple of pgoutput."""
        values = self._values(transaction, kind)
        if self.binary:
            return b"".join(bytes([KIND_BINARY]) + value for value in values)
        return b"".join(
            bytes([KIND_TEXT]) + len(value).to_bytes(4, "big") + value for value in values
        )

    def extend(self, transaction: "Transaction", payloads: list[bytes]) -> list[bytes] | None:
        """Return row messages with the values in each new row, and NULL in each old one.

        A malformed message stays as it is. Return None if a message is too large to copy: exact
        order then takes `extended_change`.
        """
        if not payloads:
            return payloads
        tails = self._encoded(transaction, INSERT), self._encoded(transaction, UPDATE)
        if choice.compiled is not None:
            found: list[bytes] | None = choice.compiled.extend(
                payloads, self.count, len(self.kinds), *tails
            )
            return found
        if not all(type(payload) is bytes for payload in payloads):
            return None
        return [self._extended(payload, *tails) for payload in payloads]

    def _extended(self, payload: bytes, on_insert: bytes, on_update: bytes) -> bytes:
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
                more = tail if payload[position] == NEW_TUPLE else _NULL * len(self.kinds)
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
        """Return one change with the values in its new row."""
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
