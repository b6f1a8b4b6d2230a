"""Ends changes in quarantine whose rows the source removed together, by TRUNCATE or as a partition.

A TRUNCATE concerns all changes. A detached or dropped partition concerns the changes within its
bounds. The target evaluates the condition for the partition's rows on the values of each change. A
change with unclear values stops the table, because a retry could write a row of the partition.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.rows.change_as_json import from_json
from streamer.bookkeeping.quarantined_changes import (
    QuarantinedChange,
    count_quarantined,
    end_quarantined,
    mark_quarantined,
    read_quarantine_page,
    remove_quarantined,
)
from streamer.errors.error_classes import Retry, StreamerError, TargetSchemaError
from streamer.errors.remedies import Remedy, run
from streamer.mapping.rule_options import TableType
from streamer.postgres.quoting import quote_identifier
from streamer.schema.partitions import PartitionRows
from streamer.schema.target_relation import TargetRelation
from streamer.target.catalog import read_collations
from streamer.target.connection import TargetConnection, transaction
from streamer.util.lsn import Lsn

LEFT: Final = "the source detached or dropped the row's partition while changes were in quarantine"
NO_XID: Final = 0
"""A message about a definition does not contain the number of its transaction."""


@dataclass(frozen=True, slots=True)
class RemovalAtSource:
    """The reason of the removal. ``lsn``, ``at`` and ``xid`` belong to the transaction at the
    source.
    """

    reason: str
    lsn: Lsn
    at: datetime
    xid: int = NO_XID


async def end_changes(
    target: TargetConnection,
    mapped: MappedRelation,
    removal: RemovalAtSource,
    ids: Sequence[int] | None = None,
) -> int:
    """Apply a removal to changes in quarantine: to the changes *ids*, or to all.

    Return the increase of the number of changes in quarantine.
    """
    mapping, relation_id = mapped.mapping, mapped.relation_id
    if mapping.type is TableType.HISTORY:
        await end_quarantined(target, relation_id, removal.at, ids)
        return 0
    if mapping.rule.deleted_at is not None:
        return await mark_quarantined(
            target, relation_id, removal.lsn, removal.at, removal.xid, removal.reason, ids
        )
    return -await remove_quarantined(target, relation_id, ids)


async def end_partitions(
    target: TargetConnection,
    mapped: MappedRelation,
    table: TargetRelation,
    leaving: Sequence[PartitionRows],
    removal: RemovalAtSource,
) -> int:
    """Apply the removal of the partitions *leaving* to changes in quarantine of their rows.

    *table*: the target table, with the column names that *leaving* uses. Return the increase of the
    number of changes. Raises TargetSchemaError for a change that may belong to *leaving*.
    """
    if not await count_quarantined(target, mapped.relation_id):
        return 0
    count = 0
    for rows in leaving:
        if rows.unclear is not None:
            raise _unclear(mapped, rows, "changes in quarantine", rows.unclear, ())
        judge = await _Judge.of(target, mapped, table, rows)
        ids: list[int] = []
        last = 0
        while page := await read_quarantine_page(target, mapped.relation_id, last):
            last = page[-1].id
            ids += await judge.choose(page)
        if ids:
            count += await end_changes(target, mapped, removal, ids)
    return count


@dataclass(frozen=True, slots=True)
class _Judge:
    target: TargetConnection
    mapped: MappedRelation
    rows: PartitionRows
    sql: str

    @classmethod
    async def of(
        cls,
        target: TargetConnection,
        mapped: MappedRelation,
        table: TargetRelation,
        rows: PartitionRows,
    ) -> "_Judge":
        """Make the statement that chooses changes: values compare as the target's columns do."""
        names = [mapped.mapping.target_column(column) or "" for column in rows.columns]
        collations = await read_collations(target, table, names)
        values = ", ".join(
            f"(c.document::json ->> {number})::{table.columns[name].plain_type}"
            f"{collations.get(name, '')} as {quote_identifier(name)}"
            for number, name in enumerate(names)
        )
        sql = (
            "select c.id from unnest($1::int8[], $2::text[]) c (id, document) "
            f"where (select {rows.condition} from (select {values}) r)"
        )
        return cls(target, mapped, rows, sql)

    async def choose(self, changes: Sequence[QuarantinedChange]) -> list[int]:
        """Return the numbers of the *changes* that concern the partition's rows."""
        ids = [change.id for change in changes]
        documents = [json.dumps(self._values(change)) for change in changes]
        try:
            async with transaction(self.target):
                return [row["id"] for row in await self.target.fetch(self.sql, ids, documents)]
        except StreamerError as exc:
            if exc.retry is Retry.TIMED or self.target.is_closed:
                raise
            if len(changes) == 1:
                raise self._unclear(changes[0], exc.message) from exc
        return [number for change in changes for number in await self.choose([change])]

    def _values(self, change: QuarantinedChange) -> list[str | None]:
        """Return the values of the partition key, which old and new row share.

        The stream sends an UPDATE that moves a row between partitions as a DELETE and an INSERT.
        """
        for values in (from_json(change.new), from_json(change.old)):
            if values is not None and values.keys() >= set(self.rows.columns):
                return [values[column] for column in self.rows.columns]
        raise self._unclear(change, "the change lacks a value of the partition key")

    def _unclear(self, change: QuarantinedChange, reason: str) -> TargetSchemaError:
        only = ("--id", str(change.id))
        return _unclear(self.mapped, self.rows, f"change {change.id} in quarantine", reason, only)


def _unclear(
    mapped: MappedRelation, rows: PartitionRows, changes: str, reason: str, only: Sequence[str]
) -> TargetSchemaError:
    table, place = str(mapped.mapping.source), mapped.source
    retry = run("quarantine retry", table, *only, database=place.database, sid=place.sid)
    drop = run("quarantine drop", table, *only, "--yes", database=place.database, sid=place.sid)
    return TargetSchemaError(
        f'{changes} may belong to rows of former partition "{rows.partition}": {reason}',
        hint=Remedy.of("to apply changes, run: ", retry, "; to drop changes, run: ", drop),
    )
