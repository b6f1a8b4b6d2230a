"""Outcomes of requests, judged on the bookkeeping's records."""

from dataclasses import fields, replace
from datetime import UTC, datetime
from typing import Any

import pytest

from streamer.bookkeeping.relation_records import RelationRecord
from streamer.bookkeeping.requests import name_requests
from streamer.bookkeeping.sources import SourceRecord
from streamer.bookkeeping.taken_requests import decided, find_gap, outcome
from streamer.commands.request_outcomes import find_causes
from streamer.commands.table_requests import SourceKey
from streamer.control.resync_options import Mode, Resync
from streamer.control.table_state import State, TableState
from streamer.errors.error_reports import ErrorReport
from streamer.errors.remedies import CONTINUES, Remedy, at_source
from streamer.util.lsn import Lsn


def record(**facts: Any) -> RelationRecord:
    """Return a record with only the *facts* that a test needs."""
    nothing: dict[str, Any] = dict.fromkeys(field.name for field in fields(RelationRecord))
    return RelationRecord(**(nothing | facts))


FAILED = ErrorReport("the target refuses a row", "conflict")
GAP = ErrorReport("rows are missing", "gap")
OPEN, DONE = (False, None), (True, None)
UNTIL = TableState.stored(State.READY).part_requested(Resync(Mode.DIFF))
ROWS = TableState.stored(State.READY).rows_requested(Resync())


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (ROWS, OPEN),
        (ROWS.copy_began(Lsn(8)), OPEN),
        (ROWS.copy_began(Lsn(8)).delayed(FAILED), (False, FAILED)),
        (ROWS.paused(), OPEN),
        (ROWS.copy_failed(FAILED), (True, FAILED)),
        (ROWS.blocked(FAILED), (True, FAILED)),
        (ROWS.switched_to_stream(None, Lsn(8)), DONE),
        (UNTIL, OPEN),
        (UNTIL.paused(), OPEN),
        (UNTIL.copy_failed(FAILED), (True, FAILED)),
        (UNTIL.switched_to_stream(None, Lsn(8)), DONE),
        (UNTIL.switched_to_stream(None, Lsn(8)).drained(), DONE),
        (replace(UNTIL.switched_to_stream(None, Lsn(8)), error=GAP), DONE),
        (UNTIL.switched_to_stream(None, Lsn(8)).failing(FAILED), (True, FAILED)),
        (UNTIL.lost(FAILED), (True, FAILED)),
    ],
)
def test_the_state_of_a_table_is_the_outcome_of_its_resync(
    state: TableState, expected: tuple[bool, ErrorReport | None]
) -> None:
    assert outcome(state) == expected


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("apply", OPEN),
        ("skip", OPEN),
        ("applied", DONE),
        ("skipped", DONE),
        ("made", DONE),
        ("waiting", (True, ErrorReport("no such type", "definition"))),
    ],
)
def test_the_state_of_a_command_is_the_outcome_of_the_decision_about_it(
    state: str, expected: tuple[bool, ErrorReport | None]
) -> None:
    is_ended, error = decided(state, "no such type")
    assert (is_ended, error and error.text) == (expected[0], expected[1] and expected[1].text)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([3], "request 3"),
        ([3, 4], "requests 3 and 4"),
        ([3, 4, 5], "requests 3 to 5"),
        ([3, 5, 9], "requests 3, 5 and 9"),
    ],
)
def test_open_requests_have_their_numbers(ids: list[int], words: str) -> None:
    assert name_requests(ids) == words


def test_a_source_that_does_not_stream_has_a_cause_with_its_remedy() -> None:
    """As in status: streamer continues once an administrator has run the statements."""
    remedy = Remedy.of("run at the source: ", at_source("create publication p"))
    error = ErrorReport(f"no publication; {remedy}", "unpublished", remedy)
    nothing: dict[str, Any] = dict.fromkeys(field.name for field in fields(SourceRecord))
    lost = SourceRecord(**nothing | {"source_id": 1, "database": "shop", "state": "error"})
    lost = replace(lost, error=error)
    records = [lost, replace(lost, source_id=2), replace(lost, source_id=3, state="streaming")]
    (cause,) = find_causes(records, {1, 3})
    words = "no publication; run at the source: create publication p; "
    assert cause.sentence == words + CONTINUES


def test_a_gap_in_the_past_of_a_table_needs_consent() -> None:
    shop = SourceKey("shop", "eu")
    facts: dict[str, Any] = {
        "source": "public.t", "end_lsn": Lsn(16), "needs_resync": False, "quarantined": 0,
        "changed_at": datetime(2026, 11, 25, 12, tzinfo=UTC),
    }  # fmt: skip
    lost = facts | {"needs_resync": True}
    held = facts | {"quarantined": 3}
    some, consent = Resync(columns=("v",)), Resync(skips_changes=True)
    for kind in ("append", "history"):
        assert find_gap(record(type=kind, **facts), Resync(), shop) is None
        gap = find_gap(record(type=kind, **lost), Resync(), shop)
        assert gap is not None
        assert "permanently missing, from position 0/10 (2026-11-25 12:00:00+0000)" in str(gap)
        assert "streamer resync public.t --database shop --sid eu --skip-changes" in str(gap)
        gap = find_gap(record(type=kind, **held), Resync(), shop)
        assert gap is not None
        assert "3 changes of" in str(gap)
        for resync in (some, consent):
            assert find_gap(record(type=kind, **lost), resync, shop) is None
    assert find_gap(record(type="clone", **lost | held), Resync(), shop) is None
