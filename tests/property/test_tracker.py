"""The acknowledged position against a model that records all commits."""

from dataclasses import dataclass
from unittest import mock

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from streamer.control import progress_tracker
from streamer.control.progress_tracker import LanePending, ProgressTracker
from streamer.util.lsn import Lsn

START = 1000
LANES = 4


@dataclass
class Dispatched:
    """A reached position, and the lanes with pending changes up to there."""

    end_lsn: int
    lanes: set[int]


class Tracking(RuleBasedStateMachine):
    runs_max = 1000

    def __init__(self) -> None:
        super().__init__()
        self.patch = mock.patch.object(progress_tracker, "RUNS_MAX", self.runs_max)
        self.patch.start()
        self.tracker = ProgressTracker(Lsn(START))
        self.lanes = [LanePending() for _ in range(LANES)]
        self.history: list[Dispatched] = [Dispatched(START, set())]
        self.previous = START
        self.held: int | None = None
        self.has_merged = False

    def teardown(self) -> None:
        self.patch.stop()

    @initialize()
    def begin(self) -> None:
        assert self.tracker.flush_lsn == START
        assert self.tracker.is_idle

    @rule(step=st.integers(1, 20), lanes=st.sets(st.integers(0, LANES - 1)))
    def dispatch(self, step: int, lanes: set[int]) -> None:
        end_lsn = Lsn(self.tracker.newest_lsn + step)
        self.tracker.dispatched(end_lsn, [self.lanes[number] for number in lanes])
        self.history.append(Dispatched(end_lsn, set(lanes)))

    @rule(back=st.integers(0, 20))
    def dispatch_out_of_order(self, back: int) -> None:
        with pytest.raises(ValueError, match="is not after"):
            self.tracker.dispatched(Lsn(self.tracker.newest_lsn - back), self.lanes)

    @rule(ahead=st.integers(-10, 20))
    def keepalive(self, ahead: int) -> None:
        wal_end = self.tracker.newest_lsn + ahead
        self.tracker.keepalive(Lsn(wal_end))
        if ahead > 0:
            self.history.append(Dispatched(wal_end, set()))

    @rule(number=st.integers(0, LANES - 1), data=st.data())
    def durable(self, number: int, data: st.DataObject) -> None:
        """A lane has committed its oldest transactions, and now and then reports that twice."""
        pending = [entry for entry in self.history if number in entry.lanes]
        count = data.draw(st.integers(0, len(pending)))
        through = pending[count - 1].end_lsn if count else START
        self.tracker.durable(self.lanes[number], Lsn(through))
        for entry in pending[:count]:
            entry.lanes.remove(number)

    @rule(number=st.integers(0, LANES - 1), position=st.integers(0, 40))
    def superseded(self, number: int, position: int) -> None:
        """A copy covers a lane up to some position, not always that of a commit."""
        through = self.history[0].end_lsn + position
        self.tracker.durable(self.lanes[number], Lsn(through))
        for entry in self.history:
            if entry.end_lsn <= through:
                entry.lanes.discard(number)

    @rule()
    def hold(self) -> None:
        self.held = self.tracker.flush_lsn
        self.tracker.hold()

    @rule()
    def release(self) -> None:
        self.held = None
        self.tracker.release()

    def model_flush_lsn(self) -> int:
        """The last position before the first pending transaction, or the held position."""
        if self.held is not None:
            return self.held
        reached = START
        for entry in self.history:
            if entry.lanes:
                break
            reached = entry.end_lsn
        return reached

    @invariant()
    def the_position_is_the_models(self) -> None:
        expected = self.model_flush_lsn()
        flush_lsn = self.tracker.flush_lsn
        for lane in range(LANES):
            if sum(lane in entry.lanes for entry in self.history) > self.runs_max:
                self.has_merged = True
        # After merging, the position may lag, or stand at a copy's position between two commits. A
        # second invariant checks that the position never passes a gap.
        if not self.has_merged:
            assert flush_lsn == expected

    @invariant()
    def the_position_never_passes_a_gap(self) -> None:
        for entry in self.history:
            if entry.lanes:
                assert self.tracker.flush_lsn < entry.end_lsn

    @invariant()
    def the_position_never_decreases(self) -> None:
        assert self.tracker.flush_lsn >= self.previous
        self.previous = self.tracker.flush_lsn

    @invariant()
    def it_is_idle_when_nothing_is_pending(self) -> None:
        is_idle = not any(entry.lanes for entry in self.history)
        assert self.tracker.is_idle == is_idle
        if is_idle and self.held is None:
            assert self.tracker.flush_lsn == self.tracker.newest_lsn == self.history[-1].end_lsn
        for number, lane in enumerate(self.lanes):
            assert bool(lane) == any(number in entry.lanes for entry in self.history)

    @invariant()
    def memory_is_bounded(self) -> None:
        assert all(len(lane._runs) <= self.runs_max for lane in self.lanes)


class MergedTracking(Tracking):
    """With so little memory that lanes merge pending transactions."""

    runs_max = 2


TestTracking = Tracking.TestCase
TestMergedTracking = MergedTracking.TestCase
