"""The problems of a running process, for `/readyz`, the log and the metrics. Pure."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from streamer.control.table_state import State
from streamer.errors.error_classes import MassDeleteError
from streamer.errors.error_reports import ErrorReport
from streamer.mapping.rules import SourceMapping
from streamer.report.problem_facts import (
    ReportedBacklog,
    ReportedSource,
    ReportedTable,
    StoredFacts,
)
from streamer.report.problems import Problem, of_source, of_target
from streamer.runtime.services import Health
from streamer.runtime.target_health import TargetHealth
from streamer.source.replica_identity import NONE

if TYPE_CHECKING:
    from streamer.runtime.session.supervisor import Supervisor
    from streamer.runtime.wal_retention.backlog_guard import BacklogGuard

Reason = dict[str, str]

STREAMING: Final = "streaming"


def source_facts(
    source: SourceMapping,
    condition: tuple[str, ErrorReport | None],
    health: Health,
    *,
    backlog: ReportedBacklog | None = None,
    stored: StoredFacts | None = None,
    **lag: Any,
) -> ReportedSource:
    """Return the facts of a source. *condition*: the state and error of the source; *lag*: the
    fields of `ReportedSource` about the lag.
    """
    state, error = condition
    stored = stored or StoredFacts()
    tables = dict.fromkeys(health.table_waits, str(State.READY)) | health.table_states
    return ReportedSource(
        source.database,
        source.sid,
        state,
        error,
        waiting_for=health.waiting_for,
        backlog=backlog or ReportedBacklog(),
        **lag,
        tables=tuple(_table(table, str(tables[table]), health, stored) for table in tables),
        sequences=tuple(stored.sequences),
    )


def _table(table: str, state: str, health: Health, stored: StoredFacts) -> ReportedTable:
    error, verified = health.table_errors.get(table), health.verifications.get(table)
    is_mass_delete = error is not None and error.code == MassDeleteError.code
    return ReportedTable(
        table,
        state,
        error,
        health.table_waits.get(table),
        is_over_delete_limit=is_mass_delete and state == State.PAUSED,
        quarantined=health.quarantined.get(table, 0),
        identity=NONE if table in stored.insert_only else None,
        identity_remedy=stored.insert_only.get(table),
        partition_error=stored.partition_errors.get(table),
        differing_rows=None if verified is None else verified.differing_rows,
        compared_at=None if verified is None else verified.ended_at,
        verification_error=None if verified is None else verified.error,
        definitions=tuple(stored.definitions.get(table, ())),
    )


def find_problems(
    target: TargetHealth,
    guards: "Iterable[BacklogGuard]",
    supervisors: "Iterable[Supervisor]",
    stored: Mapping[str, StoredFacts],
) -> list[Problem]:
    """Return the problems of the target, then those of each source.

    During an outage of the target, only the guards run.
    """
    problems = list(of_target(target.facts))
    backlogs = {guard.source.label: (guard.source, guard.facts) for guard in guards}
    for supervisor in supervisors:
        label = supervisor.source.label
        _, backlog = backlogs.pop(label, (None, ReportedBacklog()))
        facts = source_facts(
            supervisor.source,
            supervisor.condition,
            supervisor.health,
            backlog=backlog,
            stored=stored.get(label),
            heartbeat_seconds=supervisor.heartbeat_seconds,
            lag_seconds=None if supervisor.pipeline is None else supervisor.pipeline.lag_seconds(),
            workers_wait_for=target.waits.workers,
        )
        problems += of_source(facts)
    for source, backlog in backlogs.values():
        problems += of_source(
            ReportedSource(source.database, source.sid, STREAMING, backlog=backlog)
        )
    return problems


def reason_of(problem: Problem) -> Reason:
    """Return a problem as `/readyz` shows the problem."""
    subject = problem.subject
    reason = {
        "source": subject.source,
        "table": subject.table,
        "sequence": subject.sequence,
        "target": subject.other.removeprefix("target ") if subject.other else None,
        "state": problem.state,
        "kind": problem.kind.value,
        "severity": problem.severity.value,
        "error": problem.sentence,
        "error_code": problem.code,
        "hint": "" if problem.remedy is None else str(problem.remedy),
        "runbook": problem.runbook,
    }
    return {name: value for name, value in reason.items() if value is not None}
