"""The problems of a process, for readiness, metrics and the log."""

from collections.abc import Sequence
from functools import partial

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.observability.metrics import Metrics
from streamer.report.problems import Problem, of_mapping
from streamer.runtime.health.gauges import ScrapeFacts, count_problems, families, read_facts
from streamer.runtime.health.problem_log import ProblemLog
from streamer.runtime.health.readiness import Reason, find_problems, reason_of
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
    ) -> None:
        self.target = target
        self._metrics = metrics
        self._guards = guards
        self._supervisors = supervisors
        self._mapping = mapping
        self._problem_log = ProblemLog(self.problems)
        metrics.table_detail.count_tables = self._count_tables
        metrics.collect_with(self._gauge_facts, families)

    def report(self, tasks: EnduringTasks, bookkeeping: Bookkeeping) -> None:
        """Start the tasks that log waits and problems."""
        waits = partial(report_waits, bookkeeping, self.target, self._healths)
        tasks.start("reporting waits", waits)
        tasks.start("reporting problems", partial(self._problem_log.run, bookkeeping, self.target))

    def problems(self) -> list[Problem]:
        """Return the problems of the target and of all sources of this process."""
        return find_problems(self.target, self._guards, self._supervisors, self._problem_log.stored)

    def other_problems(self) -> list[Reason]:
        """Return the problems that do not keep a source from being in sync."""
        return [reason_of(problem) for problem in self.problems() if not problem.blocks]

    def readiness(self) -> list[Reason]:
        """Return the reasons why a source is not in sync; empty if all sources are."""
        reasons = [reason_of(problem) for problem in self.problems() if problem.blocks]
        if not self._supervisors:
            state, problem = self._mapping.state, self._mapping.problem
            if problem is None:
                reasons.append({"state": state})
            else:
                reasons.append(reason_of(of_mapping(problem.report, state)))
        return reasons

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
