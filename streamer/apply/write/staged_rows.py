"""Changes as rows of a staging table: whole rows for sets, or a row per change in order. Pure."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, TypeVar

from streamer.apply.rows.apply_plan import ApplyPlan, Identity
from streamer.apply.rows.copydata import (
    Copy,
    RowLayout,
    commit_time_value,
    constant,
    encode_rows,
)
from streamer.apply.rows.fold import OrderedChange, read_changes
from streamer.apply.sql.ordered_statements import Statements
from streamer.apply.sql.set_statements import (
    OP_DELETE,
    OP_INSERT,
    OP_TRUNCATE,
    OP_TRUNCATE_RESTART,
    OP_UPDATE,
)
from streamer.apply.write.rejection_advice import key_text
from streamer.decode.pgoutput import DELETE, INSERT, UPDATE
from streamer.decode.text_conversion import UnconvertedText
from streamer.decode.transactions import Transaction
from streamer.decode.tuples import (
    NULL,
    NULL_BINARY,
    UNCHANGED,
    PendingRow,
    Row,
    Value,
    is_partial,
)
from streamer.errors.error_classes import RowTooLargeError, StreamerError, TextEncodingError
from streamer.postgres.binary_values import binary_text

T = TypeVar("T")

_SHOWN_MAX: Final = 100
"""Characters of a key's value in a message."""
_OPS: Final = {INSERT: OP_INSERT, UPDATE: OP_UPDATE, DELETE: OP_DELETE}


@dataclass
class OrderedRun:
    """Changes of a relation under a definition, in order."""

    plan: ApplyPlan
    parts: list[tuple[int, Transaction, list[bytes]]] = field(default_factory=list)
    is_partial: bool = False

    def rows(self) -> Iterator[Row]:
        number = 0
        for _, transaction, payloads in self.parts:
            for change in read_changes(self.plan, payloads):
                yield self.row(number, transaction, change)
                number += 1

    def row(self, number: int, transaction: Transaction, change: OrderedChange) -> Row:
        plan, binary = self.plan, self.plan.binary
        at = commit_time_value(transaction.commit_time, binary)
        if plan.metadata is not None:
            change = plan.metadata.extended_change(transaction, change)
        null = constant(None, binary=binary)
        op = _OPS.get(change.kind, OP_TRUNCATE_RESTART if change.restarts else OP_TRUNCATE)
        mask = null
        new_positions, old_positions = self._positions
        new = [null] * len(new_positions)
        if change.new is not None:
            new = [change.new[position] for position in new_positions]
            if is_partial(change.new):
                self.is_partial = True
                mask, *new = _masked(new, binary)
        old = [null] * len(old_positions)
        finds = change.old if change.old is not None else change.new
        if finds is not None and op != OP_INSERT and plan.identity is not Identity.NONE:
            old = [finds[position] for position in old_positions]
        return [
            constant(number, binary=binary),
            constant(op, binary=binary, int_size=2),
            mask,
            at,
            *old,
            *new,
        ]

    @cached_property
    def _positions(self) -> tuple[list[int], list[int]]:
        """The positions of staged values: of new rows, and of old rows."""
        plan = self.plan
        new = [column.position for column in plan.plain_columns]
        old = [column.position for column in plan.staged_key]
        return new + [i.position for i in plan.inputs], old + [i.position for i in plan.old_inputs]

    def locate(self, error: StreamerError) -> None:
        """Add the change to *error*, if *error* has the number of a change."""
        number = error.change_number
        place = None if number is None else self._place(number)
        if number is None or place is None:
            return
        error.transaction_number = place[0]
        key = self.key_of(number)
        if isinstance(error, RowTooLargeError):
            table = f': target table "{self.plan.mapping.target}"'
            error.message += table if key is None else f"{table}, {key}"
        if isinstance(error, TextEncodingError):
            error.column = error.column or self.invalid_text(number)
        error.key = error.key or key

    def origin_of(self, number: int) -> tuple[Transaction, int] | None:
        """Return the transaction and the message kind of change *number*."""
        place = self._place(number)
        return None if place is None else (place[1], place[2][0])

    def key_of(self, number: int) -> str | None:
        """Return the key of change *number* as text for messages, if known."""
        row = self._key_row(number)
        return None if row is None else key_text(self.plan.key, _texts(self.plan, row))

    def key_texts(self, number: int) -> dict[str, str | None] | None:
        """Return the key of change *number* by the source's column names."""
        row, columns = self._key_row(number), self.plan.relation.columns
        names = (columns[column.position].name for column in self.plan.key)
        return None if row is None else dict(zip(names, _texts(self.plan, row), strict=True))

    def invalid_text(self, number: int) -> str | None:
        """Name the column of change *number* whose text is not, or cannot become, UTF-8.

        In binary the server's COPY names the column.
        """
        change = None if self.plan.binary else self._change(number)
        rows = () if change is None else (change.new, change.old)
        for row in rows:
            for column in self.plan.source_columns:
                if row is not None and not _is_utf8(row[column.position]):
                    return column.name
        return None

    def _key_row(self, number: int) -> Row | None:
        """Return the row that contains the key of change *number*; None if rows have no key."""
        change = self._change(number) if self.plan.identity is Identity.KEY else None
        if change is None:
            return None
        return change.old if change.old is not None else change.new

    def _change(self, number: int) -> OrderedChange | None:
        place = self._place(number)
        return None if place is None else next(read_changes(self.plan, [place[2]]))

    def _place(self, number: int) -> tuple[int, Transaction, bytes] | None:
        """Return the number of the lane transaction, the transaction and the message of change
        *number*.
        """
        for transaction_number, transaction, payloads in self.parts:
            if number < len(payloads):
                return transaction_number, transaction, payloads[number]
            number -= len(payloads)
        return None


