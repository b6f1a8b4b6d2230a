"""A connection that is cancelled during the opening leaves no session at the target."""

import asyncio
import contextlib
import gc
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest

from streamer.apply.write.target_transaction import TargetTransaction
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import is_installed, migrate
from streamer.bookkeeping.source_lock import LockSession
from streamer.mapping.rules import SourceMapping
from streamer.observability.metrics import Metrics
from streamer.postgres.secret import Secret
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database
from tests.support.waiting import until

NAME = "streamer cancelled"
STEP_SECONDS = 0.0003


@pytest.fixture
def no_collection() -> Iterator[None]:
    """An unclosed connection stays open: garbage collection does not close the connection."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@contextlib.asynccontextmanager
async def bookkeeping(address: TargetAddress) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    made = Bookkeeping(address, NAME)
    yield partial(is_installed, made)
    await made.close()


@contextlib.asynccontextmanager
async def lock(address: TargetAddress) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    session = LockSession(address, NAME)
    yield partial(session.acquire, SourceMapping("shop", None, Secret(""), ()))
    await session.close()


@contextlib.asynccontextmanager
async def applier(address: TargetAddress) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    made = TargetTransaction(address, NAME, Metrics(), lock_seconds=1)
    yield made.connect
    await made.close()


@pytest.mark.parametrize("connector", [bookkeeping, lock, applier])
async def test_cancelled_at_any_moment(
    connector: Callable[
        [TargetAddress], contextlib.AbstractAsyncContextManager[Callable[[], Awaitable[object]]]
    ],
    target: Database,
    no_collection: None,
) -> None:
    address = TargetAddress.parse(Secret(target.url))
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    setting_up = Bookkeeping(address)
    await migrate(setting_up)
    await setting_up.close()
    for step in itertools.count():
        async with connector(address) as connect:
            connecting = asyncio.ensure_future(connect())
            await asyncio.wait([connecting], timeout=step * STEP_SECONDS)
            was_cancelled = connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await connecting
        if not was_cancelled:
            break
    assert step > 5
    gc.collect()
    assert not unhandled, "no failure is left for asyncio to log"
    open_sessions = f"select count(*) from pg_stat_activity where application_name like '%{NAME}%'"
    await until(lambda: not target.value(open_sessions), "no session stays")
