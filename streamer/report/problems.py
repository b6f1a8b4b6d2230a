"""Finds the problems, and defines their severity and remedy. Pure.

`streamer status`, `doctor`, `wait`, the page, `/readyz`, the log and the metrics render this list.
A problem has the same words, severity and remedy in every view.
"""

import enum
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC
from typing import Any, Final, Self, final

from streamer.errors.error_classes import GUIDES, RUNBOOKS, ComparisonError, ConflictError
from streamer.errors.error_reports import ErrorReport, is_retried, runbook_address
from streamer.errors.remedies import CONTINUES, Command, Remedy, Sql, at_target, run
from streamer.mapping.rules import SourceLabel
from streamer.report.problem_facts import (
    DRAINER_QUEUE,
    PATIENCE,
    WAITING,
    ReportedSource,
    ReportedTable,
    ReportedTarget,
)
from streamer.util.quantities import format_bytes, format_latency

OVERDUE_SECONDS: Final = 5.0
"""A heartbeat that takes longer is a problem."""
LAG_SECONDS_MAX: Final = 30.0
"""A larger lag is a problem. streamer stores a position without changes every 15 seconds."""


class Severity(enum.StrEnum):
    """The severity of a problem, the worst first."""

    ERROR = "error"  # changes do not arrive, or the target lacks or has wrong rows
    WARNING = "warning"  # an operator should act; changes arrive, or wait for a reason
    INFO = "info"  # good to know: ends without an operator


class ProblemKind(enum.StrEnum):
    """The kinds of problems."""

    TARGET = "target"
    TARGET_WAIT = "target wait"
    MAPPING = "mapping"
    SOURCE = "source"
    NOT_STARTED = "not started"
    STOPPED = "stopped"
    STARTING = "starting"
    PROCESS = "process"
    WAL = "wal"
    WAL_GUARD = "wal guard"
    JOURNAL = "journal"
    HEARTBEAT = "heartbeat"
    TABLE = "table"
    DELAYED = "delayed"
    MASS_DELETE = "mass delete"
    PAUSED = "paused"
    COPYING = "copying"
    WAIT = "wait"
    QUARANTINE = "quarantine"
    DIFFERENT = "different"
    UNCOMPARED = "uncompared"
    INSERTS_ONLY = "inserts only"
    PARTITIONS = "partitions"
    DEFINITION = "definition"
    PENDING_DEFINITION = "pending definition"
    SEQUENCE = "sequence"


PAGE_OF: Final = {
    ProblemKind.TARGET: f"{RUNBOOKS}/target-away",
    ProblemKind.TARGET_WAIT: f"{RUNBOOKS}/source-lags",
    ProblemKind.MAPPING: f"{RUNBOOKS}/mapping-lost",
    ProblemKind.SOURCE: f"{RUNBOOKS}/source-unreachable",
    ProblemKind.NOT_STARTED: f"{GUIDES}/deploy",
    ProblemKind.STOPPED: f"{RUNBOOKS}/source-disk-fills",
    ProblemKind.STARTING: f"{RUNBOOKS}/source-lags",
    ProblemKind.PROCESS: f"{RUNBOOKS}/source-unreachable",
    ProblemKind.WAL: f"{RUNBOOKS}/source-disk-fills",
    ProblemKind.WAL_GUARD: f"{RUNBOOKS}/source-disk-fills",
    ProblemKind.JOURNAL: f"{RUNBOOKS}/target-away",
    ProblemKind.HEARTBEAT: f"{RUNBOOKS}/source-lags",
    ProblemKind.TABLE: f"{RUNBOOKS}/table-in-error",
    ProblemKind.DELAYED: f"{RUNBOOKS}/table-in-error",
    ProblemKind.MASS_DELETE: f"{RUNBOOKS}/mass-delete",
    ProblemKind.PAUSED: f"{RUNBOOKS}/source-disk-fills",
    ProblemKind.COPYING: f"{RUNBOOKS}/copy-does-not-finish",
    ProblemKind.WAIT: f"{RUNBOOKS}/source-lags",
    ProblemKind.QUARANTINE: f"{RUNBOOKS}/rows-in-quarantine",
    ProblemKind.DIFFERENT: f"{RUNBOOKS}/tables-differ",
    ProblemKind.UNCOMPARED: f"{RUNBOOKS}/tables-differ",
    ProblemKind.INSERTS_ONLY: f"{GUIDES}/prepare-source",
    ProblemKind.PARTITIONS: f"{GUIDES}/time-partitions",
    ProblemKind.DEFINITION: f"{GUIDES}/prepare-target",
    ProblemKind.PENDING_DEFINITION: f"{GUIDES}/prepare-target",
    ProblemKind.SEQUENCE: f"{GUIDES}/sequences",
}
"""The pages to read by kind. For a problem with an error, the code of the error decides."""

