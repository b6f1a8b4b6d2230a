"""Statements of a process that has lost the lock of a source do not reach the bookkeeping."""

import asyncio
import itertools
from dataclasses import replace
from unittest import mock

import pytest

from streamer.bookkeeping.bookkeeping import SINGLE_SESSION_SOURCES, Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import migrate
from streamer.bookkeeping.positions import AcknowledgedPosition, AcknowledgedPositions
from streamer.bookkeeping.source_lock import LockSession
from streamer.bookkeeping.sources import set_source_state
from streamer.errors.error_classes import TargetConnectionError, TargetFencedError, TargetMovedError
from streamer.mapping.rules import SourceMapping
from streamer.postgres.secret import Secret
from streamer.source.history_check import CommittedTransaction
from streamer.target.connection import TargetAddress, TargetConnection
from streamer.target.fencing_token import FENCE_SQL, TOKEN_SQL, FencingToken
from streamer.target.session_counts import BOOKKEEPING_MAX
from streamer.util.lsn import Lsn
from tests.support.postgres import Database

SOURCE = SourceMapping("shop", None, Secret(""), ())


async def acquire(session: LockSession, sid: str | None = None) -> FencingToken:
    fence = await session.acquire(replace(SOURCE, sid=sid))
    assert isinstance(fence, FencingToken)
    return fence


async def test_a_claim_is_proved_for_each_use_of_the_bookkeeping(target: Database) -> None:
    address = TargetAddress.parse(Secret(target.url))
    bookkeeping = Bookkeeping(address)
    await migrate(bookkeeping)
    sessions = [LockSession(address, name) for name in ("first", "second")]
    try:
        former = await acquire(sessions[0])
        held = bookkeeping.under(former)
        await set_source_state(held, former.source_id, "streaming")
        # The session of the lock ends alone: all further connections of the process stay.
        target.execute(f"select pg_terminate_backend({former.backend_pid}, 10000)")
        fence = await acquire(sessions[1])
        with pytest.raises(TargetMovedError):
            await set_source_state(held, former.source_id, "error")
        assert target.value("select state from streamer.source") == "streaming"
        now = bookkeeping.under(fence)
        await set_source_state(now, former.source_id, "waiting")
        assert target.value("select state from streamer.source") == "waiting"
    finally:
        await bookkeeping.close()
        for session in sessions:
            await session.close()


async def test_a_session_reads_all_locks_once_for_each_holder(
    target: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = TargetAddress.parse(Secret(target.url))
    bookkeeping = Bookkeeping(address)
    await migrate(bookkeeping)
    await bookkeeping.close()
    holder = LockSession(address, "first")
    connection = await TargetConnection.connect(address, "test")
    fetch_value = mock.AsyncMock(wraps=connection.fetch_value)
    monkeypatch.setattr(connection, "fetch_value", fetch_value)

    def statements() -> list[str]:
        return [call.args[0] for call in fetch_value.await_args_list]

    try:
        fences = [await acquire(holder, sid) for sid in ("a", "b", "c")]
        target.execute("update streamer.source set lock_token = 'another' where sid = 'c'")
        for fence in fences[:2] * 2:
            await connection.verify_fence(fence)
        assert statements() == [FENCE_SQL, TOKEN_SQL]
        with pytest.raises(TargetMovedError):
            await connection.verify_fence(fences[2])
        # A new session holds the locks, perhaps on a new server.
        await holder.close()
        fence = await acquire(holder, "a")
        await connection.verify_fence(fence)
        assert statements()[3:] == [FENCE_SQL]
    finally:
        await connection.close()
        await holder.close()


async def test_many_sources_share_four_sessions_and_few_sources_share_one(
    target: Database,
) -> None:
    address = TargetAddress.parse(Secret(target.url))
    bookkeeping = Bookkeeping(address)
    await migrate(bookkeeping)
    holder = LockSession(address, "first")

    async def used() -> int:
        async with bookkeeping.under(await acquire(holder, next(sids))).connection() as session:
            return session.backend_pid

    sids = map(str, itertools.count())
    try:
        few = {await used() for _ in range(SINGLE_SESSION_SOURCES)}
        assert len(few) == 1
        assert len({await used() for _ in range(20)} | few) == BOOKKEEPING_MAX
        first, later = [bookkeeping.under(await acquire(holder, sid)) for sid in ("0", "60")]
        # No source waits for a source with another session.
        async with first.connection() as session, later.connection() as second:
            assert session.backend_pid != second.backend_pid
    finally:
        await bookkeeping.close()
        await holder.close()
    name = "streamer bookkeeping"
    assert not target.value(
        f"select count(*) from pg_stat_activity where application_name = '{name}'"
    )


async def test_sources_share_a_statement_and_each_keeps_its_own_right(
    target: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = TargetAddress.parse(Secret(target.url))
    bookkeeping = Bookkeeping(address)
    await migrate(bookkeeping)
    session = LockSession(address, "first")
    positions = AcknowledgedPositions(session)
    first = AcknowledgedPosition(Lsn(0), Lsn(16), 1.5, CommittedTransaction(Lsn(16), 7, 0), None)
    stored = "select array_agg(acknowledged_lsn::text order by sid) from streamer.source"
    try:
        fences = [await acquire(session, sid) for sid in ("a", "b", "c")]
        target.execute("update streamer.source set lock_token = 'another' where sid = 'c'")
        use_held = mock.Mock(wraps=session.use_held)
        monkeypatch.setattr(session, "use_held", use_held)
        outcomes = await asyncio.gather(
            *(positions.acknowledge(fence, first) for fence in fences), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [type(None)] * 2 + [TargetFencedError]
        assert use_held.call_count == 1
        assert target.value(stored) == ["0/10", "0/10", "0/0"]
        # The stored position differs from the position that the caller expects.
        with pytest.raises(TargetFencedError):
            await positions.acknowledge(fences[0], replace(first, lsn=Lsn(32)))
        second = replace(first, stored_lsn=Lsn(16), lsn=Lsn(32))
        await session.release(fences[1])
        with pytest.raises(TargetConnectionError):
            await positions.acknowledge(fences[1], second)
        await positions.acknowledge(fences[0], second)
        target.execute(f"select pg_terminate_backend({fences[0].backend_pid}, 10000)")
        with pytest.raises(TargetConnectionError):
            await positions.acknowledge(fences[0], replace(second, stored_lsn=Lsn(32)))
        assert target.value(stored) == ["0/20", "0/10", "0/0"]
    finally:
        await session.close()
        await bookkeeping.close()
