"""How old the oldest committed change is that is not visible at the target. Pure."""

from datetime import datetime

from streamer.apply.lane import Lane
from streamer.decode.pgoutput import to_datetime
from streamer.progress.tracker import ProgressTracker


class Lag:
    """The lag of one source, for one attempt to stream it. Times are protocol times."""

    def __init__(self, tracker: ProgressTracker) -> None:
        self._tracker = tracker
        self._received_time = 0

    def received(self, time: int) -> None:
        """The stream has delivered every commit until *time*."""
        self._received_time = max(self._received_time, time)

    @property
    def visible_time(self) -> int:
        """Commits at the source before this time are visible; 0 if unknown."""
        oldest = self._tracker.oldest_time
        return self._received_time if oldest is None else oldest

    def seconds(self, now: datetime, lag_bytes: int) -> float:
        """Return the age of the oldest committed change that is not visible."""
        if (self._tracker.is_idle and lag_bytes == 0) or not self.visible_time:
            return 0.0
        return max(0.0, (now - to_datetime(self.visible_time)).total_seconds())


def lane_lag_seconds(lane: Lane, now: datetime) -> float:
    """Return the same of the tables of one lane, as far as their changes have come."""
    oldest = lane.pending.oldest_time
    return max(0.0, (now - to_datetime(oldest)).total_seconds()) if oldest else 0.0