BLOCKING: Final = frozenset(
    {
        ProblemKind.TARGET,
        ProblemKind.TARGET_WAIT,
        ProblemKind.MAPPING,
        ProblemKind.SOURCE,
        ProblemKind.NOT_STARTED,
        ProblemKind.STOPPED,
        ProblemKind.STARTING,
        ProblemKind.WAL_GUARD,
        ProblemKind.JOURNAL,
        ProblemKind.TABLE,
        ProblemKind.MASS_DELETE,
        ProblemKind.PAUSED,
        ProblemKind.COPYING,
        ProblemKind.WAIT,
    }
)
"""Kinds of problems that make `/readyz` fail: a source does not stream, or a table is not ready."""


@final
@dataclass(frozen=True, slots=True)
class Subject:
    """The place of a problem. ``other``: the target or the mapping, instead of a source."""

    database: str | None = None
    sid: str | None = None
    table: str | None = None
    sequence: str | None = None
    other: str = ""

    @property
    def source(self) -> str | None:
        return None if self.database is None else SourceLabel(self.database, self.sid)

    @property
    def object(self) -> str | None:
        """The table or sequence of the source."""
        return self.table if self.sequence is None else f"sequence {self.sequence}"

    def __str__(self) -> str:
        return " ".join(part for part in (self.source or self.other, self.object) if part)

    def to_json(self) -> dict[str, str]:
        """Return the parts that the subject has, as the bookkeeping stores them."""
        return {name: value for name, value in asdict(self).items() if value}

    @classmethod
    def from_json(cls, stored: dict[str, str]) -> Self:
        return cls(**stored)


@final
@dataclass(frozen=True, slots=True)
class Problem:
    """A problem. ``state``: the label of the subject; ``runbook``: the address of the page.

    ``choices``: commands that an operator may also run, once the remedy removes the cause.
    """

    kind: ProblemKind
    subject: Subject
    severity: Severity
    text: str
    remedy: Remedy | None
    runbook: str
    state: str = ""
    code: str | None = None
    choices: tuple[Command, ...] = ()

    @property
    def commands(self) -> tuple[Command, ...]:
        """The commands of the remedy, and then the choices."""
        commands = () if self.remedy is None else self.remedy.commands
        return tuple(dict.fromkeys((*commands, *self.choices)))

    @property
    def sentence(self) -> str:
        """Text and remedy in one line."""
        return self.text if self.remedy is None else f"{self.text}; {self.remedy}"

    @property
    def blocks(self) -> bool:
        """Whether the fleet is not ready because of the problem."""
        return self.kind in BLOCKING

    @property
    def key(self) -> tuple[ProblemKind, Subject]:
        """An identity that does not change while the problem lasts, even if figures change."""
        return self.kind, self.subject

    def to_json(self) -> dict[str, Any]:
        return {
            "database": self.subject.database,
            "sid": self.subject.sid,
            "table": self.subject.table,
            "sequence": self.subject.sequence,
            "kind": self.kind.value,
            "severity": self.severity.value,
            "problem": self.text,
            "remedy": None if self.remedy is None else str(self.remedy),
            "steps": [] if self.remedy is None else [step.to_json() for step in self.remedy.steps],
            "code": self.code,
            "runbook": self.runbook,
        }


