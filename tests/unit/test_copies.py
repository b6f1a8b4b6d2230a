"""The progress of a copy, and the remaining time."""

from streamer.bookkeeping.copies import CopyProgress, Ledger, RunningParts, estimate

NO_PARTS = RunningParts(0, 0)


def test_parts_that_are_done_tell_how_large_the_rest_is() -> None:
    # A quarter of the table's pages came as 50 bytes, half as many as the pages take at the source.
    ledger = Ledger(rows=10, bytes=50, heap_bytes=100, heap_bytes_total=400, rows_total=None)

    assert estimate(ledger, RunningParts(10, 50), 5.0) == CopyProgress(
        rows=20,
        rows_total=None,
        bytes=100,
        bytes_total=200,
        rows_per_second=4.0,
        seconds_left=5.0,
    )


def test_before_a_part_is_done_rows_tell() -> None:
    ledger = Ledger(rows=0, bytes=0, heap_bytes=0, heap_bytes_total=1000, rows_total=100)

    found = estimate(ledger, RunningParts(25, 100), 10.0)

    assert (found.rows_per_second, found.seconds_left) == (2.5, 30.0)


def test_estimates_that_were_too_low_give_way() -> None:
    ledger = Ledger(rows=0, bytes=0, heap_bytes=0, heap_bytes_total=1000, rows_total=10)

    found = estimate(ledger, RunningParts(40, 5000), 10.0)

    assert (found.rows_total, found.bytes_total, found.seconds_left) == (40, 5000, 0.0)


def test_nothing_is_said_of_a_copy_that_has_not_begun() -> None:
    ledger = Ledger(rows=0, bytes=0, heap_bytes=0, heap_bytes_total=0, rows_total=0)

    assert estimate(ledger, NO_PARTS, None) == CopyProgress(0, None, 0, None, None, None)
    assert estimate(ledger, NO_PARTS, 3.0).seconds_left is None
