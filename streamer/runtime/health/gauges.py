"""The gauges of a scrape, in two steps.

Only the event loop may read the facts. A thread makes metrics from the facts, because a source may
have many tables, and the loop feeds the streams meanwhile.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeVar

from prometheus_client.core import GaugeMetricFamily, Metric

from streamer.bookkeeping.replicas import Fleet
from streamer.bookkeeping.verifications import VerificationRecord
from streamer.control.table_state import State
from streamer.observability.metrics import gauge
from streamer.observability.table_metrics import TableDetail
from streamer.report.problems import Problem, needs_operator
from streamer.runtime.services import SOURCE_STATES
from streamer.runtime.session.supervisor import Supervisor
from streamer.runtime.target_health import TargetHealth
from streamer.runtime.wal_retention.backlog_guard import BacklogGuard

T = TypeVar("T", int, float)

_SOURCE: Final = ("database", "sid")
_OF_SOURCES: Final = {
    "streamer_lag_bytes": "Bytes of the source's WAL that are not yet durable in the target",
    "streamer_lag_seconds": "Age of the oldest committed change that is not yet visible",
    "streamer_retained_wal_bytes": "Bytes of WAL that the source retains for the slot",
    "streamer_slot_safe_wal_bytes": "Bytes of WAL until the source invalidates the slot, if "
    "max_slot_wal_keep_size limits it",
    "streamer_heartbeat_seconds": "Delay from a commit at the source until all changes up to this "
    "commit are durable in the target",
    "streamer_backlog_ratio": "Retained WAL divided by its limit. Without `max_retained_wal`, a "
    "source that streams has a value only from a quarter of `max_slot_wal_keep_size` on",
    "streamer_journal_bytes": "Bytes in the journal of a source",
}


@dataclass(frozen=True, slots=True)
class SourceGauges:
    """The gauges of a source. ``values``: the values by metric name."""

    names: tuple[str, str]
    values: dict[str, float]
    state: str
    table_states: dict[str, str]
    quarantined: dict[str, int]
    table_lags: dict[str, float]
    verifications: dict[str, VerificationRecord]


@dataclass(frozen=True, slots=True)
class ScrapeFacts:
    """The facts of a scrape. ``backlogs``: values by name, for guarded sources."""

    is_target_well: bool
    target_silent_seconds: float
    tables_max: int | None = None
    """The number of tables up to which each table has series; None without a limit."""
    backlogs: list[tuple[tuple[str, str], dict[str, float]]] = field(default_factory=list)
    sources: list[SourceGauges] = field(default_factory=list)
    """The gauges of the sources that this process runs."""
    states: Counter[str] = field(default_factory=Counter)
    """The number of sources of the fleet by state."""
    holders: dict[tuple[str, str], str] = field(default_factory=dict)
    """The process that runs each source."""
    replicas: dict[str, int] = field(default_factory=dict)
    """How many sources each live replica runs."""
    problems: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    """The number of problems, by database, sid, kind and severity."""


def read_facts(
    supervisors: Sequence[Supervisor],
    guards: Sequence[BacklogGuard],
    target: TargetHealth,
    detail: TableDetail,
    fleet: Fleet,
) -> ScrapeFacts:
    """Read the facts of a scrape; in the event loop, and quickly.

    Only the replica that runs a source reports the details of that source. Every replica shows the
    state of a source without a process.
    """
    tables_max = None if detail.is_on else detail.tables_max
    facts = ScrapeFacts(target.is_well, target.silent_seconds, tables_max)
    for guard in guards:
        if (backlog := guard.backlog) is not None:
            names = (guard.source.database, guard.source.sid or "")
            values = {
                "streamer_backlog_ratio": backlog.ratio,
                "streamer_journal_bytes": float(backlog.spooled_bytes),
            }
            facts.backlogs.append((names, values))
    facts.sources.extend(
        _source_gauges(supervisor)
        for supervisor in supervisors
        if supervisor.is_assigned or supervisor.source.label not in fleet.holders
    )
    facts.states.update(supervisor.condition[0] for supervisor in supervisors)
    facts.replicas.update(fleet.counts())
    for supervisor in supervisors:
        if (holder := fleet.holders.get(supervisor.source.label)) is not None:
            facts.holders[supervisor.source.database, supervisor.source.sid or ""] = holder
    return facts


def count_problems(problems: Iterable[Problem]) -> Counter[tuple[str, str, str, str]]:
    """Count the problems that need an operator by database, sid, kind and severity."""
    return Counter(
        (
            problem.subject.database or "",
            problem.subject.sid or "",
            problem.kind.value,
            problem.severity.value,
        )
        for problem in needs_operator(problems)
    )


def _source_gauges(supervisor: Supervisor) -> SourceGauges:
    health, pipeline = supervisor.health, supervisor.pipeline
    values: dict[str, float] = {}
    if pipeline is not None:
        values["streamer_lag_bytes"] = pipeline.lag_bytes
        values["streamer_lag_seconds"] = pipeline.lag_seconds()
        if health.safe_wal_bytes is not None:
            values["streamer_slot_safe_wal_bytes"] = health.safe_wal_bytes
    if (retained := supervisor.retained_wal_bytes) is not None:
        values["streamer_retained_wal_bytes"] = retained
    if (beat := supervisor.heartbeat_seconds) is not None:
        values["streamer_heartbeat_seconds"] = beat
    state, _ = supervisor.condition
    return SourceGauges(
        (supervisor.source.database, supervisor.source.sid or ""),
        values,
        state,
        dict(health.table_states),
        dict(health.quarantined),
        {} if pipeline is None else pipeline.table_lags(),
        dict(health.verifications),
    )


def families(facts: ScrapeFacts) -> Iterable[Metric]:
    """Make metrics from *facts*, in any thread."""
    made = {name: gauge(name, text, _SOURCE) for name, text in _OF_SOURCES.items()}
    states = gauge(
        "streamer_table_state",
        "1 for the current state of a table, 0 for the remaining states",
        (*_SOURCE, "table", "state"),
    )
    tables = gauge("streamer_tables", "Number of tables in a state", (*_SOURCE, "state"))
    sources = gauge(
        "streamer_source_state",
        "1 for the current state of a source, 0 for the remaining states",
        (*_SOURCE, "state"),
    )
    quarantined = gauge(
        "streamer_quarantined_rows",
        "Changes in quarantine: rejected by the target, or later changes of the same row",
        (*_SOURCE, "table"),
    )
    lags = gauge(
        "streamer_table_lag_seconds",
        "Age of the oldest committed change of a table that is not yet visible",
        (*_SOURCE, "table"),
    )
    verified = gauge(
        "streamer_verified_timestamp_seconds",
        "Time when the last comparison began that found the table equal to its source",
        (*_SOURCE, "table"),
    )
    differing = gauge(
        "streamer_differing_rows",
        "Rows that the last comparison of the table found different from the source",
        (*_SOURCE, "table"),
    )
    for names, values in [*facts.backlogs, *((item.names, item.values) for item in facts.sources)]:
        for name, value in values.items():
            made[name].add_metric(names, value)
    for source in facts.sources:
        for source_state in SOURCE_STATES:
            sources.add_metric((*source.names, source_state), float(source_state == source.state))
        counted = Counter(source.table_states.values())
        for table_state in State:
            tables.add_metric((*source.names, table_state), counted[table_state])
        for table, seconds in _by_table(facts, source.table_lags, max).items():
            lags.add_metric((*source.names, table), seconds)
        for table, count in _by_table(facts, source.quarantined, sum).items():
            quarantined.add_metric((*source.names, table), count)
        differing_rows = {t: record.differing_rows for t, record in source.verifications.items()}
        for table, count in _by_table(facts, differing_rows, sum).items():
            differing.add_metric((*source.names, table), count)
        verified_at = {
            t: record.verified_at.timestamp()
            for t, record in source.verifications.items()
            if record.verified_at is not None
        }
        for table, seconds in _by_table(facts, verified_at, min).items():
            verified.add_metric((*source.names, table), seconds)
    for names, table, state in _shown_states(facts):
        for table_state in State:
            states.add_metric((*names, table, table_state), float(table_state == state))
    up = GaugeMetricFamily(
        "streamer_target_up",
        "1 while the target answers and accepts writes",
        value=float(facts.is_target_well),
    )
    silent = GaugeMetricFamily(
        "streamer_target_silent_seconds",
        "Seconds since the target last confirmed that it accepts writes; 0 while it does",
        value=facts.target_silent_seconds,
    )
    problems = gauge(
        "streamer_problems",
        "Number of problems, as `streamer status --problems` lists them",
        (*_SOURCE, "kind", "severity"),
    )
    for kinds, count in facts.problems.items():
        problems.add_metric(kinds, count)
    by_table = (states, quarantined, lags, verified, differing, problems)
    return (*made.values(), sources, tables, *by_table, up, silent, *_fleet_families(facts))


def _fleet_families(facts: ScrapeFacts) -> Iterator[Metric]:
    """Yield the facts of the whole fleet, which every replica exports."""
    states = gauge(
        "streamer_fleet_sources",
        "Number of sources in a state, whichever replica runs them",
        ("state",),
    )
    for state in SOURCE_STATES:
        states.add_metric((state,), facts.states[state])
    replicas = gauge(
        "streamer_replica_sources", "Number of sources that a live replica runs", ("process",)
    )
    for name, count in facts.replicas.items():
        replicas.add_metric((name,), count)
    holders = gauge(
        "streamer_source_process",
        "1 for the process that runs a source, by its host and pid",
        (*_SOURCE, "process"),
    )
    for names, holder in facts.holders.items():
        holders.add_metric((*names, holder), 1.0)
    yield from (states, replicas, holders)


def _by_table(
    facts: ScrapeFacts, values: dict[str, T], combine: Callable[[Iterable[T]], T]
) -> dict[str, T]:
    """Return *values* by table or, with too many tables, a single combined value under ""."""
    if facts.tables_max is None or not values:
        return values
    return {"": combine(values.values())}


def _shown_states(facts: ScrapeFacts) -> Iterator[tuple[tuple[str, str], str, str]]:
    """Yield the tables whose state has series, with their source and state: all tables or, with too
    many, only stopped tables.
    """
    every = (
        (source.names, table, state)
        for source in facts.sources
        for table, state in source.table_states.items()
    )
    if facts.tables_max is None:
        return every
    stopped = [entry for entry in every if entry[2] in (State.ERROR, State.PAUSED)]
    return islice(sorted(stopped, key=lambda entry: entry[2] != State.ERROR), facts.tables_max)