def needs_operator(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems that an operator must end."""
    return [problem for problem in problems if problem.severity is not Severity.INFO]


def worst_first(problems: Iterable[Problem]) -> list[Problem]:
    worst = list(Severity)
    return sorted(problems, key=lambda problem: worst.index(problem.severity))


def _problem(
    kind: ProblemKind,
    subject: Subject,
    severity: Severity,
    text: str,
    remedy: Remedy | None = None,
    *,
    error: ErrorReport | None = None,
    code: str | None = None,
    state: str = "",
    choices: tuple[Command, ...] = (),
) -> Problem:
    code = code if error is None else error.code or None
    runbook = runbook_address(code) or PAGE_OF[kind]
    return Problem(kind, subject, severity, text, remedy, runbook, state, code, choices)


def _continuing(remedy: Remedy | None, code: str | None = None) -> Remedy | None:
    """Add to *remedy* that streamer continues by itself.

    Return *remedy* unchanged if *remedy* has a command of streamer, or if streamer never retries
    after errors of *code*.
    """
    if (remedy is not None and any(step.action for step in remedy.commands)) or not is_retried(
        code
    ):
        return remedy
    words = remedy or Remedy.of("remove the cause that the message names")
    return Remedy.of(words, f"; {CONTINUES}")


def of_target(target: ReportedTarget) -> Iterator[Problem]:
    """Yield the problem of the target, unless the target writes changes."""
    subject = Subject(other=f"target {target.name}")
    if (error := target.error) is not None:
        yield _problem(
            ProblemKind.TARGET, subject, Severity.ERROR, error.message,
            _continuing(error.remedy, error.code), error=error, state=target.state,
        )  # fmt: skip
    elif (wait := target.wait) is not None:
        yield _problem(
            ProblemKind.TARGET_WAIT, subject, Severity.ERROR, wait.text,
            _continuing(wait.remedy), state=WAITING,
        )  # fmt: skip


def of_mapping(error: ErrorReport, state: str = "mapping") -> Problem:
    """Return the problem of a fault in the mapping as a whole."""
    subject = Subject(other="mapping")
    return _problem(
        ProblemKind.MAPPING, subject, Severity.ERROR, error.message, error.remedy,
        error=error, state=state,
    )  # fmt: skip


def of_source(source: ReportedSource) -> list[Problem]:
    """Return the problems of a source and then of its tables, tables in error first."""
    tables = sorted(source.tables, key=lambda t: (t.error is None, t.state == "ready", t.name))
    of_tables = [problem for table in tables for problem in _TableRules(source, table).problems()]
    listed = [*_state_problems(source), *_wal_problems(source)]
    of_tables += _queue_problems(source)
    # A table that holds changes delays the heartbeat, and has a problem that names the cause.
    if not any(problem.kind in _HOLDING for problem in of_tables):
        listed += _heartbeat_problems(source)
    listed += of_tables
    for sequence in source.sequences:
        if sequence.error is not None:
            subject = Subject(source.database, source.sid, sequence=sequence.source)
            text = f"{sequence.target} cannot follow: {sequence.error}"
            listed.append(
                _problem(ProblemKind.SEQUENCE, subject, Severity.WARNING, text, sequence.remedy)
            )
    return listed


_START: Final = Remedy.of("start: ", run("run"))
_UNSTARTED: Final = {
    "not started": (ProblemKind.NOT_STARTED, "no process has run this source yet"),
    "stopped": (
        ProblemKind.STOPPED,
        "no process reads its slot, so the source retains its WAL",
    ),
}
_NOT_STREAMING: Final = {
    "waiting": "remove the cause of the wait",
    "error": "read the log of its process, and remove the cause",
    "unreachable": "start its server or restore the network",
}
"""The remedies of sources without a stream whose error is unknown, by state."""


def _state_problems(source: ReportedSource) -> Iterator[Problem]:
    subject, state, error = Subject(source.database, source.sid), source.state, source.error
    if error is not None:
        severity = Severity.WARNING if state == "starting" else Severity.ERROR
        moment = Remedy.of("wait a moment") if state == "starting" else None
        remedy = _continuing(error.remedy or moment, error.code)
        yield _problem(
            ProblemKind.SOURCE, subject, severity, error.message, remedy, error=error, state=state
        )
    elif state in _UNSTARTED:
        kind, text = _UNSTARTED[state]
        yield _problem(kind, subject, Severity.ERROR, text, _START, state=state)
    elif state == "starting":
        waits = source.waiting_for
        text = f"waits for {waits}" if waits else "is starting"
        yield _problem(ProblemKind.STARTING, subject, Severity.INFO, text, state=state)
    elif state in _NOT_STREAMING:
        remedy = _continuing(Remedy.of(_NOT_STREAMING[state]))
        yield _problem(
            ProblemKind.SOURCE, subject, Severity.ERROR, "is not streaming", remedy, state=state
        )
    if source.own is not None:
        own_state, own_error = source.own
        condition = "in error" if own_state == "error" else own_state
        text = f"this process is {condition}: {own_error.message}"
        yield _problem(
            ProblemKind.PROCESS, subject, Severity.WARNING, text,
            own_error.remedy and _continuing(own_error.remedy, own_error.code),
            error=own_error, state=own_state,
        )  # fmt: skip


_LEVELS: Final = {
    "warning": (Severity.WARNING, "which is near its limit"),
    "throttled": (Severity.WARNING, "which is near its limit, so copies read more slowly"),
    "over": (Severity.ERROR, "which is over its limit"),
}


def _wal_problems(source: ReportedSource) -> Iterator[Problem]:
    subject, backlog = Subject(source.database, source.sid), source.backlog
    if (level := _LEVELS.get(backlog.level)) is not None:
        severity, words = level
        limit = backlog.limit_bytes
        size = f"{format_bytes(backlog.retained_bytes)} of WAL"
        of_limit = "" if limit is None else f" (limit: {format_bytes(limit)})"
        remedy = Remedy.of(
            "resume the table, or start the source, that holds the WAL: ",
            run("status", database=source.database, sid=source.sid),
            " shows the WAL that each table retains",
        )
        text = f"retains {size}, {words}{of_limit}"
        yield _problem(ProblemKind.WAL, subject, severity, text, remedy, state=backlog.level)
    for kind, error in (
        (ProblemKind.WAL_GUARD, backlog.obstacle),
        (ProblemKind.JOURNAL, backlog.journal),
    ):
        if error is not None:
            state = "backlog" if kind is ProblemKind.WAL_GUARD else "journal"
            yield _problem(
                kind, subject, Severity.ERROR, error.message,
                _continuing(error.remedy, error.code), error=error, state=state,
            )  # fmt: skip


_IN_SYNC: Final = ("init", "copying", "catching_up")
"""The states of tables between the request of a copy and its end."""
_UNEXPLAINED: Final = Remedy.of(
    "streamer knows no reason: look at the load of the source, of the target and of this machine"
)
_HOLDING: Final = frozenset(
    {ProblemKind.TABLE, ProblemKind.MASS_DELETE, ProblemKind.PAUSED, ProblemKind.WAIT}
)
"""Problems of a table whose changes wait."""


def _heartbeat_problems(source: ReportedSource) -> Iterator[Problem]:
    # Without a stream no commit becomes visible. The lag is then not a separate problem.
    if source.state != "streaming" or (late := _lag_text(source)) is None:
        return
    severity, remedy = Severity.WARNING, _UNEXPLAINED
    if source.workers_wait_for is not None:
        late += f": the workers wait for {source.workers_wait_for}"
        remedy = Remedy.of("remove the cause of this wait; the workers then continue")
    elif (copy := _copy_text(source.tables)) is not None:
        # streamer acknowledges no change of a table in sync before the copy ends.
        severity, late = Severity.INFO, f"{late}: {copy}"
        remedy = PATIENCE
    subject = Subject(source.database, source.sid)
    yield _problem(ProblemKind.HEARTBEAT, subject, severity, late, remedy, state="late")


def _queue_problems(source: ReportedSource) -> Iterator[Problem]:
    """Yield a single problem for all tables that queue, because thousands may queue at a start."""
    count = sum(table.wait == DRAINER_QUEUE for table in source.tables)
    if count:
        tables = "1 table waits" if count == 1 else f"{count:,} tables wait"
        text = f"{tables} for {DRAINER_QUEUE.text}"
        subject = Subject(source.database, source.sid)
        yield _problem(
            ProblemKind.WAIT, subject, Severity.INFO, text, DRAINER_QUEUE.remedy, state=WAITING
        )


def _copy_text(tables: Iterable[ReportedTable]) -> str | None:
    """Return what a copy waits for, or that a copy runs; None without a copy."""
    copied = [table for table in tables if table.state in _IN_SYNC]
    if not copied:
        return None
    waiting = next((table for table in copied if table.wait is not None), None)
    if waiting is not None:
        return f"the copy of {waiting.name} waits for {waiting.wait and waiting.wait.text}"
    return f"the copy of {copied[0].name} has not ended"


def _lag_text(source: ReportedSource) -> str | None:
    heartbeat, lag = source.heartbeat_seconds or 0.0, source.lag_seconds or 0.0
    if heartbeat > OVERDUE_SECONDS:
        return f"no commit has become visible at the target for {format_latency(heartbeat)}"
    if lag > LAG_SECONDS_MAX:
        return f"commits of the last {format_latency(lag)} are not visible at the target"
    return None


class _TableRules:
    """The rules about a table."""

    def __init__(self, source: ReportedSource, table: ReportedTable) -> None:
        self._table = table
        self._ids = {"database": source.database, "sid": source.sid}
        self._subject = Subject(source.database, source.sid, table.name)

    @property
    def _resume(self) -> Command:
        return run("resume", self._table.name, **self._ids)

    @property
    def _resync(self) -> Command:
        return run("resync", self._table.name, **self._ids)

    def problems(self) -> Iterator[Problem]:
        yield from self._state_problems()
        yield from self._of_rows()
        yield from self._of_definitions()

    def _new(
        self,
        kind: ProblemKind,
        severity: Severity,
        text: str,
        remedy: Remedy | None = None,
        *choices: Command,
        error: ErrorReport | None = None,
        code: str | None = None,
    ) -> Problem:
        return _problem(
            kind, self._subject, severity, text, remedy,
            error=error, code=code, choices=choices,
            state=WAITING if kind is ProblemKind.WAIT else self._table.state,
        )  # fmt: skip

    def _state_problems(self) -> Iterator[Problem]:
        table, error, wait = self._table, self._table.error, self._table.wait
        if table.state == "paused" and not table.is_over_delete_limit:
            remedy = Remedy.of("resume it with: ", self._resume)
            text = "is paused, and its changes wait"
            yield self._new(ProblemKind.PAUSED, Severity.WARNING, text, remedy)
        if table.state == "error":
            yield self._stopped()
        elif table.is_over_delete_limit and error is not None:
            remedy = error.remedy or Remedy.of("apply the transaction with: ", self._resume)
            yield self._new(
                ProblemKind.MASS_DELETE, Severity.ERROR, error.message, remedy, error=error
            )
        elif error is not None:
            yield self._new(
                ProblemKind.DELAYED, Severity.WARNING, error.message,
                self._continuing(error.remedy, error.code), error=error,
            )  # fmt: skip
        if wait is not None and not wait.is_automatic and wait != DRAINER_QUEUE:
            text = f"waits for {wait.text}"
            continues = self._continuing(wait.remedy)
            yield self._new(ProblemKind.WAIT, Severity.WARNING, text, continues)
        if table.state in _IN_SYNC:
            seconds = table.seconds_left
            text = "is being copied" + (f", {format_latency(seconds)} left" if seconds else "")
            if wait is not None and wait.is_automatic:
                text = f"waits for {wait.text}"
            yield self._new(ProblemKind.COPYING, Severity.INFO, text)

    def _continuing(self, remedy: Remedy | None, code: str | None = None) -> Remedy | None:
        """Add to *remedy* that streamer continues, unless the table itself has stopped."""
        is_stopped = self._table.state in ("paused", "error")
        return remedy if is_stopped else _continuing(remedy, code)

    def _stopped(self) -> Problem:
        """Return the problem of a table in error.

        SQL that removes the cause suffices, because the table then continues without a request.
        """
        error = self._table.error
        stored = None if error is None else error.remedy
        remedy = stored
        choices: tuple[Command, ...] = (self._resume, self._resync)
        is_conflict = error is not None and error.code == ConflictError.code
        if stored is not None and (is_conflict or stored.has("resume")):
            # A conflict has a resync in its remedy if a copy can help; `resume` repeats a copy.
            choices = (self._resume,)
        if self._table.needs_resync or (stored is not None and stored.has("resync")):
            choices = ()
            if stored is None or not stored.has("resync"):
                remedy = Remedy.of(stored, "; " if stored else "", "run: ", self._resync)
        elif stored is None or not stored.steps:
            words = Remedy.of("remove the cause") if stored is None else stored
            remedy = Remedy.of(words, f"; {CONTINUES}, or at once with: ", self._resume)
        else:
            remedy = _continuing(stored, None if error is None else error.code)
            if remedy != stored:
                remedy = Remedy.of(remedy, " and needs no resume or resync")
        text = "the table stopped" if error is None else error.message
        return self._new(ProblemKind.TABLE, Severity.ERROR, text, remedy, *choices, error=error)

    def _of_rows(self) -> Iterator[Problem]:
        table = self._table
        if table.quarantined:
            count = table.quarantined
            changes = "1 change is" if count == 1 else f"{count:,} changes are"
            lacking = "the change" if count == 1 else "them"
            remedy = Remedy.of(
                "run: ",
                run("quarantine list --table", table.name, **self._ids),
                "; remove the cause, then run: ",
                run("quarantine retry", table.name, **self._ids),
            )
            text = f"{changes} in quarantine, so the target lacks {lacking}"
            yield self._new(ProblemKind.QUARANTINE, Severity.ERROR, text, remedy)
        if table.differing_rows:
            count = table.differing_rows
            rows = "1 row differs" if count == 1 else f"{count:,} rows differ"
            remedy = Remedy.of("correct them with: ", run("repair", table.name, **self._ids))
            at = table.compared_at
            when = "" if at is None else f", as compared at {at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
            text = f"{rows} from the source{when}"
            code = ComparisonError.code
            yield self._new(ProblemKind.DIFFERENT, Severity.ERROR, text, remedy, code=code)
        elif table.verification_error:
            text = f"cannot be compared with its source: {table.verification_error}"
            compare = run("compare", table.name, **self._ids)
            remedy = Remedy.of("follow the message, then run: ", compare)
            code = ComparisonError.code
            yield self._new(ProblemKind.UNCOMPARED, Severity.WARNING, text, remedy, code=code)

    def _of_definitions(self) -> Iterator[Problem]:
        table = self._table
        if table.error is None and table.identity == "none":
            text = "gets inserts only, because the source table has no replica identity"
            # A process of an earlier version stores no statements.
            remedy = table.identity_remedy or Remedy.of("give the source table a primary key")
            yield self._new(ProblemKind.INSERTS_ONLY, Severity.WARNING, text, remedy)
        if (error := table.partition_error) is not None:
            yield self._new(
                ProblemKind.PARTITIONS, Severity.WARNING,
                f"its time partitions cannot be changed: {error.message}",
                _continuing(error.remedy, error.code), error=error,
            )  # fmt: skip
        for lacking in table.definitions:
            if lacking.is_given_up:
                text = f"its target lacks {lacking.label}: {lacking.reason}"
                words: tuple[str | Sql, ...] = (
                    "create a similar object at the target; the source has: " + lacking.sql,
                )
                if lacking.statements:
                    sql = at_target(*lacking.statements)
                    words = ("once you have removed the cause, run at the target: ", sql)
                remedy = Remedy.of(*words)
                yield self._new(ProblemKind.DEFINITION, Severity.WARNING, text, remedy)
            else:
                text = f"{lacking.label} is not yet created at the target"
                yield self._new(ProblemKind.PENDING_DEFINITION, Severity.INFO, text)
