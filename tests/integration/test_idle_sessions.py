"""Sessions at the target that several sources use in turn."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from streamer.bookkeeping.bookkeeping_schema import installed
from streamer.bookkeeping.source_lock import LockSession
from streamer.errors.error_classes import TargetMovedError
from streamer.mapping.rules import SourceMapping
from streamer.postgres.secret import Secret
from streamer.target.connection import TargetAddress
from streamer.target.fencing_token import FencingToken
from streamer.target.idle_sessions import IdleSessions
from tests.support.postgres import Database

FACTS = (
    "select pg_backend_pid(), current_setting('application_name'), current_setting('lock_timeout')"
)


@pytest.fixture
async def address(target: Database) -> TargetAddress:
    address = TargetAddress.parse(Secret(target.url))
    async with installed(address, "test"):
        return address


@pytest.fixture
async def holder(address: TargetAddress) -> AsyncIterator[LockSession]:
    holder = LockSession(address, "holder")
    yield holder
    await holder.close()


@pytest.fixture
async def make_pool(address: TargetAddress) -> AsyncIterator[Callable[[float], IdleSessions]]:
    pools: list[IdleSessions] = []

    def make(seconds: float) -> IdleSessions:
        pools.append(IdleSessions(address, seconds))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()


async def acquire(holder: LockSession, sid: str) -> FencingToken:
    fence = await holder.acquire(SourceMapping("shop", sid, Secret(""), ()))
    assert isinstance(fence, FencingToken)
    return fence


async def use(pool: IdleSessions, fence: FencingToken, name: str) -> tuple[object, ...]:
    async with pool.session(fence, name) as session:
        (row,) = await session.fetch(FACTS)
        await session.execute("set lock_timeout = '7s'")
        return tuple(row.values())


async def test_sources_use_a_session_in_turn_and_each_without_the_settings_of_the_former(
    make_pool: Callable[[float], IdleSessions], holder: LockSession, target: Database
) -> None:
    pool = make_pool(60.0)
    fences = [await acquire(holder, sid) for sid in ("a", "b")]
    pid, *facts = await use(pool, fences[0], "streamer sync 1")
    assert facts == ["streamer sync 1", "0"]
    assert await use(pool, fences[1], "streamer's sync 2") == (pid, "streamer's sync 2", "0")
    async with pool.session(fences[0], "first"), pool.session(fences[1], "second") as second:
        assert second.backend_pid != pid
    # Another process has taken over the source: the session stays for the other source only.
    target.execute("update streamer.source set lock_token = 'another' where sid = 'a'")
    with pytest.raises(TargetMovedError):
        await use(pool, fences[0], "streamer sync 1")
    await use(pool, fences[1], "streamer sync 2")
    await pool.close()
    assert not target.value(
        "select count(*) from pg_stat_activity where application_name ~ 'sync|first|second'"
    )


async def test_a_session_closes_after_a_failure_and_after_a_while(
    make_pool: Callable[[float], IdleSessions], holder: LockSession, target: Database
) -> None:
    fence = await acquire(holder, "a")
    pool = make_pool(60.0)
    with pytest.raises(asyncio.CancelledError):
        async with pool.session(fence, "streamer sync 1") as session:
            raise asyncio.CancelledError
    assert session.is_closed
    pool = make_pool(0.1)
    async with pool.session(fence, "streamer sync 1") as session:
        pass
    assert not session.is_closed
    async with asyncio.timeout(30):
        while not session.is_closed:  # noqa: ASYNC110
            await asyncio.sleep(0)
