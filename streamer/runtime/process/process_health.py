"""The problems of a process, for readiness, metrics, the log and notifications."""

from collections.abc import Sequence
from functools import partial

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.observability.metrics import Metrics
from streamer.report.notice_duty import NoticeDuty
from streamer.report.problems import Problem, of_mapping
from streamer.runtime.health.gauges import ScrapeFacts, count_problems, families, read_facts
from streamer.runtime.health.notifier import Notifier
from streamer.runtime.health.problem_log import ProblemLog
from streamer.runtime.health.readiness import STREAMING, Reason, find_problems, reason_of
from streamer.runtime.health.statistics_log import StatisticsLog
from streamer.runtime.health.wait_log import report_waits
from streamer.runtime.process.running_mapping import RunningMapping
from streamer.runtime.services import Health
from streamer.runtime.session.supervisor import Supervisor
from streamer.runtime.target_health import TargetHealth
from streamer.runtime.wal_retention.backlog_guards import BacklogGuards
from streamer.util.containment import EnduringTasks


class ProcessHealth:
    """Reads the health of all sources and guards of the process."""

    def __init__(
        self,
        metrics: Metrics,
        target: TargetHealth,
        guards: BacklogGuards,
        supervisors: Sequence[Supervisor],
        mapping: RunningMapping,
        statistics_interval: float,
    ) -> None:
        self.target = target
        self._metrics = metrics
        self._guards = guards
        self._supervisors = supervisors
        self._mapping = mapping
        self._problem_log = ProblemLog(self.problems)
        self.notifier = Notifier(metrics, target)
        self._statistics = StatisticsLog(metrics, supervisors, statistics_interval)
        metrics.table_detail.count_tables = self._count_tables
        metrics.collect_with(self._gauge_facts, families)

    def report(self, tasks: EnduringTasks, bookkeeping: Bookkeeping) -> None:
        """Start the tasks that report waits, problems and statistics."""
        waits = partial(report_waits, bookkeeping, self.target, self._healths)
        tasks.start("reporting waits", waits)
        problems = partial(self._problem_log.run, bookkeeping, self.target, self._notify)
        tasks.start("reporting problems", problems)
        tasks.start("notifying", partial(self.notifier.run, bookkeeping))
        tasks.start("statistics", self._statistics.run)

    def problems(self) -> list[Problem]:
        """Return the problems of the target and of all sources of this process."""
        return find_problems(self.target, self._guards, self._supervisors, self._problem_log.stored)

    def other_problems(self) -> list[Reason]:
        """Return the problems that leave every source in sync."""
        return [reason_of(problem) for problem in self.problems() if not problem.blocks]

    def readiness(self) -> list[Reason]:
        """Return the reasons why a source is not in sync; empty if all sources are in sync."""
        reasons = [reason_of(problem) for problem in self.problems() if problem.blocks]
        if not self._supervisors:
            problem = self._mapping_problem()
            state: Reason = {"state": self._mapping.state}
            reasons.append(state if problem is None else reason_of(problem))
        return reasons

    def _mapping_problem(self) -> Problem | None:
        """Return the reason why no source streams although the target has sources."""
        lost = self._mapping.problem
        if self._supervisors or lost is None:
            return None
        return of_mapping(lost.report, self._mapping.state)

    def _notify(self, problems: Sequence[Problem]) -> None:
        lost = self._mapping_problem()
        self.notifier.check([*problems, *([] if lost is None else [lost])], self._duty())

    def _duty(self) -> NoticeDuty:
        """Return the subjects that this process, and no peer, reports to the receiver."""
        holders, mapping = self._mapping.fleet.holders, self._mapping
        streaming = {
            supervisor.source.label: supervisor.condition[0] == STREAMING
            for supervisor in self._supervisors
            if supervisor.is_assigned
            or (
                supervisor.source.label not in holders
                and mapping.leads_source(supervisor.source.label)
            )
        }
        mapped = {supervisor.source.label for supervisor in self._supervisors}
        peers = frozenset((mapped | holders.keys()) - streaming.keys())
        return NoticeDuty(
            mapping.leads, mapping.reports_removed, self.target.is_well, streaming, peers
        )

    def _healths(self) -> list[tuple[str, Health]]:
        return [(supervisor.source.label, supervisor.health) for supervisor in self._supervisors]

    def _gauge_facts(self) -> ScrapeFacts:
        facts = read_facts(
            self._supervisors,
            list(self._guards),
            self.target,
            self._metrics.table_detail,
            self._mapping.fleet,
        )
        facts.problems.update(count_problems(self.problems()))
        return facts

    def _count_tables(self) -> int:
        return sum(len(supervisor.health.table_states) for supervisor in self._supervisors)
