"""A defect ends the work that met it, as an error that names the work."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from streamer.apply.write.planner import Planner
from streamer.errors.error_classes import DefectError, TargetConnectionError
from streamer.util import containment
from streamer.util.containment import contained, ending, enduring
from tests.unit.build import mapped_relation


def test_a_defect_becomes_an_error_that_names_the_work() -> None:
    words = "internal error in planning: KeyError"
    with pytest.raises(DefectError, match=words) as caught, contained("planning"):
        raise KeyError("a value")
    assert isinstance(caught.value.__cause__, KeyError)
    assert "a value" not in str(caught.value)


def test_an_error_of_streamer_passes_as_it_is_also_out_of_a_group() -> None:
    error = TargetConnectionError("the target is away")
    with pytest.raises(TargetConnectionError) as caught, contained("planning"):
        raise error
    assert caught.value is error
    with pytest.raises(TargetConnectionError) as caught, contained("planning"):
        raise ExceptionGroup("tasks", [ExceptionGroup("tasks", [error])])
    assert caught.value is error


async def test_a_cancellation_counts_while_a_group_ends_with_an_error() -> None:
    ending, may_end = asyncio.Event(), asyncio.Event()

    async def end_slowly() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await may_end.wait()

    async def fail() -> None:
        raise TargetConnectionError("the target is away")

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(end_slowly())
            group.create_task(fail())

    task = asyncio.create_task(enduring("working", run))
    await ending.wait()
    task.cancel()
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.wait([task], timeout=10)
    assert task.cancelled()


async def test_a_task_that_lost_its_cancellation_is_named_and_cancelled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(containment, "END_SECONDS", 0.05)

    async def lose_one() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    task = asyncio.create_task(lose_one(), name="drain t")
    await asyncio.sleep(0)
    task.cancel()
    with capture_logs() as logs, ending("draining", [task]):
        await asyncio.wait([task], timeout=10)
    assert task.cancelled()
    assert [(each["work"], each["task"]) for each in logs] == [("draining", "drain t")]


async def test_a_cancellation_counts_while_planning_fails() -> None:
    planner: Any = Planner.__new__(Planner)
    ending_read, may_end = asyncio.Event(), asyncio.Event()

    async def end_slowly(_mapped: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ending_read.set()
            await may_end.wait()

    async def fail(_key: object) -> None:
        raise TargetConnectionError("the target is away")

    planner._read_definition, planner._read_target = end_slowly, end_slowly
    planner._source_columns = SimpleNamespace(get=fail)
    task = asyncio.create_task(planner._read_both(mapped_relation()))
    await ending_read.wait()
    task.cancel()
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.wait([task], timeout=10)
    assert task.cancelled()
