"""Changes in flight, with keys and with values as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from streamer.apply.lanes.blocked_keys import KeyColumns, Keys, values_of_change
from streamer.apply.quarantine.equal_keys import EqualKeys
from streamer.apply.rows.apply_plan import ApplyPlan, PlanColumn
from streamer.apply.rows.binary_transfer import TEXTUAL
from streamer.apply.rows.change_as_json import (
    EndedTransaction,
    Quarantined,
    binary_text,
    quarantined,
)
from streamer.apply.rows.copydata import Copy, RowLayout, constant, encode_rows
from streamer.apply.rows.fold import OrderedChange, read_changes
from streamer.apply.sql.wide_rows import PART_COLUMNS_MAX
from streamer.apply.write.target_transaction import TargetTransaction
from streamer.decode.transactions import Transaction
from streamer.decode.tuples import NULL, UNCHANGED, Row
from streamer.errors.error_classes import StreamerError

_PLAIN_TYPES_SQL: Final = """
select pg_catalog.format_type(t.oid::oid, -1) as kind
from unnest($1::int8[]) with ordinality t (oid, n) order by n
"""


@dataclass(slots=True)
class Item:
    """A change in flight. ``text``: the change in text transport. ``place``: the numbers of the
    transaction and of the change.
    """

    place: tuple[int, int]
    transaction: Transaction
    change: OrderedChange
    text: OrderedChange
    keys: Keys

    @property
    def ended_at(self) -> datetime | None:
        """The time at which the source ended all versions that the change writes; None if the
        versions are open.
        """
        transaction = self.transaction
        return transaction.ended_at if isinstance(transaction, EndedTransaction) else None

    def quarantined(self, plan: ApplyPlan, error: str, code: str | None) -> Quarantined:
        """Return the row in quarantine that keeps this change, rejected with *error*."""
        return quarantined(plan, self.text, self.transaction, self.place, error, code)


class ItemReader:
    """Reads changes. The server converts binary values, in *transaction*."""

    def __init__(self, transaction: TargetTransaction) -> None:
        self._transaction = transaction
        self._equal_keys = EqualKeys(transaction)

    async def read(
        self, plan: ApplyPlan, transaction: Transaction, number: int, payloads: list[bytes]
    ) -> list[Item]:
        changes = list(read_changes(plan, payloads))
        texts = await self._texts(plan, changes, number) if plan.binary else changes
        keys = await self._equal_keys.keys(
            KeyColumns.of(plan), (values_of_change(plan, text) for text in texts)
        )
        return [
            Item((number, n), transaction, change, text, of_change)
            for n, (change, text, of_change) in enumerate(zip(changes, texts, keys, strict=True))
        ]

    async def _texts(
        self, plan: ApplyPlan, changes: list[OrderedChange], number: int
    ) -> list[OrderedChange]:
        """Convert binary values to text; only values of textual types need no query.

        The bytes of a text are equal in both transports. The server may reject a text because of
        the encoding, and would then reject the conversion, too.
        """
        rows = [row for change in changes for row in (change.old, change.new) if row is not None]
        texts: list[Row] = [[NULL] * len(row) for row in rows]
        converted = []
        for column in plan.source_columns:
            if column.target.type_oid in TEXTUAL:
                for row, text in zip(rows, texts, strict=True):
                    text[column.position] = binary_text(row[column.position])
            else:
                converted.append(column)
        try:
            for start in range(0, len(converted) if rows else 0, PART_COLUMNS_MAX):
                part = converted[start : start + PART_COLUMNS_MAX]
                for column, values in zip(part, await self._column_texts(rows, part), strict=True):
                    for row, text, value in zip(rows, texts, values, strict=True):
                        if row[column.position] is UNCHANGED:
                            text[column.position] = UNCHANGED
                        elif value is not None:
                            text[column.position] = value.encode()
        except StreamerError as exc:
            exc.transaction_number = number
            raise
        following = iter(texts)
        return [
            OrderedChange(
                change.kind,
                None if change.old is None else next(following),
                None if change.new is None else next(following),
            )
            for change in changes
        ]

    async def _column_texts(
        self, rows: list[Row], columns: Sequence[PlanColumn]
    ) -> list[Sequence[str | None]]:
        """Return the text of some columns of binary *rows*, column by column."""
        # The casts omit type modifiers, because a modifier may be the reason for a rejection.
        oids = [column.target.type_oid for column in columns]
        target = self._transaction.target
        kinds = await target.fetch(_PLAIN_TYPES_SQL, oids)
        names = [f"c_{n}" for n in range(len(columns))]
        listed = ", ".join(f"{n} {row['kind']}" for n, row in zip(names, kinds, strict=True))
        await target.execute(
            "drop table if exists pg_temp.streamer_text; "
            f"create temporary table streamer_text ({listed})"
        )
        null = constant(None, binary=True)
        items = (
            [null if row[c.position] is UNCHANGED else row[c.position] for c in columns]
            for row in rows
        )
        chunks = encode_rows(items, RowLayout(len(names), binary=True))
        await self._transaction.copy(Copy("streamer_text", names, chunks, binary=True))
        texts = ", ".join(f"{name}::text" for name in names)
        # Rows come in the order of the COPY, because no other statement has changed this table.
        texts_read = await self._transaction.target.fetch(
            f"select {texts} from pg_temp.streamer_text order by ctid"
        )
        await target.execute("drop table pg_temp.streamer_text")
        return list(zip(*(row.values() for row in texts_read), strict=True))
