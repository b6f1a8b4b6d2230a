"""Synchronous mode: a COMMIT at the source returns once the target has the transaction."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from streamer.commands.demo.embedded_servers import Server
from streamer.report.problems import Severity
from streamer.source.synchronous_commit import LISTED_SQL
from streamer.util.failpoints import VARIABLE
from tests.support.checking import Checker
from tests.support.postgres import Database, contents, database, running, versions
from tests.support.process import Process, command
from tests.support.streamer import MakeStreamer
from tests.support.waiting import eventually, until

LISTED = 'FIRST 1 ("streamer shop")'


@pytest.fixture(scope="module")
def synchronous_server(server_directory: Path) -> Iterator[Server]:
    """A separate server: the target's commits must not wait for the source's standbys."""
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
            # The program publishes tables and creates the slot before a standby confirms commits.
            await streamer.table_state("public.t", "ready")
            for number in range(1, 4):
                await application.execute(insert.format(number))
                assert target.value("select max(id) from t") == number
        # While no program runs, a commit waits. The next program confirms the commit.
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


async def test_a_first_slot_that_waits_for_a_commit_says_so(
    source: Database, target: Database, stream: MakeStreamer, without_spark: None
) -> None:
    """No standby confirms commits before the slot exists."""
    role = f"program_{source.name}"
    source.execute(f"create role {role} login superuser; create table t (id int primary key)")
    source.url_user = role
    sql = "set synchronous_commit = on; insert into t values (1)"
    async with await psycopg.AsyncConnection.connect(source.url, autocommit=True) as application:
        committing = asyncio.create_task(application.execute(sql))

        async def waits() -> bool:
            return waiting_commits(source) == 1

        await until(waits)
        async with stream("t:") as streamer:

            async def is_told() -> bool:
                told = str((await streamer.status())["waiting_for"])
                return "whose commit waits for synchronous_standby_names" in told

            await streamer.eventually(is_told)
            list_standbys(source, "")
            await committing
            await streamer.table_state("public.t", "ready")
            assert target.value("select id from t") == 1
    list_standbys(source, LISTED)


@pytest.mark.parametrize("mode", ["reload", "diff", "killed"])
async def test_commits_that_wait_for_streamer_do_not_keep_a_copy_waiting(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    without_spark: None,
    mode: str,
) -> None:
    """The slot of a copy waits for transactions, which wait for the held changes of the table."""
    role = f"program_{source.name}"
    source.execute(
        f"create role {role} login superuser; create table t (id int primary key, v int default 0);"
        "create table u (id int primary key, v int default 0);"
        "insert into t select generate_series(1, 9); insert into u select generate_series(1, 9)"
    )
    source.url_user = role
    count = 0

    async def write(table: str, number: int) -> None:
        nonlocal count
        sql = f"update {table} set v = v + 1 where id = {number}"
        async with await psycopg.AsyncConnection.connect(source.url, autocommit=True) as session:
            await session.execute("set synchronous_commit = on")
            while True:
                await session.execute(sql)
                count += 1

    rules = "t: {}\nu: {}"
    async with stream(rules) as streamer, asyncio.TaskGroup() as group:
        await streamer.caught_up()
        writers = [group.create_task(write(table, n)) for table in "tu" for n in range(1, 4)]
        if mode == "killed":
            await streamer.stop()
            armed = {VARIABLE: "sync.slot_created=kill"}
            with Process(streamer.path, environment=armed, spark=False) as process:
                request = command(streamer.path, "resync", "t")
                assert request.returncode == 0, request.stderr
                assert await asyncio.to_thread(process.process.wait, 60) == -signal.SIGKILL
            streamer.start()
        else:
            await streamer.ask("resync", "public.t", mode=mode)

        async def is_copied() -> bool:
            done = "select resync is null and state = 'ready' from streamer.relation"
            return bool(target.value(f"{done} where source = 'public.t'"))

        await streamer.eventually(is_copied)
        before = count

        async def commits() -> bool:
            return count > before + 10

        await until(commits)
        for writer in writers:
            writer.cancel()
        await streamer.caught_up()

        # The target may have rows that the source shows only after the answer of streamer.
        async def is_equal() -> bool:
            return all(contents(source, table) == contents(target, table) for table in "tu")

        await streamer.eventually(is_equal)
