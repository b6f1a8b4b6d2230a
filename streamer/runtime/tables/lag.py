"""The age of the oldest committed change that is not visible at the target. Pure.

Moments are values of `time.monotonic`. A keepalive contains the time of the source's machine, and
comes even while the server sends no changes. So only positions show the progress of the stream. The
guard reads the end of the source's WAL, and the lag grows until the stream reaches that position.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

from streamer.apply.lanes.lane import Lane
from streamer.control.progress_tracker import ProgressTracker
from streamer.source.server.source_clock import SourceClock
from streamer.util.lsn import Lsn

ENDS_MAX: Final = 512
STALLED_SECONDS: Final = 4.0
"""How long the source may hold changes back before the guard looks for the standby that delays
them.
"""


@dataclass(frozen=True, slots=True)
class Undelivered:
    """WAL of a source that the stream has not delivered, and its age. ``is_full``: the reader waits
    for room in the queues of the workers.
    """

    size: int
    seconds: float
    is_full: bool


class Lag:
    """The lag of a source, for one attempt to stream the source."""

    def __init__(self, tracker: ProgressTracker, clock: SourceClock) -> None:
        self.tracker = tracker
        self._clock = clock
        self._delivered_at: float | None = None
        self._wal_ends: deque[tuple[Lsn, float]] = deque()
        """Ends of the source's WAL that the stream has not reached, with the times of reading."""

    def record_end(self, lsn: Lsn, moment: float) -> None:
        """Record that all commits before *moment* end at *lsn* or before."""
        if len(self._wal_ends) == ENDS_MAX:
            self._wal_ends = deque(list(self._wal_ends)[::2])
        self._wal_ends.append((lsn, moment))
        self._drop_delivered()

    def is_stalled(self, now: float) -> bool:
        """Whether WAL of the source has been undelivered for more than `STALLED_SECONDS`."""
        since = self.undelivered_since
        return since is not None and now - since > STALLED_SECONDS

    def received(self, commit_time: int) -> None:
        """Record that the stream delivered a commit, and all earlier commits."""
        self._delivered(self._clock.moment_of(commit_time))

    def _delivered(self, moment: float | None) -> None:
        if moment is not None:
            self._delivered_at = max(moment, self._delivered_at or moment)

    def _drop_delivered(self) -> None:
        while self._wal_ends and self._wal_ends[0][0] <= self.tracker.newest_lsn:
            self._delivered(self._wal_ends.popleft()[1])

    @property
    def undelivered_since(self) -> float | None:
        """The time since which the source has undelivered WAL; None without such WAL."""
        self._drop_delivered()
        return self._wal_ends[0][1] if self._wal_ends else None

    @property
    def visible_at(self) -> float | None:
        """Commits at the source before this moment are visible; None if unknown."""
        self._drop_delivered()
        oldest = self.tracker.oldest_time
        return self._delivered_at if oldest is None else self._clock.moment_of(oldest)

    def seconds(self, now: float) -> float:
        """Return the age of the oldest committed change that is not visible."""
        oldest = self._clock.moment_of(self.tracker.oldest_time or 0)
        since = [moment for moment in (oldest, self.undelivered_since) if moment is not None]
        return max(0.0, now - min(since)) if since else 0.0


def lane_lag_seconds(lane: Lane, clock: SourceClock, now: float) -> float:
    """Return the lag of the tables of a lane, from the changes that arrived."""
    oldest = clock.moment_of(lane.pending.oldest_time or 0)
    return 0.0 if oldest is None else max(0.0, now - oldest)
