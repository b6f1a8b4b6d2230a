"""The log of `run` about a long wait."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from structlog.testing import capture_logs

from streamer.bookkeeping.sources import SourceRecord
from streamer.errors.error_reports import ErrorReport, TableWait
from streamer.mapping.rules import SourceLabel
from streamer.runtime.health import wait_log as waiting
from streamer.runtime.health.wait_log import LongWaits, Wait, find_waits
from streamer.runtime.services import Health
from streamer.runtime.start_limit import START_TURN
from streamer.runtime.target_health import TargetHealth

if TYPE_CHECKING:
    from streamer.bookkeeping.bookkeeping import Bookkeeping

EU = SourceLabel("shop", "eu")


def well() -> TargetHealth:
    target = TargetHealth("dw")
    target.confirm()
    return target


def record(**fields: Any) -> SourceRecord:
    return cast("SourceRecord", SimpleNamespace(source_id=1, label=EU, **fields))


def test_a_wait_is_reported_once_it_is_long_and_with_its_age() -> None:
    waits, long_waits = [Wait("target", "no answer")], LongWaits()
    assert long_waits.update(waits, 100.0) == []
    assert long_waits.update(waits, 109.0) == []
    assert long_waits.update(waits, 111.0) == [(waits[0], 11.0)]
    assert long_waits.update([], 112.0) == []
    assert long_waits.update(waits, 125.0) == []  # a new wait


def test_while_the_target_is_away_it_is_all_that_is_waited_for() -> None:
    health = Health(state="waiting", error=ErrorReport("the target is away", "target_down"))
    assert find_waits(TargetHealth("dw"), [(EU, health)]) == [Wait("target", "no answer yet")]


def test_the_reason_of_a_waiting_start_comes_from_the_bookkeeping() -> None:
    stored = record(
        state="starting", error=ErrorReport("the creation of a slot waits for pid 7", "slot_wait")
    )
    found = find_waits(well(), [(EU, Health())], [stored])
    assert found == [Wait('source "shop:eu"', "the creation of a slot waits for pid 7")]


def test_sources_that_wait_for_a_turn_are_reported_together() -> None:
    starting = [(f"shop:{n}", Health(waiting_for=START_TURN)) for n in range(900)]
    copying = [("shop:x", Health(waiting_for="its turn to copy"))]
    assert find_waits(well(), [*starting, *copying]) == [
        Wait("starts", 'a turn for source "shop:0" and 899 other sources'),
        Wait("first copies", 'a turn for source "shop:x"'),
    ]


def test_tables_that_wait_for_the_same_are_reported_together() -> None:
    health = Health(state="streaming", table_states={"public.done": "ready"})
    for name in (f"public.t{n}" for n in range(7)):
        health.table_states[name] = "copying"
        health.table_waits[name] = TableWait("pid 7")
    found = find_waits(well(), [(EU, health)])
    names = "public.t0, public.t1, public.t2, public.t3, public.t4 and 2 more"
    assert found == [Wait(f'source "shop:eu", {names}', "pid 7")]


async def test_a_target_that_does_not_answer_is_reported_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "REPORT_SECONDS", 0.01)
    target = TargetHealth("dw")
    with capture_logs() as logs:
        task = asyncio.create_task(waiting.report_waits(cast("Bookkeeping", None), target, list))
        async with asyncio.timeout(30):
            while len(logs) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert {entry["event"] for entry in logs} == {"still waiting"}
    assert logs[-1]["what"] == "target"
