"""Statements of a process that has lost the lock of a source do not reach the bookkeeping."""

import pytest

from streamer.errors import TargetMovedError
from streamer.mapping.rules import SourceMapping
from streamer.postgres.secret import Secret
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.lock import LockSession, SourceLock
from streamer.progress.schema import migrate
from streamer.progress.sources import set_source_state
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database

SOURCE = SourceMapping("shop", None, Secret(""), ())


async def test_a_claim_is_proved_for_each_use_of_the_bookkeeping(target: Database) -> None:
    address = TargetAddress.parse(Secret(target.url))
    bookkeeping = Bookkeeping(address)
    await migrate(bookkeeping)
    sessions = [LockSession(address, name) for name in ("first", "second")]
    locks = [SourceLock(session, SOURCE) for session in sessions]
    try:
        await locks[0].try_acquire()
        former = locks[0].claim
        held = bookkeeping.under(former)
        await set_source_state(held, former.source_id, "streaming")
        # The session of the lock ends alone: all other connections of the process stay.
        target.execute(f"select pg_terminate_backend({former.backend_pid}, 10000)")
        await locks[1].try_acquire()
        with pytest.raises(TargetMovedError):
            await set_source_state(held, former.source_id, "error")
        assert target.value("select state from streamer.source") == "streaming"
        now = bookkeeping.under(locks[1].claim)
        await set_source_state(now, former.source_id, "waiting")
        assert target.value("select state from streamer.source") == "waiting"
    finally:
        await bookkeeping.close()
        for session in sessions:
            await session.close()
