"""The acknowledged position, case by case; `tests/property` compares the tracker with a model."""

import pytest

from streamer.control import progress_tracker as module
from streamer.control.progress_tracker import LanePending, ProgressTracker
from streamer.util.lsn import Lsn


def make() -> tuple[ProgressTracker, LanePending, LanePending]:
    return ProgressTracker(Lsn(100)), LanePending(), LanePending()


def test_a_new_tracker_acknowledges_where_it_starts() -> None:
    tracker, lane, _ = make()
    assert tracker.flush_lsn == tracker.newest_lsn == 100
    assert tracker.is_idle
    assert not lane
    assert lane.flush_lsn_max is None


def test_a_transaction_without_changes_is_acknowledged_at_once() -> None:
    tracker, _, _ = make()
    tracker.dispatched(Lsn(110), [])
    assert tracker.flush_lsn == 110


def test_positions_after_an_open_transaction_are_not_acknowledged() -> None:
    tracker, slow, fast = make()
    tracker.dispatched(Lsn(110), [slow])
    tracker.dispatched(Lsn(120), [fast])
    tracker.dispatched(Lsn(130), [])
    tracker.durable(fast, Lsn(120))
    assert tracker.flush_lsn == 100
    tracker.durable(slow, Lsn(110))
    assert tracker.flush_lsn == 130
    assert tracker.is_idle


def test_a_transaction_of_two_lanes_is_durable_when_both_are() -> None:
    tracker, one, other = make()
    tracker.dispatched(Lsn(110), [one, other])
    tracker.durable(one, Lsn(110))
    assert tracker.flush_lsn == 100
    tracker.durable(other, Lsn(110))
    assert tracker.flush_lsn == 110


def test_the_position_stops_at_the_commit_before_the_gap_whosever_that_is() -> None:
    tracker, slow, fast = make()
    tracker.dispatched(Lsn(110), [fast])
    tracker.dispatched(Lsn(120), [slow])
    tracker.durable(fast, Lsn(110))
    assert tracker.flush_lsn == 110


def test_a_keepalive_is_acknowledged_once_earlier_changes_are_durable() -> None:
    tracker, lane, _ = make()
    tracker.keepalive(Lsn(105))
    assert tracker.flush_lsn == 105
    tracker.dispatched(Lsn(110), [lane])
    tracker.keepalive(Lsn(150))
    assert tracker.flush_lsn == 105
    tracker.durable(lane, Lsn(110))
    assert tracker.flush_lsn == 150


def test_a_keepalive_never_goes_back() -> None:
    tracker, _, _ = make()
    tracker.keepalive(Lsn(50))
    assert tracker.flush_lsn == 100


def test_commits_come_in_order() -> None:
    tracker, lane, _ = make()
    tracker.dispatched(Lsn(110), [lane])
    for end_lsn in (110, 105):
        with pytest.raises(ValueError, match=r"commit 0/6[9E] is not after 0/6E"):
            tracker.dispatched(Lsn(end_lsn), [lane])
    assert tracker.newest_lsn == 110


def test_a_lane_held_up_for_long_needs_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RUNS_MAX", 3)
    tracker, lane, _ = make()
    for end_lsn in range(110, 210, 10):
        tracker.dispatched(Lsn(end_lsn), [lane])
    assert len(lane._runs) == 3
    tracker.durable(lane, Lsn(120))
    assert tracker.flush_lsn == 120
    tracker.durable(lane, Lsn(150))
    assert tracker.flush_lsn == 150, "a merged run is acknowledged up to what is durable of it"
    tracker.durable(lane, Lsn(190))
    assert tracker.flush_lsn == 190
    assert not tracker.is_idle
    tracker.durable(lane, Lsn(200))
    assert tracker.flush_lsn == 200
    assert tracker.is_idle


def test_the_oldest_pending_commit_is_known_by_its_time() -> None:
    tracker, lane, other = make()

    def oldest() -> list[int | None]:
        return [tracker.oldest_time, lane.oldest_time, other.oldest_time]

    assert oldest() == [None, None, None]
    tracker.dispatched(Lsn(110), [lane], 1000)
    tracker.dispatched(Lsn(120), [lane, other], 2000)
    tracker.dispatched(Lsn(130), [lane], 3000)
    assert oldest() == [1000, 1000, 2000]
    tracker.durable(lane, Lsn(110), 1000)
    assert oldest() == [2000, 2000, 2000]
    tracker.durable(lane, Lsn(130), 3000)
    assert oldest() == [2000, None, 2000]
    tracker.durable(other, Lsn(120), 2000)
    assert oldest() == [None, None, None]


def test_the_time_of_a_merged_run_is_at_most_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RUNS_MAX", 1)
    tracker, lane, _ = make()
    for number in range(1, 5):
        tracker.dispatched(Lsn(100 + 10 * number), [lane], 1000 * number)
    tracker.durable(lane, Lsn(120), 2000)
    assert tracker.oldest_time == 2000
    tracker.durable(lane, Lsn(140), 4000)
    assert tracker.oldest_time is None
