"""Changes as the rows of a staging table: whole ones for sets, one row a change for exact order.
Pure.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from typing import Final

from streamer.apply.rows.apply_plan import ApplyPlan, Identity
from streamer.apply.rows.copydata import commit_time_value, constant
from streamer.apply.rows.fold import OrderedChange, read_changes
from streamer.apply.sql.computed_statements import input_name
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
from streamer.postgres.binary_values import binary_text

_SHOWN_MAX: Final = 100
"""Characters of a key's value in a message."""
_OPS: Final = {INSERT: OP_INSERT, UPDATE: OP_UPDATE, DELETE: OP_DELETE}


@dataclass
class OrderedRun:
    """Changes of one relation under one definition, in order: (share number, transaction,
    payloads).
    """

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

    def describe(self, change_number: int) -> str:
        """Name the target table and the key of a change."""
        plan = self.plan
        payloads = chain.from_iterable(payloads for _, _, payloads in self.parts)
        change = next(read_changes(plan, islice(payloads, change_number, None)))
        row = change.new if change.new is not None else change.old
        table = f'target table "{plan.mapping.target}"'
        if row is None or plan.identity is not Identity.KEY:
            return table
        return f"{table}, {key_text(plan.key, _texts(plan, row))}"

    @cached_property
    def _positions(self) -> tuple[list[int], list[int]]:
        """The positions of staged values: of new rows, and of old ones."""
        plan = self.plan
        old = [column.position for column in plan.staged_key]
        return _new_positions(plan), old + [i.position for i in plan.old_inputs]

    def key_of(self, change_number: int) -> str | None:
        """Name the row of change *change_number*."""
        plan = self.plan
        if plan.identity is not Identity.KEY:
            return None
        change = self._change(change_number)
        if change is None:
            return None
        row = change.old if change.old is not None else change.new
        return None if row is None else key_text(plan.key, _texts(plan, row))

    def invalid_text(self, change_number: int) -> str | None:
        """Name the column of change *change_number* whose text is not, or cannot be, UTF-8.

        In binary the server's COPY names it.
        """
        change = None if self.plan.binary else self._change(change_number)
        rows = () if change is None else (change.new, change.old)
        for row in rows:
            for column in self.plan.source_columns:
                if row is not None and not _is_utf8(row[column.position]):
                    return column.name
        return None

    def _change(self, number: int) -> OrderedChange | None:
        for _, _, payloads in self.parts:
            if number < len(payloads):
                (change,) = read_changes(self.plan, [payloads[number]])
                return change
            number -= len(payloads)
        return None

    def origin_of(self, number: int) -> tuple[Transaction, int] | None:
        """Return the transaction of change *number*, and the kind of its message."""
        for _, transaction, payloads in self.parts:
            if number < len(payloads):
                return transaction, payloads[number][0]
            number -= len(payloads)
        return None

    def key_texts(self, change_number: int) -> dict[str, str | None] | None:
        """Return the key of change *change_number* by the source's names of its columns."""
        change = self._change(change_number) if self.plan.identity is Identity.KEY else None
        if change is None:
            return None
        row = change.old if change.old is not None else change.new
        columns = self.plan.relation.columns
        names = (columns[column.position].name for column in self.plan.key)
        return None if row is None else dict(zip(names, _texts(self.plan, row), strict=True))

    def share_number(self, change_number: int) -> int | None:
        """Return the number of the share that change *change_number* belongs to."""
        for number, _, payloads in self.parts:
            if change_number < len(payloads):
                return number
            change_number -= len(payloads)
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
    """Yield the values of the key as text; of a type without a text here, in hexadecimal."""
    for column in plan.key:
        value = row[column.position]
        if value is NULL or value is NULL_BINARY:
            yield None
        elif plan.binary:
            type_oid = plan.relation.columns[column.position].type_oid
            yield binary_text(bytes(value)[4:], type_oid)[:_SHOWN_MAX]
        else:
            yield bytes(value).decode("utf-8", "backslashreplace")[:_SHOWN_MAX]


def _new_positions(plan: ApplyPlan) -> list[int]:
    """Return where the values are that are staged of a new row."""
    return [c.position for c in plan.plain_columns] + [i.position for i in plan.inputs]


def _masked(values: list[Value], binary: bool) -> Row:
    """Return *values* behind their mask, NULL where they are unchanged."""
    letters = "".join("u" if value is UNCHANGED else "." for value in values)
    null = constant(None, binary=binary)
    return [
        constant(letters, binary=binary),
        *(null if value is UNCHANGED else value for value in values),
    ]


def masked_rows(plan: ApplyPlan, rows: Iterable[PendingRow]) -> Iterator[Row]:
    """Yield rows that may lack values as they are staged: all new values behind a mask."""
    positions = _new_positions(plan)
    for row in rows:
        assert not isinstance(row, bytes), "a whole row"
        yield _masked([row[position] for position in positions], plan.binary)


def staged_values(
    plan: ApplyPlan, statements: Statements, unchanged: frozenset[int]
) -> tuple[list[str], tuple[int, ...]]:
    """Return the staging columns of a new row without *unchanged*, and where their values are."""
    columns = [c for c in plan.plain_columns if c.position not in unchanged]
    names = [statements.new(column) for column in columns]
    positions = [column.position for column in columns]
    for n, source in enumerate(plan.inputs):
        if source.position not in unchanged:
            names.append(input_name(n))
            positions.append(source.position)
    return names, tuple(positions)
