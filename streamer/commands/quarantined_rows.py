"""``streamer quarantine``: lists quarantined changes, and stores requests to retry or drop them.

`retry` and `drop` are requests like ``pause`` and ``resume``. A running process carries out a
request at once, in order with the changes of the table; a stopped process at the next start.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from streamer.apply.rows.change_as_json import Values, from_json
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import installed
from streamer.bookkeeping.quarantined_changes import (
    QuarantinedChange,
    read_oldest_quarantined,
    read_quarantined,
)
from streamer.bookkeeping.relation_records import RelationRecord
from streamer.bookkeeping.requests import make_request
from streamer.bookkeeping.sources import SourceRecord
from streamer.commands.table_requests import command_actor, read_matching
from streamer.commands.terminal_table import Listing, ListingColumn
from streamer.errors.error_classes import MappingError
from streamer.mapping.relation_names import parse_relation
from streamer.target.connection import TargetAddress


@dataclass(frozen=True, slots=True)
class Choice:
    """The selected rows; all rows without a selection."""

    table: str | None = None
    database: str | None = None
    sid: str | None = None
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class QuarantinedRow:
    """A change in ``quarantine list --json``."""

    id: int
    database: str
    sid: str | None
    table: str
    operation: str
    key: Values | None
    old: Values | None
    new: Values | None
    lsn: str
    commit_time: str
    xid: int
    error: str
    code: str | None
    quarantined_at: str
    retried_at: str | None


async def _relations(
    bookkeeping: Bookkeeping, choice: Choice
) -> dict[int, tuple[SourceRecord, RelationRecord]]:
    """Return the chosen relations by id. Raises MappingError if no relation matches."""
    pattern = None if choice.table is None else parse_relation(choice.table, "public")
    meant = await read_matching(bookkeeping, pattern, choice.database, choice.sid)
    if not meant:
        name = "no table" if choice.table is None else f'no table "{choice.table}"'
        raise MappingError(f"{name} is streamed", hint="`streamer status` lists the tables")
    return {relation.relation_id: (source, relation) for source, relation in meant}


async def read_rows(address: TargetAddress, choice: Choice, limit: int) -> list[QuarantinedRow]:
    """Return the oldest changes in quarantine, at most *limit*."""
    async with installed(address, "streamer quarantine") as bookkeeping:
        relations = await _relations(bookkeeping, choice)
        changes = await read_oldest_quarantined(bookkeeping, list(relations), limit)
    return [_quarantined_row(change, *relations[change.relation_id]) for change in changes]


async def count_rows(address: TargetAddress, choice: Choice) -> int:
    """Return how many changes are in quarantine."""
    async with installed(address, "streamer quarantine") as bookkeeping:
        relations = await _relations(bookkeeping, choice)
    return sum(relation.quarantined for _, relation in relations.values())


def _quarantined_row(
    change: QuarantinedChange, source: SourceRecord, relation: RelationRecord
) -> QuarantinedRow:
    return QuarantinedRow(
        id=change.id,
        database=source.database,
        sid=source.sid,
        table=relation.source,
        operation=change.operation,
        key=from_json(change.key),
        old=from_json(change.old),
        new=from_json(change.new),
        lsn=str(change.lsn),
        commit_time=change.commit_time.isoformat(),
        xid=change.xid,
        error=change.error,
        code=change.code,
        quarantined_at=change.quarantined_at.isoformat(),
        retried_at=None if change.retried_at is None else change.retried_at.isoformat(),
    )


async def request_action(
    address: TargetAddress, action: str, choice: Choice, actor: str | None = None
) -> dict[int, tuple[str, int]]:
    """Request `retry` or `drop` for the chosen changes; return the table and the number of changes
    by the id of each request.

    *actor*: the operator, for the audit; by default the user of the command line.

    Raises MappingError for a number without a change in quarantine.
    """
    async with installed(address, "streamer quarantine") as bookkeeping:
        relations = await _relations(bookkeeping, choice)
        chosen: dict[int, list[int] | None]
        if choice.ids:
            chosen = await _by_relation(bookkeeping, choice.ids, relations)
        else:
            chosen = {key: None for key, (_, relation) in relations.items() if relation.quarantined}
        requested = {}
        for relation_id, ids in chosen.items():
            options = {} if ids is None else {"ids": ids}
            number = await make_request(
                bookkeeping,
                relation_id,
                f"quarantine_{action}",
                options,
                actor=actor or command_actor(),
            )
            source, relation = relations[relation_id]
            count = relation.quarantined if ids is None else len(ids)
            requested[number] = f"{source.label} {relation.source}", count
    return requested


async def _by_relation(
    bookkeeping: Bookkeeping, ids: tuple[int, ...], relations: dict[int, Any]
) -> dict[int, list[int] | None]:
    changes = await read_quarantined(bookkeeping, ids)
    relation_ids = {c.id: c.relation_id for c in changes if c.relation_id in relations}
    if unknown := [number for number in ids if number not in relation_ids]:
        raise MappingError(
            f"no change in quarantine has the number {unknown[0]}",
            hint="`streamer quarantine list` shows them",
        )
    by_relation: dict[int, list[int] | None] = {}
    for number, relation_id in relation_ids.items():
        numbers = by_relation.setdefault(relation_id, [])
        assert numbers is not None
        numbers.append(number)
    return by_relation


def _shown(values: Values | None) -> Iterator[str]:
    for name, value in (values or {}).items():
        text = json.dumps(value, ensure_ascii=False)
        yield f"{name}={text if len(text) <= 60 else text[:57] + '…'}"


LISTING: Final[Listing[QuarantinedRow]] = Listing(
    "rows",
    (
        ListingColumn("id", lambda row: row.id, is_number=True),
        ListingColumn(
            "table", lambda row: row.table if row.sid is None else f"{row.sid} {row.table}"
        ),
        ListingColumn("operation", lambda row: row.operation),
        ListingColumn("row", lambda row: " ".join(_shown(row.new if row.key is None else row.key))),
        ListingColumn("committed", lambda row: row.commit_time),
        ListingColumn("error", lambda row: row.error),
    ),
    "no changes are in quarantine",
)
