"""Synchronous mode: a COMMIT at the source returns once the target has the transaction."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from streamer.commands.check.findings import Severity
from streamer.commands.embedded import Server
from streamer.source.synchronous import LISTED_SQL
from tests.support.checking import Checker
from tests.support.postgres import Database, database, running, versions
from tests.support.streamer import MakeStreamer
from tests.support.waiting import eventually, until

LISTED = 'FIRST 1 ("streamer shop")'


@pytest.fixture(scope="module")
def synchronous_server(server_directory: Path) -> Iterator[Server]:
    """A server of its own: the target's commits must not wait for the source's standbys."""
    settings = {"synchronous_standby_names": LISTED}
    with running(server_directory / "synchronous", versions()["18"], settings) as server:
        server.execute(
            "set synchronous_commit = local; alter role postgres set synchronous_commit = local"
        )
        yield server


@pytest.fixture
def source(synchronous_server: Server) -> Iterator[Database]:
    with database(synchronous_server, "synchronous") as made:
        yield made


def list_standbys(source: Database, names: str) -> None:
    source.server.configure(synchronous_standby_names=names)
    source.execute("select pg_reload_conf()")
    eventually(lambda: source.value("show synchronous_standby_names") == names)


def waiting_commits(source: Database) -> int:
    return int(
        str(source.value("select count(*) from pg_stat_activity where wait_event = 'SyncRep'"))
    )


async def test_a_commit_returns_when_the_target_has_it(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute("create role program login superuser; create table t (id int primary key)")
    source.url_user = "program"
    insert = "set synchronous_commit = on; insert into t values ({})"
    async with await psycopg.AsyncConnection.connect(source.url, autocommit=True) as application:
        async with stream("t: {initial: none}") as streamer:
            # The program publishes tables and creates its slot before anything confirms commits.
            await streamer.table_state("public.t", "ready")
            for number in range(1, 4):
                await application.execute(insert.format(number))
                assert target.value("select max(id) from t") == number
        # While no program runs, a commit waits. The next program confirms it.
        committing = asyncio.create_task(application.execute(insert.format(4)))

        async def waits() -> bool:
            return waiting_commits(source) == 1

        await until(waits)
        async with stream("t: {initial: none}"):
            await committing
            assert target.value("select max(id) from t") == 4


def test_a_session_knows_whether_commits_wait_for_its_name(source: Database) -> None:
    cases = {
        'FIRST 1 ("streamer shop")': True,
        'ANY 1 (other, "STREAMER Shop")': True,
        "2 (other, *)": True,
        "": False,
        "streamer, shop": False,
        '"streamer shop:eu"': False,
        '"a ""streamer shop"" b"': False,
    }
    ask = f"set application_name = 'streamer shop'; select {LISTED_SQL}"
    for names, expected in cases.items():
        list_standbys(source, names)
        assert source.value(ask) is expected, names
    list_standbys(source, LISTED)


async def test_check_names_the_commits_that_wait(
    source: Database, target: Database, tmp_path: Path
) -> None:
    source.execute("create table t (id int primary key)")
    checker = Checker(tmp_path / "config.yaml", source, target)
    checker.configure("t:")
    await checker.finds(
        Severity.INFO, "commits at this source wait until streamer has confirmed them"
    )
