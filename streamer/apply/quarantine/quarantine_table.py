"""Adds and reads rows of streamer.quarantine, in a transaction that writes changes."""

from typing import Any, Final

from streamer.apply.lanes.blocked_keys import (
    TRUNCATED,
    BlockedKeys,
    KeyColumns,
    Keys,
    values_of_stored,
)
from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.quarantine.equal_keys import EqualKeys
from streamer.apply.quarantine.removed_rows import RemovalAtSource, end_changes
from streamer.apply.rows.change_as_json import Emptied, Quarantined, from_json, to_json
from streamer.apply.write.target_transaction import TargetTransaction
from streamer.bookkeeping.quarantined_changes import (
    add_quarantined,
    read_quarantine_page,
    remove_quarantined,
)
from streamer.decode.pgoutput import to_datetime

INSERT_ROWS_MAX: Final = 1000
INSERT_BYTES_MAX: Final = 4 * 1024 * 1024


class QuarantineTable:
    """Writes and reads rows in *transaction*."""

    def __init__(self, transaction: TargetTransaction) -> None:
        self._transaction = transaction
        self._equal_keys = EqualKeys(transaction)

    async def read_keys(
        self, mapped: MappedRelation, columns: KeyColumns, *, before: int | None = None
    ) -> set[bytes]:
        """Return the keys, by *columns*, of rows in quarantine whose id is below *before*."""
        keys: set[bytes] = set()
        last = 0
        while rows := await read_quarantine_page(
            self._transaction.target, mapped.relation_id, last, before=before
        ):
            values = (
                values_of_stored(columns.names, from_json(row.old), from_json(row.new))
                for row in rows
            )
            for of_row in await self._equal_keys.keys(columns, values):
                keys.update(of_row)
            last = rows[-1].id
        return keys

    async def keys_of_pending(self, blocked: BlockedKeys, columns: KeyColumns) -> list[Keys]:
        """Return the keys, by *columns*, of the changes that are still to be written."""
        pending = (change for change in blocked.pending if isinstance(change, Quarantined))
        values = (values_of_stored(columns.names, row.old, row.new) for row in pending)
        return await self._equal_keys.keys(columns, values)

    async def flush(self, relations: dict[MappedRelation, BlockedKeys]) -> None:
        """Write the pending changes of each relation."""
        for mapped, blocked in relations.items():
            if blocked.is_emptied:
                blocked.change_count -= await remove_quarantined(
                    self._transaction.target, mapped.relation_id
                )
                blocked.is_emptied = False
            batch: list[Quarantined] = []
            for change in blocked.pending:
                if isinstance(change, Quarantined):
                    batch.append(change)
                    continue
                await self._insert(mapped, batch)
                blocked.change_count += len(batch)
                batch = []
                blocked.change_count += await self._empty(mapped, change)
            await self._insert(mapped, batch)
            blocked.change_count += len(batch)
            blocked.pending.clear()

    async def _insert(self, mapped: MappedRelation, changes: list[Quarantined]) -> None:
        rows: list[tuple[Any, ...]] = []
        size = 0
        for change in changes:
            row = (
                change.operation,
                to_json(change.key),
                to_json(change.old),
                to_json(change.new),
                change.definition.to_json(),
                str(change.transaction.final_lsn),
                to_datetime(change.transaction.commit_time),
                change.transaction.xid,
                change.error,
                change.code,
            )
            rows.append(row)
            size += sum(len(item) for item in row if isinstance(item, str))
            if len(rows) >= INSERT_ROWS_MAX or size >= INSERT_BYTES_MAX:
                await add_quarantined(self._transaction.target, mapped.relation_id, rows)
                rows, size = [], 0
        if rows:
            await add_quarantined(self._transaction.target, mapped.relation_id, rows)

    async def _empty(self, mapped: MappedRelation, emptied: Emptied) -> int:
        """Apply a TRUNCATE to the changes in quarantine; return the increase of their number."""
        at = emptied.transaction
        removal = RemovalAtSource(TRUNCATED, at.final_lsn, to_datetime(at.commit_time), at.xid)
        return await end_changes(self._transaction.target, mapped, removal)