def _is_utf8(value: Value) -> bool:
    if isinstance(value, UnconvertedText):
        return value.missing() is None
    if not isinstance(value, bytes):
        return True
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _texts(plan: ApplyPlan, row: Row) -> Iterator[str | None]:
    """Yield the values of the key as text; of types unknown to `binary_text`, in hexadecimal."""
    for column in plan.key:
        value = row[column.position]
        if value is NULL or value is NULL_BINARY:
            yield None
        elif plan.binary:
            type_oid = plan.relation.columns[column.position].type_oid
            yield binary_text(bytes(value)[4:], type_oid)[:_SHOWN_MAX]
        else:
            yield bytes(value).decode("utf-8", "backslashreplace")[:_SHOWN_MAX]


def _masked(values: list[Value], binary: bool) -> Row:
    """Return *values* after a mask; an unchanged value becomes NULL."""
    letters = "".join("u" if value is UNCHANGED else "." for value in values)
    null = constant(None, binary=binary)
    return [
        constant(letters, binary=binary),
        *(null if value is UNCHANGED else value for value in values),
    ]


def staged_rows(
    statements: Statements,
    op: int,
    columns: Iterable[str],
    rows: Iterable[Any],
    positions: tuple[int, ...] | None = None,
) -> Copy:
    """Stage *rows* as *op*: the values at *positions*, or all values."""
    plan = statements.plan
    names = ["op", *columns]
    count = len(names) - 1 if positions is None else plan.row_width
    prefix = (constant(op, binary=plan.binary, int_size=2),)
    layout = RowLayout(count, plan.binary, positions, prefix)
    return Copy(statements.stage, names, encode_rows(rows, layout), plan.binary)


def staged_keys(statements: Statements, op: int, keys: Collection[Any]) -> Copy:
    columns = map(statements.new, statements.plan.key)
    return staged_rows(statements, op, columns, _key_rows(statements.plan, in_order(keys)))


def numbered_keys(statements: Statements, op: int, keys: Sequence[Any]) -> Copy:
    """Stage *keys* of a fold, each after a number."""
    plan = statements.plan
    columns = ["seq", *map(statements.new, plan.key)]
    numbered = (
        [constant(number, binary=plan.binary), *key]
        for number, key in enumerate(_key_rows(plan, keys))
    )
    return staged_rows(statements, op, columns, numbered)


def marking_rows(statements: Statements, op: int, removed: Mapping[Any, Row | None]) -> Copy:
    """Stage removed keys with the values that mark rows as deleted."""
    plan = statements.plan
    staged = plan.key + plan.metadata_columns
    positions = tuple(column.position for column in staged)
    rows = in_order_of_keys(removed)
    return staged_rows(statements, op, map(statements.new, staged), rows, positions)


def whole_rows(statements: Statements, op: int, rows: Iterable[PendingRow]) -> Copy:
    columns, positions = statements.new_values
    return staged_rows(statements, op, columns, rows, positions)


def partial_rows(statements: Statements, op: int, rows: Iterable[PendingRow]) -> Copy:
    """Stage rows that may lack values."""
    columns, positions = statements.new_values
    masked = _masked_rows(rows, positions, statements.plan.binary)
    return staged_rows(statements, op, ["mask", *columns], masked)


def moved_rows(statements: Statements, op: int, moves: Collection[tuple[Any, PendingRow]]) -> Copy:
    """Stage rows with a new key, each with the old key."""
    plan = statements.plan
    columns, positions = statements.new_values
    masked = _masked_rows((row for _, row in moves), positions, plan.binary)
    origins = _key_rows(plan, (origin for origin, _ in moves))
    rows = (
        [mask, *origin, *values] for (mask, *values), origin in zip(masked, origins, strict=True)
    )
    old = map(statements.old, plan.key)
    return staged_rows(statements, op, ["mask", *old, *columns], rows)


def inserted_rows(statements: Statements, rows: Iterable[PendingRow]) -> Copy:
    """Insert rows into the target table."""
    plan = statements.plan
    prefix = () if plan.sid is None else (constant(plan.sid, binary=plan.binary),)
    layout = RowLayout(plan.row_width, plan.binary, plan.positions, prefix)
    name = plan.target.name
    chunks = encode_rows(rows, layout)
    return Copy(name.name, statements.insert_columns, chunks, plan.binary, name.namespace)


def in_order(keys: Collection[Any]) -> Collection[Any]:
    """Return *keys* in an order that makes index lookups at the target faster.

    Neighbours in an index are often neighbours in memory: in index order, writes cost the target's
    backend a third to a half less. Keys that cannot be compared, such as large values, keep their
    order.
    """
    try:
        return sorted(keys)
    except TypeError:
        return keys


def in_order_of_keys(changes: Mapping[Any, T]) -> list[T]:
    return list(map(changes.__getitem__, in_order(changes)))


def _key_rows(plan: ApplyPlan, keys: Iterable[Any]) -> Iterable[Any]:
    """Return *keys* of a fold as rows."""
    return ([key] for key in keys) if len(plan.key) == 1 else keys


def _masked_rows(
    rows: Iterable[PendingRow], positions: Sequence[int], binary: bool
) -> Iterator[Row]:
    """Yield the values of rows at *positions*, each row after a mask."""
    for row in rows:
        assert not isinstance(row, bytes), "a whole row"
        yield _masked([row[position] for position in positions], binary)
