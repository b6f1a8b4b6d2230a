"""Which source commits are durable in the target: the only source of acknowledgements.

The dispatcher hands transactions to lanes in commit order, and each lane makes its transactions
durable at its own pace. The acknowledgement reaches the last commit *before the first gap*. The
source discards the WAL before that commit and can never send that WAL again. PostgreSQL's apply
worker keeps the same list (``lsn_mapping`` in worker.c), for one lane.

Memory is bounded, even if a lane waits for days: past `RUNS_MAX` entries the tracker merges a
lane's pending transactions into runs. If only part of a run is durable, the tracker assumes a
position that is never too far.

Pure: no I/O, no clock, no asyncio. The property test states all promises of this module.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from streamer.util.lsn import LSN_MAX, Lsn

RUNS_MAX: Final = 4096


@dataclass(slots=True)
class Run:
    """Pending transactions of one lane, from ``first_lsn`` to ``last_lsn`` (their end LSNs)."""

    before_lsn: Lsn  # the last commit of any lane before `first_lsn`
    first_lsn: Lsn
    last_lsn: Lsn
    first_time: int
    """The earliest possible commit time of the first transaction; a protocol time."""


_NO_RUNS: Final[deque[Run]] = deque(maxlen=0)
"""Shared by lanes without a transaction: a queue for each of many lanes would take 760 bytes."""


class LanePending:
    """The dispatched transactions of a lane that are not durable yet."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs = _NO_RUNS

    def __bool__(self) -> bool:
        return bool(self._runs)

    @property
    def flush_lsn_max(self) -> Lsn | None:
        """The highest LSN that streamer may acknowledge before this lane's changes are durable.

        None without pending changes.
        """
        return self._runs[0].before_lsn if self._runs else None

    @property
    def first_lsn(self) -> Lsn | None:
        """The end of the oldest pending transaction, or an earlier position."""
        return self._runs[0].first_lsn if self._runs else None

    @property
    def oldest_time(self) -> int | None:
        """The earliest possible commit time of the oldest pending transaction, at the source."""
        return self._runs[0].first_time if self._runs else None

    def _add(self, run: Run) -> None:
        if self._runs is _NO_RUNS:
            self._runs = deque((run,))
        elif len(self._runs) < RUNS_MAX:
            self._runs.append(run)
        else:
            self._runs[-1].last_lsn = run.last_lsn

    def _remove_through(self, end_lsn: Lsn, commit_time: int) -> None:
        runs = self._runs
        while runs and runs[0].last_lsn <= end_lsn:
            runs.popleft()
        if runs and runs[0].first_lsn <= end_lsn:
            runs[0].before_lsn = end_lsn
            runs[0].first_lsn = Lsn(end_lsn + 1)
            runs[0].first_time = max(runs[0].first_time, commit_time)


class ProgressTracker:
    """Computes the position to acknowledge to a source."""

    def __init__(self, start_lsn: Lsn) -> None:
        self.newest_lsn = start_lsn
        """The stream has delivered all changes up to this LSN, and the lanes have them."""
        self._lanes: set[LanePending] = set()
        self._held_lsn = LSN_MAX

    def dispatched(self, end_lsn: Lsn, lanes: Iterable[LanePending], commit_time: int = 0) -> None:
        """Record a transaction whose changes went to *lanes*; without changes, *lanes* is empty.
        *commit_time* is a protocol time.

        Raises ValueError unless *end_lsn* is greater than every earlier end.
        """
        before_lsn = self.newest_lsn
        self.dispatched_runs(
            end_lsn, ((lane, Run(before_lsn, end_lsn, end_lsn, commit_time)) for lane in lanes)
        )

    def dispatched_runs(self, end_lsn: Lsn, runs: Iterable[tuple[LanePending, Run]]) -> None:
        """Record consecutive transactions up to *end_lsn*, with the run of each lane.

        Raises ValueError unless *end_lsn* is after all dispatched transactions.
        """
        if end_lsn <= self.newest_lsn:
            raise ValueError(f"commit {end_lsn} is not after {self.newest_lsn}")
        for lane, run in runs:
            lane._add(run)
            self._lanes.add(lane)
        self.newest_lsn = end_lsn

    def durable(self, lane: LanePending, end_lsn: Lsn, commit_time: int = 0) -> None:
        """Record that the target flushed *lane* up to *end_lsn*, committed at *commit_time*."""
        lane._remove_through(end_lsn, commit_time)
        if not lane:
            self._lanes.discard(lane)

    def keepalive(self, wal_end_lsn: Lsn) -> None:
        """Record that the source is at *wal_end_lsn*, and that all earlier changes have arrived.

        The position acts like a transaction without changes: streamer acknowledges the position
        once all earlier changes are durable. Call this method between transactions only.
        """
        self.newest_lsn = max(self.newest_lsn, wal_end_lsn)

    def hold(self) -> None:
        """Keep the position until `release`: streamer drops changes that the source must send again
        after a crash.
        """
        self._held_lsn = self.flush_lsn

    def release(self) -> None:
        self._held_lsn = LSN_MAX

    @property
    def is_idle(self) -> bool:
        """Whether every dispatched transaction is durable."""
        return not self._lanes

    @property
    def oldest_time(self) -> int | None:
        """The commit time, at the source, of the oldest transaction that is not durable."""
        times = (lane.oldest_time for lane in self._lanes)
        return min((time for time in times if time is not None), default=None)

    @property
    def flush_lsn(self) -> Lsn:
        """The position to acknowledge: never decreases, and no earlier change is missing."""
        # All lanes of the set have a run.
        pending = min((lane._runs[0].before_lsn for lane in self._lanes), default=self.newest_lsn)
        return min(pending, self._held_lsn)
