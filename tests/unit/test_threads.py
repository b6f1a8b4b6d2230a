"""Blocking calls of a kind leave threads to the calls of the remaining kinds."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from streamer.admin.mapping.admin_threads import in_admin_thread
from streamer.util.waiting import in_thread

CROWD = 100


async def look_up() -> object:
    return await asyncio.get_running_loop().getaddrinfo("localhost", 80)


async def write_file() -> object:
    return await in_thread(lambda: "written")


async def answer() -> object:
    return await in_admin_thread(lambda: "answered")


@pytest.mark.parametrize(
    ("crowd", "others"),
    [
        (asyncio.to_thread, [write_file, answer]),  # look-ups of names that hang
        (in_admin_thread, [look_up, write_file]),
        (in_thread, [look_up, answer]),
    ],
    ids=["look-ups", "page", "files"],
)
async def test_a_crowd_of_calls_of_one_kind_stops_no_other(
    crowd: Callable[..., Awaitable[object]], others: list[Callable[[], Awaitable[object]]]
) -> None:
    released = threading.Event()
    calls = [asyncio.ensure_future(crowd(released.wait)) for _ in range(CROWD)]
    try:
        async with asyncio.timeout(20):
            for other in others:
                assert await other()
    finally:
        released.set()
        await asyncio.gather(*calls)
