"""Connections to a source that serve several questions."""

from collections.abc import AsyncIterator

import pytest

from streamer.errors.error_classes import SourceError
from streamer.mapping.rules import SourceMapping
from streamer.postgres.secret import Secret
from streamer.source.connection import fetch_one
from streamer.source.server.idle_connections import IdleConnections
from streamer.source.server.wait_limits import set_lock_timeout
from tests.support.postgres import Database
from tests.support.waiting import until

SESSIONS = "select count(*) from pg_stat_activity where application_name = 'streamer shop'"


@pytest.fixture
async def kept() -> AsyncIterator[IdleConnections]:
    made = IdleConnections(60)
    yield made
    await made.close()


async def backend(kept: IdleConnections, source: SourceMapping) -> int:
    """Run a query; return the backend that answered."""
    async with kept.connection(source) as plain:
        assert (await fetch_one(plain, "show lock_timeout"))["lock_timeout"] == "0"
        await set_lock_timeout(plain, 5)
        return int((await fetch_one(plain, "select pg_backend_pid() as pid"))["pid"])


async def test_questions_in_a_row_share_a_session_and_those_at_one_time_do_not(
    source: Database, kept: IdleConnections
) -> None:
    shop = SourceMapping("shop", None, Secret(source.url), ())
    first = await backend(kept, shop)
    async with kept.connection(shop):
        assert await backend(kept, shop) != first
    assert source.value(SESSIONS) == 1
    second = await backend(kept, shop)

    source.execute(f"select pg_terminate_backend({second}, 10000)")
    third = await backend(kept, shop)
    assert third != second, "a session that the server ended serves no question"

    with pytest.raises(SourceError):
        async with kept.connection(shop) as plain:
            await plain.execute("select 1 / 0")
    fourth = await backend(kept, shop)
    assert fourth != third, "nor does one whose question failed"

    await kept.close()
    await until(lambda: source.value(SESSIONS) == 0)
    brief = IdleConnections(0.2)
    await backend(brief, shop)
    await until(lambda: source.value(SESSIONS) == 0, "its time is over")
