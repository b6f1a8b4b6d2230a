"""The lag of a source in seconds, with clocks that are right or an hour off."""

from streamer.control.progress_tracker import LanePending, ProgressTracker
from streamer.mapping.rules import SourceMapping
from streamer.postgres.secret import Secret
from streamer.runtime.tables.lag import ENDS_MAX, Lag
from streamer.source.server.source_clock import SourceClock
from streamer.source.slot_and_publications.standbys import judge_standby_wait
from streamer.util.lsn import Lsn

HOUR = 3600.0
POSTGRES_EPOCH = 946_684_800


class Source:
    """A source whose clock is *ahead* of this machine's, which has been up for 100 s."""

    def __init__(self, ahead: float = 0.0) -> None:
        self.unix_at_zero = 1_800_000_000 + ahead
        self.clock = SourceClock()
        self.clock.measured(self.unix_at_zero + 100.0, 99.9, 100.1)
        self.tracker = ProgressTracker(Lsn(1000))
        self.lag = Lag(self.tracker, self.clock)

    def commit_time(self, moment: float) -> int:
        return int((self.unix_at_zero + moment - POSTGRES_EPOCH) * 1_000_000)


def test_changes_that_the_source_keeps_count_from_the_look_that_saw_them() -> None:
    source = Source()
    source.lag.record_end(Lsn(1000), 100.0)
    assert source.lag.seconds(102.0) == 0.0
    source.lag.record_end(Lsn(1500), 104.0)
    for moment in (106.0, 120.0, 140.0):
        source.tracker.keepalive(Lsn(1200))  # the server says so every few seconds
        source.lag.record_end(Lsn(1500), moment)
        assert source.lag.seconds(moment) == moment - 104.0
        assert source.lag.visible_at == 100.0
    source.tracker.keepalive(Lsn(1500))
    assert source.lag.undelivered_since is None
    assert source.lag.seconds(141.0) == 0.0
    assert source.lag.visible_at == 140.0


def test_a_clock_that_is_an_hour_off_changes_no_figure() -> None:
    for ahead in (-HOUR, 0.0, HOUR):
        source = Source(ahead)
        pending = LanePending()
        committed = source.commit_time(110.0)
        source.tracker.dispatched(Lsn(1100), [pending], committed)
        source.lag.received(committed)
        assert round(source.lag.seconds(117.5), 3) == 7.5
        assert source.lag.visible_at is not None
        assert round(source.lag.visible_at, 3) == 110.0
        source.tracker.durable(pending, Lsn(1100), committed)
        assert source.lag.seconds(118.0) == 0.0
        assert round(source.lag.visible_at, 3) == 110.0


def test_without_a_measurement_no_commit_has_an_age() -> None:
    tracker = ProgressTracker(Lsn(1000))
    tracker.dispatched(Lsn(1100), [LanePending()], 5)
    lag = Lag(tracker, SourceClock())
    lag.received(5)
    assert lag.seconds(100.0) == 0.0
    assert lag.visible_at is None


def test_a_source_that_sends_nothing_for_days_takes_no_more_memory() -> None:
    source = Source()
    for number in range(5 * ENDS_MAX):
        source.lag.record_end(Lsn(1001 + number), 100.0 + number)
    assert len(source.lag._wal_ends) <= ENDS_MAX
    assert source.lag.undelivered_since == 100.0


def test_the_slots_of_the_setting_that_no_standby_uses_are_named_with_sql_without_them() -> None:
    mapped = SourceMapping("shop", None, Secret(""), ())
    error = judge_standby_wait(mapped, 'a, "b",c', ["a"])
    assert 'no standby uses slot "b", "c" of synchronized_standby_slots' in error.message
    assert error.remedy is not None
    (remedy,) = error.remedy.sql
    assert remedy.side == "source"
    assert remedy.statements == (
        "alter system set synchronized_standby_slots = 'a'",
        "select pg_reload_conf()",
    )
    behind = judge_standby_wait(mapped, "a", ["a", "x"])
    assert "these standbys are behind" in behind.message
    assert behind.remedy is not None
    assert behind.remedy.sql == ()
