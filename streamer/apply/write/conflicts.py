"""Conflicts: changes of rows that the target lacks, and inserts of rows that the target already
contains.

The transaction that applies a change notes its conflict, so ``streamer.conflict`` has each conflict
exactly once. A writer searches for missing rows only after a conflict. If a row count is too low,
or a block in exact order misses a row, the writer raises `ConflictsFound`. The caller rolls back
and writes the same window again. From then on the writer checks for missing rows of that table
before each change, until `WATCHED_WINDOWS` windows had no conflict.

A change that the target refuses stops its table or goes into quarantine. The transaction that
stores the quarantined change notes its conflict. The state of a stopped table includes the
conflict, once for the change.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.lanes.lane_window import LaneWindow
from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.apply.rows.fold import read_changes
from streamer.bookkeeping.bookkeeping_table import Executor
from streamer.bookkeeping.stored_conflicts import add_conflicts
from streamer.decode.pgoutput import DELETE, INSERT, UPDATE, to_datetime
from streamer.decode.transactions import Transaction

WATCHED_WINDOWS: Final = 100
"""The checks for missing rows end after this number of windows without a conflict."""
NOTED_MAX: Final = 1000
"""Maximum conflicts of a table that a window notes; the metric counts all conflicts."""

UPDATE_MISSING: Final = "update_missing"
DELETE_MISSING: Final = "delete_missing"
RESOLUTIONS: Final = {UPDATE_MISSING: "inserted", DELETE_MISSING: "ignored"}
STOPPED: Final = "stopped"
QUARANTINED: Final = "quarantined"

_OPERATIONS: Final = {INSERT: "insert", UPDATE: "update", DELETE: "delete"}
Key = dict[str, str | None]
"""Texts of values by the source's column names; None is NULL."""


class ConflictsFound(Exception):  # not an error: a window to be written again
    """Rows of a window are missing at the target. The writer notes the rows in the next attempt."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """A conflict. ``existing``: JSON about the target's row, if any."""

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


async def store_conflicts(
    target: Executor, relation_id: int, conflicts: Sequence[Conflict], kept: int
) -> None:
    """Store *conflicts* of a relation, and delete all but the newest *kept* conflicts."""
    if not conflicts:
        return
    rows = [conflict.fields for conflict in conflicts]
    await add_conflicts(target, relation_id, rows, kept)


def operation_of(kind: int) -> str:
    """Return the name of a row message's kind."""
    return _OPERATIONS[kind]


def find_changes(
    window: LaneWindow, mapped: MappedRelation, plan: ApplyPlan, keys: Collection[Any]
) -> dict[Any, tuple[Transaction, int]]:
    """Return, for each of *keys*, the transaction and the kind of the change that needed the row.

    *keys*: keys in the form of a fold. If a key has several changes, return the last delete, or
    else the first update. Pure.
    """
    origins: dict[Any, tuple[Transaction, int]] = {}
    key_set = set(keys)
    get_key = plan.get_key
    for lane_transaction, parts in zip(window.transactions, window.parts, strict=True):
        for owner, changes, changes_plan in parts:
            if owner is not mapped or changes_plan is not plan:
                continue
            for transaction, payloads in lane_transaction.by_transaction(changes):
                rows = [payload for payload in payloads if payload[0] in (UPDATE, DELETE)]
                for change in read_changes(plan, rows):
                    row = change.old if change.old is not None else change.new
                    key = None if row is None else get_key(row)
                    if key not in key_set:
                        continue
                    if change.kind == DELETE or key not in origins:
                        origins[key] = transaction, change.kind
    return origins


def missing_rows(
    rows: Iterable[tuple[Any, Key]],
    changes: dict[Any, tuple[Transaction, int]],
    deletes: bool,
) -> list[Conflict]:
    """Return the conflicts of missing rows.

    *rows*: the key of each row, as in a fold and as text. Pure.
    """
    conflicts = []
    for key, texts in rows:
        if key not in changes:
            continue
        transaction, kind = changes[key]
        # If a window changes a missing row's key and then deletes the row, the update of the key
        # is the conflict.
        name = DELETE_MISSING if deletes and kind == DELETE else UPDATE_MISSING
        conflicts.append(Conflict(name, RESOLUTIONS[name], operation_of(kind), texts, transaction))
    return conflicts
