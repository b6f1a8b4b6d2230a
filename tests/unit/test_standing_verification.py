"""When a table is verified."""

from datetime import UTC, datetime, timedelta

import pytest

from streamer.bookkeeping.verifications import VerificationRecord
from streamer.runtime.process.standing_verification import (
    LAG_SECONDS_MAX,
    RETRY_SECONDS,
    due_at,
    is_quiet,
)

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
ENDED = datetime(2026, 1, 2, tzinfo=UTC)


def a_record(
    differing: int = 0, undecided: int = 0, error: str | None = None
) -> VerificationRecord:
    return VerificationRecord(1, ENDED, None, None, differing, undecided, error)


def test_a_table_is_due_when_its_interval_has_passed_and_earlier_without_an_answer() -> None:
    assert due_at(0, None, BEGAN) is None
    assert due_at(0, a_record(), BEGAN) is None
    assert due_at(86400, None, BEGAN) == BEGAN
    day = ENDED + timedelta(days=1)
    assert due_at(86400, a_record(), BEGAN) == day
    assert due_at(86400, a_record(differing=3, undecided=1), BEGAN) == day
    soon = ENDED + timedelta(seconds=RETRY_SECONDS)
    assert due_at(86400, a_record(undecided=1), BEGAN) == soon
    assert due_at(86400, a_record(error="a column is missing"), BEGAN) == soon
    assert due_at(1, a_record(undecided=1), BEGAN) == ENDED + timedelta(seconds=1)


@pytest.mark.parametrize(
    ("is_copying", "is_throttling", "lag_seconds", "expected"),
    [
        (False, False, 0.0, True),
        (True, False, 0.0, False),
        (False, True, 0.0, False),
        (False, False, LAG_SECONDS_MAX + 1, False),
    ],
)
def test_copies_backlog_and_lag_come_before_a_verification(
    is_copying: bool, is_throttling: bool, lag_seconds: float, expected: bool
) -> None:
    found = is_quiet(is_copying=is_copying, is_throttling=is_throttling, lag_seconds=lag_seconds)
    assert found is expected
