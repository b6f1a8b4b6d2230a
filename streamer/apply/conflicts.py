"""Conflicts: changes whose row the target lacks, or has already, noted in ``streamer.conflict``.

The transaction that applies a change notes its conflict, so each one is there exactly once. Nothing
is looked up before a conflict happens. A writer that counts fewer rows than it changed, or whose
block in exact order does not find one, raises `ConflictsFound`. The caller rolls back and writes
the same window again. From then on the writer looks for missing rows of that table before it
changes them, until `WATCHED_WINDOWS` windows had no conflict.

A change that the target refuses stops its table or goes into quarantine. The transaction that
stores the quarantined change notes its conflict. The conflict of a table that stops is stored with
the state of the table, once for the change.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol

from streamer.apply.fold import read_changes
from streamer.apply.lane import MappedRelation
from streamer.apply.lane_window import LaneWindow
from streamer.apply.plan import ApplyPlan
from streamer.decode.pgoutput import DELETE, INSERT, UPDATE, to_datetime
from streamer.decode.transactions import Transaction

WATCHED_WINDOWS: Final = 100
"""So many windows without a conflict end the search for missing rows."""
NOTED_MAX: Final = 1000
"""Conflicts of one table that a window notes; the metric counts the others, too."""

UPDATE_MISSING: Final = "update_missing"
DELETE_MISSING: Final = "delete_missing"
RESOLUTIONS: Final = {UPDATE_MISSING: "inserted", DELETE_MISSING: "ignored"}
STOPPED: Final = "stopped"
QUARANTINED: Final = "quarantined"

_OPERATIONS: Final = {INSERT: "insert", UPDATE: "update", DELETE: "delete"}
_INSERT_SQL: Final = """
insert into streamer.conflict
    (relation_id, kind, resolution, operation, key, lsn, commit_time, xid, existing)
select $1, c.kind, c.resolution, c.operation, c.key::json, c.lsn::pg_lsn, c.commit_time, c.xid,
       c.existing::json
from unnest($2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::timestamptz[],
            $8::int8[], $9::text[]) with ordinality
     c (kind, resolution, operation, key, lsn, commit_time, xid, existing, n)
order by c.n
on conflict (relation_id, lsn, kind) where resolution = 'stopped' do nothing
"""
_TRIM_SQL: Final = """
delete from streamer.conflict where relation_id = $1 and id <= (
    select id from streamer.conflict where relation_id = $1 order by id desc offset $2 limit 1)
"""

Key = dict[str, str | None]
"""Text of the values by the source's names of the columns; None is NULL."""


class ConflictsFound(Exception):  # not an error: a window to be written again
    """Rows of a window are missing in the target. The writer notes them the next time."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """A conflict. ``existing``: JSON about the target's row, if there is one."""

    kind: str
    resolution: str
    operation: str
    key: Key | None
    transaction: Transaction
    existing: str | None = None

    @property
    def fields(self) -> tuple[str, str, str, str | None, str, datetime, int, str | None]:
        transaction = self.transaction
        return (
            self.kind,
            self.resolution,
            self.operation,
            None if self.key is None else json.dumps(self.key),
            str(transaction.final_lsn),
            to_datetime(transaction.commit_time),
            transaction.xid,
            self.existing,
        )


class Executes(Protocol):
    """A connection to the target."""

    async def execute(self, sql: str, *parameters: Any) -> int: ...


async def note_conflicts(
    target: Executes, relation_id: int, conflicts: Sequence[Conflict], kept: int
) -> None:
    """Write *conflicts* of a relation, which keeps the newest *kept* of them."""
    if not conflicts:
        return
    columns = map(list, zip(*(conflict.fields for conflict in conflicts), strict=True))
    await target.execute(_INSERT_SQL, relation_id, *columns)
    await target.execute(_TRIM_SQL, relation_id, kept)


def operation_of(kind: int) -> str:
    """Return the name of a row message's kind."""
    return _OPERATIONS[kind]


def find_changes(
    window: LaneWindow, mapped: MappedRelation, plan: ApplyPlan, keys: Collection[Any]
) -> dict[Any, tuple[Transaction, int]]:
    """Return the change of each of *keys* that asked for a row: its transaction, and its kind.

    *keys*: as in a fold. Of several changes of a key, that is the last delete, or else the
    first update. Pure.
    """
    found: dict[Any, tuple[Transaction, int]] = {}
    wanted = set(keys)
    get_key = plan.get_key
    for share, parts in zip(window.shares, window.parts, strict=True):
        for owner, changes, its in parts:
            if owner is not mapped or its is not plan:
                continue
            for transaction, payloads in share.by_transaction(changes):
                rows = [payload for payload in payloads if payload[0] in (UPDATE, DELETE)]
                for change in read_changes(plan, rows):
                    row = change.old if change.old is not None else change.new
                    key = None if row is None else get_key(row)
                    if key not in wanted:
                        continue
                    if change.kind == DELETE or key not in found:
                        found[key] = transaction, change.kind
    return found


def missing_rows(
    rows: Iterable[tuple[Any, Key]],
    changes: dict[Any, tuple[Transaction, int]],
    deletes: bool,
) -> list[Conflict]:
    """Return the conflicts of rows that the target lacks: each with its key in a fold, and that as
    text. Pure.
    """
    conflicts = []
    for key, texts in rows:
        if key not in changes:
            continue
        transaction, kind = changes[key]
        # A row may go under another key, and then its first change is the change of the key.
        name = DELETE_MISSING if deletes and kind == DELETE else UPDATE_MISSING
        conflicts.append(Conflict(name, RESOLUTIONS[name], operation_of(kind), texts, transaction))
    return conflicts
