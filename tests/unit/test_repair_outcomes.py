"""Repairs and resyncs, judged on the bookkeeping's records."""

from dataclasses import fields, replace
from datetime import UTC, datetime
from typing import Any

import pytest

from streamer.commands.repair import is_repaired
from streamer.commands.requests import SourceKey, find_gap
from streamer.error_reports import ErrorReport
from streamer.errors import ComparisonError
from streamer.lsn import Lsn
from streamer.mapping.resync import Resync
from streamer.progress.relations import RelationRecord


def record(**facts: Any) -> RelationRecord:
    """Return a record with *facts*; a test needs no others."""
    nothing: dict[str, Any] = dict.fromkeys(field.name for field in fields(RelationRecord))
    return RelationRecord(**(nothing | facts))


def test_a_failed_repair_prints_the_text_of_the_error() -> None:
    before = record(source="public.t", attempt=1, state="copying")
    report = ErrorReport("the target refuses a row", "conflict")
    failed = replace(before, attempt=2, state="error", error=report)
    with pytest.raises(ComparisonError) as raised:
        is_repaired(before, failed)
    assert "failed: the target refuses a row" in str(raised.value)
    assert "ErrorReport" not in f"{raised.value} {report}"


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
        assert find_gap(shop, record(type=kind, **facts), Resync()) is None
        gap = find_gap(shop, record(type=kind, **lost), Resync())
        assert gap is not None
        assert "for good, from position 0/10 (2026-11-25 12:00:00+0000)" in str(gap)
        assert "streamer resync public.t --database shop --sid eu --skip-changes" in str(gap)
        gap = find_gap(shop, record(type=kind, **held), Resync())
        assert gap is not None
        assert "are in quarantine, 3 of them" in str(gap)
        for resync in (some, consent):
            assert find_gap(shop, record(type=kind, **lost), resync) is None
    assert find_gap(shop, record(type="clone", **lost | held), Resync()) is None
