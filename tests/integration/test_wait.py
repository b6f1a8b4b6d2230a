"""Waiting for tables and sources, also for an unreachable source."""

import asyncio
from pathlib import Path

import pytest

from streamer.commands.status import read_report
from streamer.commands.status_problems import sources_with_problems
from streamer.commands.table_requests import request
from streamer.commands.wait import wait
from streamer.mapping.scope import Scope
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database
from tests.support.proxy import Proxy
from tests.support.streamer import Streamer
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("without_spark", "short_backoffs")

CONFIG = """
target: {{url: "{target}"}}
http: {{listen: ""}}
spool: {{directory: {spool}}}
sources:
- database: shop
  urls: [{{url: "{source}"}}]
  tables: {{locked:, free:}}
- database: crm
  urls: [{{url: "{away}"}}]
  tables: {{other:}}
"""


async def test_wait_can_be_limited_and_waits_for_absent_sources_and_for_requests(
    source: Database, target: Database, source_proxy: Proxy, tmp_path: Path
) -> None:
    for table in ("locked", "free", "other"):
        source.execute(f"create table {table} (id int primary key)")
    away = source.url
    source.port = None
    path = tmp_path / "config.yaml"
    path.write_text(
        CONFIG.format(source=source.url, away=away, target=target.url, spool=tmp_path / "spool")
    )
    streamer = Streamer(path)
    address = TargetAddress.parse(streamer.settings.target.url)

    async def missing(seconds: float, *tables: str, database: str | None = None) -> str | None:
        return await wait(address, streamer.mapping, seconds, Scope(tables, database))

    streamer.start()
    try:
        await streamer.caught_up(40)
        with target.connect() as user:
            user.execute("begin")
            user.execute("lock table locked in access exclusive mode")
            source.execute("insert into locked values (1)")
            source.execute("insert into free values (1)")
            assert await missing(40, "free") is None
            assert target.value("select count(*) from free") == 1
            late, of_shop, of_nothing, of_crm = await asyncio.gather(
                missing(3, "locked", "free"),
                missing(3, database="shop"),
                missing(3, "nothing"),
                missing(40, database="crm"),
            )
            assert late is not None
            assert 'after 3 s: table "public.locked" of "shop": visible ' in late
            assert of_shop is not None
            assert 'no table "nothing" is streamed' in (of_nothing or "")
            assert of_crm is None
            user.execute("rollback")
        fleet = await read_report(address, streamer.mapping, scope=Scope(("fr*",)))
        assert [[t.source for t in s.tables] for s in fleet.sources] == [["public.free"]]
        source_proxy.leave()

        async def only_crm_has_a_problem() -> bool:
            return (
                await sources_with_problems(address, streamer.mapping, Scope())
            ).labels == frozenset({"crm"})

        await until(only_crm_has_a_problem, seconds=40)
        scope = await sources_with_problems(address, streamer.mapping, Scope())
        late = await wait(address, streamer.mapping, 4, scope)
        assert 'source "crm"' in (late or "")
        late = await missing(4)
        assert late is not None
        assert 'source "crm"' in late
        source.execute("insert into other values (1)")
        waiting = asyncio.create_task(missing(60))
        await asyncio.wait([waiting], timeout=2)
        assert not waiting.done(), "it waits for the source"
        source_proxy.heal()
        assert await waiting is None
        assert target.value("select count(*) from other") == 1
        await streamer.stop()
        await request(address, "resync", "free", database="shop", sid=None)
        waiting_for = 'after 2 s: table "public.free" of "shop" has a pending request'
        assert (await missing(2) or "").startswith(waiting_for)
        target.execute("truncate free")
        streamer.start()
        assert await missing(40) is None
        assert target.value("select count(*) from free") == 1
    finally:
        await streamer.stop()
