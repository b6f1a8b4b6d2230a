"""The judgement about keys: pure cases."""

from streamer.compare.judge_keys import (
    UNKNOWN_COMMIT,
    Judge,
    Row,
    SourceReading,
    TargetReading,
    find_difference,
)
from streamer.util.lsn import Lsn


def row(place: str, *values: str | None) -> Row:
    return place, values


def source(lsn: int, *rows: Row, committing: tuple[str, ...] = ()) -> SourceReading:
    return SourceReading(Lsn(lsn), frozenset(committing), {0: rows} if rows else {})


def target(lsn: int | None, *rows: Row) -> TargetReading:
    return TargetReading(None if lsn is None else Lsn(lsn), {0: rows} if rows else {})


def judged(*readings: SourceReading | TargetReading, keeps_more: bool = False) -> str:
    judge = Judge([0], keeps_more=keeps_more)
    for reading in readings:
        if isinstance(reading, SourceReading):
            judge.read_source(reading)
        else:
            judge.read_target(reading)
    if judge.pending:
        return "pending"
    return judge.different[0].kind if judge.different else "equal"


A, B, C = row("s1", "1", "a"), row("s2", "1", "b"), row("s3", "1", "c")
TA, TB = row("t1", "1", "a"), row("t2", "1", "b")


def test_rows_that_stay_as_they_are_and_differ_are_different_after_two_rounds() -> None:
    assert judged(source(10, A), target(10, TB)) == "pending"
    assert judged(source(10, A), target(10, TB), source(11, A), target(11, TB)) == "different"
    assert judged(source(10, A), target(10), source(11, A), target(11)) == "missing"
    assert judged(source(10), target(10, TB), source(11), target(11, TB)) == "extra"


def test_a_target_that_lags_is_not_judged() -> None:
    assert judged(source(10, B), target(9, TA), source(11, B), target(9, TA)) == "pending"


def test_a_target_without_a_position_is_not_judged_and_readings_before_it_do_not_count() -> None:
    assert judged(source(10, A), target(None, TB), source(11, A), target(None, TB)) == "pending"
    half = (source(10, A), target(10, TB), source(11, A), target(None, TB), source(12, A))
    assert judged(*half, target(12, TB)) == "pending"
    assert judged(*half, target(12, TB), source(13, A), target(13, TB)) == "different"


def test_a_commit_that_the_source_does_not_show_yet_is_waited_for() -> None:
    """With synchronous replication a target can have a change before the source shows it."""
    early = (source(10, A), target(11, TB), source(11, A, committing=("7",)), target(11, TB))
    assert judged(*early) == "pending"
    assert judged(*early, source(12, A, committing=("7", "8")), target(12, TB)) == "pending"
    assert judged(*early, source(12, A, committing=("8",)), target(12, TB)) == "different"
    hidden = (source(10, A), target(11, TB), source(11, A, committing=(UNKNOWN_COMMIT,)))
    assert judged(*hidden, target(11, TB)) == "pending"


def test_a_row_that_was_there_between_two_readings_is_no_extra_row() -> None:
    """The target is behind the source, where the row came and went."""
    assert judged(source(10), target(11, TB), source(14), target(12, TB)) == "pending"
    assert judged(source(10), target(11, TB), source(14), target(14)) == "equal"


def test_a_hot_row_is_equal_to_a_reading_that_the_target_may_be_as_late_as() -> None:
    assert judged(source(10, A), target(9), source(20, B), target(15, TA)) == "equal"
    assert judged(source(10, A), target(9), source(20, B), target(25, TA)) == "pending"
    assert judged(source(10, A), target(9), source(20, B), target(25, TB)) == "equal"


def test_a_row_that_changes_all_the_time_stays_pending() -> None:
    readings = (source(10, A), target(10), source(20, B), target(20), source(30, C), target(30))
    assert judged(*readings) == "pending"


def test_an_append_table_may_have_more() -> None:
    assert judged(source(10), target(10, TA), keeps_more=True) == "equal"
    late = (source(10, A), target(10), source(11, A), target(11))
    assert judged(*late, keeps_more=True) == "missing"


def test_rows_of_one_key_are_compared_as_multisets() -> None:
    one, same, other = row("1", "x"), row("2", "x"), row("3", "y")
    assert find_difference([one, same], [same, one], keeps_more=False) is None
    extra = find_difference([one], [one, same], keeps_more=False)
    assert extra is not None
    assert (extra.missing, extra.extra, extra.different, extra.kind) == (0, 1, 0, "extra")
    changed = find_difference([one], [other], keeps_more=False)
    assert changed is not None
    assert (changed.different, changed.columns) == (1, (0,))
    null = find_difference([row("1", None)], [row("2", "")], keeps_more=False)
    assert null is not None
