"""A defect ends the work that met it, as an error that names the work."""

import asyncio

import pytest

from streamer.containment import contained, enduring
from streamer.errors import DefectError, TargetConnectionError


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
