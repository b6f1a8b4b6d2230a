"""The problems that a process reports to the receiver of notifications. Pure.

The process that runs a source reports the problems of the source. The oldest process with the
newest mapping reports the problems of the target and of the mapping. If no process runs a source,
the oldest process that maps the source reports its problems. Only a process with the whole newest
mapping can tell a removed source from a source of another process.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import final

from streamer.report.problem_notices import Key
from streamer.report.problems import Problem, Subject


@final
@dataclass(frozen=True, slots=True)
class NoticeDuty:
    """``leads``: whether this process reports target and mapping. ``reports_removed``: whether this
    process reports the sources outside ``own`` and ``peers``. ``own``: the sources of this process
    by label, and whether each streams; ``peers``: the labels of sources that peers stream.
    """

    leads: bool = True
    reports_removed: bool = True
    is_target_well: bool = True
    own: Mapping[str, bool] = field(default_factory=dict)
    peers: frozenset[str] = frozenset()

    def covers(self, subject: Subject) -> bool:
        """Whether this process reports the problems of *subject*."""
        source = subject.source
        if source is None:
            return self.leads
        return source in self.own or (self.reports_removed and source not in self.peers)

    def may_end(self, key: Key) -> bool:
        """Whether this process may report the end of an absent problem.

        A source that does not stream hides the problems of its tables, so these problems have not
        ended. A source that the mapping lacks has no problems.
        """
        _, subject = key
        if not self.covers(subject):
            return False
        return self.is_target_well and self.own.get(subject.source or "", True)

    def problems(self, problems: Iterable[Problem]) -> list[Problem]:
        return [problem for problem in problems if self.covers(problem.subject)]
