"""What commands say beside a purge and after a purge."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from streamer.commands.tenants.purge_rows import PurgeOutcome, purge
from streamer.commands.tenants.tenant_list import read_tenants, remark_of
from streamer.errors.error_classes import MappingError, TargetConnectionError
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database
from tests.support.process import command
from tests.support.streamer import Streamer

pytestmark = pytest.mark.usefixtures("without_spark", "short_backoffs")

CONFIG = """
target: {{url: "{target}"}}
http: {{listen: ""}}
spool: {{directory: {spool}}}
sources:
- database: shop
  urls: [{{url: "{source}", sid: {sid}}}]
  tables: {{a: , b: }}
"""
ROWS = "create table {0} (id int primary key, v text); insert into {0} select g, 'v' from generate_series(1, 3) g;"

WAITING = (
    "select pid from pg_stat_activity"
    " where application_name like 'streamer purge%' and wait_event_type = 'Lock'"
)


def configure(path: Path, source: Database, target: Database, sid: str) -> None:
    spool = path.parent / "spool"
    text = CONFIG.format(source=source.url, target=target.url, spool=spool, sid=sid)
    path.write_text(text)


@asynccontextmanager
async def tenant_removed(source: Database, target: Database, path: Path) -> AsyncIterator[Streamer]:
    """Stream a source whose former tenant "us" has rows of two tables in the target."""
    source.execute(ROWS.format("a") + ROWS.format("b"))
    file = path / "config.yaml"
    configure(file, source, target, "us")
    streamer = Streamer(file)
    streamer.start()
    try:
        await streamer.caught_up()
        configure(file, source, target, "eu")
        await streamer.apply()
        await streamer.caught_up()
        yield streamer
    finally:
        await streamer.stop()


@asynccontextmanager
async def purge_waiting(
    streamer: Streamer, target: Database
) -> AsyncIterator[asyncio.Task[PurgeOutcome]]:
    """Run a purge that has finished table a, and waits until the end of the block for table b."""
    mapping, address = streamer.mapping, TargetAddress.parse(streamer.settings.target.url)

    async def is_finished() -> bool:
        finished = "select count(*) from streamer.purge where finished_at is not null"
        return bool(target.value(finished)) and bool(target.execute(WAITING))

    with target.connect() as other:
        other.execute("begin; select from b where sid = 'us' for update")
        purging = asyncio.create_task(purge(address, mapping, "shop", "us", actor="test"))
        await streamer.eventually(is_finished)
        yield purging
        other.execute("commit")


async def test_a_purge_is_told_apart_from_a_process_that_streams_the_source(
    source: Database, target: Database, tmp_path: Path
) -> None:
    async with tenant_removed(source, target, tmp_path) as streamer:
        mapping, address = streamer.mapping, TargetAddress.parse(streamer.settings.target.url)
        async with purge_waiting(streamer, target) as purging:
            # WHEN a second purge begins, THEN the error names the first purge
            with pytest.raises(MappingError, match='another purge of "shop:us" runs'):
                await purge(address, mapping, "shop", "us", actor="test")
            # The list counts the rows of the finished table.
            (tenant,) = [t for t in await read_tenants(address, mapping) if t.sid == "us"]
            assert remark_of(tenant).endswith("; 3 rows deleted so far")
        outcome = await purging
        assert (outcome.rows_deleted, outcome.has_columns) == (6, False)


async def test_a_purge_mentions_columns_only_if_the_target_keeps_some(
    source: Database, target: Database, tmp_path: Path
) -> None:
    async with tenant_removed(source, target, tmp_path) as streamer:
        arguments = ("tenants", "purge", "shop", "--sid", "us", "--yes")
        done = await asyncio.to_thread(command, streamer.path, *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[-1] == "purged: 6 rows in 2 tables"
        again = await asyncio.to_thread(command, streamer.path, *arguments)
        assert again.stdout.splitlines()[-1] == "purged: 0 rows in 2 tables"


async def test_a_purge_that_loses_its_session_names_the_command_that_continues(
    source: Database, target: Database, tmp_path: Path
) -> None:
    async with tenant_removed(source, target, tmp_path) as streamer:
        mapping, address = streamer.mapping, TargetAddress.parse(streamer.settings.target.url)
        async with purge_waiting(streamer, target) as purging:
            target.execute(f"select pg_terminate_backend(pid) from ({WAITING}) w")
            with pytest.raises(TargetConnectionError) as lost:
                await purging
        assert str(lost.value).endswith(
            "; a new purge continues at the stored position: "
            "streamer tenants purge shop --sid us --yes"
        )
        outcome = await purge(address, mapping, "shop", "us", actor="test")
        assert outcome.rows_deleted == 6
