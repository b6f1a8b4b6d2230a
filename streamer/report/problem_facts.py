"""The facts from which `streamer.report.problems` finds problems. Pure.

A running process has these facts in memory, and `status --json` prints them as fields. Both become
objects of this module, so every view reports the same problems.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from streamer.errors.error_reports import ErrorReport, TableWait
from streamer.errors.remedies import Remedy
from streamer.mapping.rules import SourceLabel


@dataclass(frozen=True, slots=True)
class ReportedTarget:
    """The state of the target. ``error``: None while the target accepts writes.

    ``wait``: the reason why commits of streamer wait.
    """

    name: str
    state: str
    error: ErrorReport | None = None
    wait: TableWait | None = None


@dataclass(frozen=True, slots=True)
class LackingDefinition:
    """A definition that the target lacks. ``reason``: the reason why streamer gave up, or None.

    ``statements``: the statements that create the definition. If an operator must write different
    SQL, ``sql`` is a model.
    """

    label: str
    sql: str
    reason: str | None = None
    is_given_up: bool = False
    statements: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportedSequence:
    """A sequence of a source. ``error``: the reason why the target's sequence cannot follow."""

    source: str
    target: str
    error: str | None = None
    remedy: Remedy | None = None


@dataclass(frozen=True, slots=True)
class ReportedTable:
    """A table of a source. ``is_over_delete_limit``: `max_deleted_rows` paused the table."""

    name: str
    state: str
    error: ErrorReport | None = None
    wait: TableWait | None = None
    needs_resync: bool = False
    is_over_delete_limit: bool = False
    quarantined: int = 0
    identity: str | None = None
    identity_remedy: Remedy | None = None
    partition_error: ErrorReport | None = None
    differing_rows: int | None = None
    compared_at: datetime | None = None
    verification_error: str | None = None
    seconds_left: float | None = None
    definitions: tuple[LackingDefinition, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportedBacklog:
    """The WAL that a source retains, by the level of its limit.

    ``obstacle``: the reason why streamer does not drop the slot at the limit; ``journal``: the
    reason why streamer cannot write the journal.
    """

    level: str = "ok"
    retained_bytes: int = 0
    limit_bytes: int | None = None
    obstacle: ErrorReport | None = None
    journal: ErrorReport | None = None


@dataclass(frozen=True, slots=True)
class ReportedSource:
    """A source with tables.

    ``own``: state and error in the reporting process, if the bookkeeping has state and error of a
    different process.
    """

    database: str
    sid: str | None
    state: str
    error: ErrorReport | None = None
    own: tuple[str, ErrorReport] | None = None
    waiting_for: str | None = None
    backlog: ReportedBacklog = ReportedBacklog()
    heartbeat_seconds: float | None = None
    lag_seconds: float | None = None
    workers_wait_for: str | None = None
    """The reason why the sessions that write changes wait at the target."""
    tables: tuple[ReportedTable, ...] = ()
    sequences: tuple[ReportedSequence, ...] = ()

    @property
    def label(self) -> str:
        return SourceLabel(self.database, self.sid)


@dataclass(frozen=True, slots=True)
class StoredFacts:
    """The facts of a source that a process reads from the bookkeeping, by table.

    ``insert_only``: the remedies of tables without a usable replica identity.
    """

    insert_only: dict[str, Remedy | None] = field(default_factory=dict)
    partition_errors: dict[str, ErrorReport] = field(default_factory=dict)
    definitions: dict[str, list[LackingDefinition]] = field(default_factory=dict)
    sequences: list[ReportedSequence] = field(default_factory=list)


Row = Mapping[str, Any]


PATIENCE: Final = Remedy.of("no action is needed: streamer continues by itself")
"""The remedy of a wait that ends without an operator."""
DRAINER_QUEUE: Final = TableWait(
    "one of the connections for held tables, which are all in use", PATIENCE
)
"""The wait of a table whose held changes will be written after those of other tables."""

WITHOUT_STREAM: Final = "without a stream"
"""A table that was ready when its source streamed last."""
WAITING: Final = "waiting"
"""A table in sync whose changes wait, such as for a lock. Problems of waits have this label."""


def shown_state(source_state: str, table_state: str, wait: TableWait | None) -> str:
    """Return the state of a table for a count: a table is ready only while its source streams and
    its changes reach the target.
    """
    if table_state != "ready":
        return table_state
    if source_state != "streaming":
        return WITHOUT_STREAM
    return table_state if wait is None or wait.is_automatic else WAITING


def error_of_row(row: Row) -> ErrorReport | None:
    """Return the error of an object of `status --json`: see `error_fields`.

    An error without a code leads to the runbook of its symptom.
    """
    if not row.get("error"):
        return None
    remedy = Remedy.from_json(row.get("remedy")) or Remedy.given(row.get("hint"))
    return ErrorReport(row["error"], row.get("error_code") or "", remedy)


def wait_of_row(row: Row) -> TableWait | None:
    """Return the wait of a table of `status --json`, if any."""
    waiting_for = row.get("waiting_for")
    return TableWait.from_json(row.get("wait")) or (TableWait(waiting_for) if waiting_for else None)


def target_of_row(row: Row) -> ReportedTarget:
    wait = TableWait.from_json(row.get("wait"))
    return ReportedTarget(row.get("name", "target"), row["state"], error_of_row(row), wait)


def source_of_row(row: Row) -> ReportedSource:
    """Return the facts of a source in `status --json`. Fields may be missing."""
    own_state = row.get("own")
    own_error = error_of_row(own_state) if own_state else None
    return ReportedSource(
        row["database"],
        row["sid"],
        row["state"],
        error_of_row(row),
        (own_state["state"], own_error) if own_state and own_error else None,
        row.get("waiting_for"),
        _backlog(row.get("backlog") or {}),
        row.get("heartbeat_seconds"),
        row.get("lag_seconds"),
        row.get("workers_wait_for"),
        tuple(_table(table) for table in row["tables"]),
        tuple(_sequence(sequence) for sequence in row.get("sequences", ())),
    )


def _backlog(row: Row) -> ReportedBacklog:
    return ReportedBacklog(
        row.get("state") or "ok",
        row.get("retained_bytes") or 0,
        row.get("limit_bytes"),
        error_of_row(row.get("obstacle") or {}),
        error_of_row(row.get("journal") or {}),
    )


def _table(row: Row) -> ReportedTable:
    compared_at = row.get("compared_at")
    return ReportedTable(
        row["source"],
        row["state"],
        error_of_row(row),
        wait_of_row(row),
        bool(row.get("needs_resync")),
        bool(row.get("waits_before")),
        row.get("quarantined") or 0,
        row.get("identity"),
        Remedy.from_json(row.get("identity_remedy")),
        error_of_row(row.get("partition_error") or {}),
        row.get("differing_rows"),
        None if compared_at is None else datetime.fromisoformat(compared_at),
        row.get("verification_error"),
        row.get("seconds_left"),
        tuple(_definition(definition) for definition in row.get("definitions", ())),
    )


def _definition(row: Row) -> LackingDefinition:
    label = f'{row["kind"]} "{row["name"]}"'
    is_given_up, statements = row["state"] in ("failed", "unmade"), tuple(row["statements"])
    return LackingDefinition(label, row["sql"], row["reason"], is_given_up, statements)


def _sequence(row: Row) -> ReportedSequence:
    remedy = Remedy.from_json(row.get("remedy"))
    return ReportedSequence(row["source"], row["target"], row["error"], remedy)
