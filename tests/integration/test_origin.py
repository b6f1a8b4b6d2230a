"""Databases that feed each other, or in a chain: streamer tags replicated changes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from streamer.commands.demo.embedded_servers import Server
from streamer.postgres import replication_origin
from streamer.postgres.quoting import quote_identifier
from streamer.postgres.secret import Secret
from streamer.target.connection import TargetAddress, TargetConnection, transaction
from tests.support.postgres import Database, assert_same, database, running, versions
from tests.support.streamer import Streamer, write_config
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("without_spark")

DDL = """
create table t (id int primary key, v text);
create table whole (a int, b text); alter table whole replica identity full;
"""


@pytest.fixture(params=["shared", "oldest"])
def server(
    request: pytest.FixtureRequest, shared_server: Server, servers: Callable[[str], Server]
) -> Server:
    """The shared server, and the oldest server here: before 16, decoding cannot leave out tagged
    changes.
    """
    return shared_server if request.param == "shared" else servers(min(versions(), key=int))


@asynccontextmanager
async def streaming(
    path: Path,
    source: Database,
    target: Database,
    tables: str,
    sid: str | None = None,
    group: str = "",
) -> AsyncIterator[Streamer]:
    """Stream from *source* to *target*. Slots of a server need different names: *sid*."""
    await asyncio.to_thread(path.mkdir)
    # Few workers: a server has place for ten origins by default.
    config, few = path / "config.yaml", "workers: 2"
    write_config(config, source, target, tables, sid=sid, group=group, settings=few)
    streamer = Streamer(config)
    streamer.start()
    try:
        yield streamer
    finally:
        await streamer.stop()


async def test_two_databases_that_feed_each_other(server: Server, tmp_path: Path) -> None:
    with database(server, "left") as left, database(server, "right") as right:
        for db in (left, right):
            db.execute(DDL)
        left.execute("insert into t select g, 'copied' from generate_series(1, 100) g")
        left.execute("insert into whole values (1, 'x'), (1, 'x')")
        streamed = "{initial: none}"
        async with AsyncExitStack() as stack:
            back = await stack.enter_async_context(
                streaming(
                    tmp_path / "back", right, left, f"t: {streamed}\nwhole: {streamed}", "back"
                )
            )
            await back.caught_up()
            # Rows copied to the right, and removed there for a new copy, stay at the left.
            forth = await stack.enter_async_context(
                streaming(tmp_path / "forth", left, right, "t:\nwhole:", "forth")
            )
            await forth.caught_up()
            resync(right)
            await forth.eventually(lambda: has_copied_twice(right))
            await forth.caught_up()
            for n in range(5):
                left.execute(
                    f"insert into t values ({1000 + n}, 'left'); update t set v = v || 'l'"
                    f" where id % 10 = {n}; insert into whole values ({n}, 'left')"
                )
                right.execute(
                    f"insert into t values ({2000 + n}, 'right'); update t set v = v || 'r'"
                    f" where id % 10 = {5 + n}; insert into whole values ({n}, 'right')"
                )
            left.execute("delete from t where id = 1; update t set id = 5001 where id = 11")
            right.execute("delete from t where id = 6; delete from whole where b = 'x'")
            large = "insert into t select g, repeat('large', 20) from generate_series({}, {}) g"
            left.execute(large.format(10_000, 40_000))
            right.execute(large.format(50_000, 80_000))
            for _ in range(2):
                await forth.caught_up()
                await back.caught_up()
            for table in ("t", "whole"):
                assert_same(left, right, table)
            assert left.value("select count(*) from t") == 100 + 10 - 2 + 2 * 30_001
            assert left.value("select count(*) from whole") == 10
            for streamer in (forth, back):
                (counted,) = streamer.engine.metrics.conflicts.collect()
                assert not [sample for sample in counted.samples if sample.value], (
                    "something came again"
                )


def resync(target: Database) -> None:
    target.execute(
        "insert into streamer.request (relation_id, action)"
        " select id, 'resync' from streamer.relation where source = 'public.t'; notify streamer"
    )


async def has_copied_twice(target: Database) -> bool:
    attempts = "select attempt >= 2 from streamer.relation where source = 'public.t'"
    return bool(target.value(attempts))


async def test_a_cascade_forwards_changes_with_its_own_commit_times(
    server: Server, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as databases:
        first, second, third = (
            databases.enter_context(database(server, name)) for name in ("one", "two", "three")
        )
        first.execute(DDL)
        first.execute("insert into t values (1, 'copied')")
        async with streaming(tmp_path / "1", first, second, "t:") as upper:
            await upper.caught_up()
            async with streaming(
                tmp_path / "2",
                second,
                third,
                "t: {type: history}",
                "b",
                "forward_origins: true",
            ) as lower:
                await lower.caught_up()
                began = second.value("select clock_timestamp()")
                for n in range(3):
                    first.execute(f"update t set v = '{n}'; insert into t values ({10 + n}, 'n')")
                    await upper.caught_up()
                second.execute("insert into t values (20, 'second')")
                resync(second)
                await upper.eventually(lambda: has_copied_twice(second))
                await upper.caught_up()
                await lower.caught_up()
                assert third.execute(
                    "select id, v from t where kvsz_end > '9000-01-01' order by 1"
                ) == first.execute("select id, v from t order by 1")
                times = [
                    row[0]
                    for row in third.execute(
                        "select kvsz_start from t where id = 1 and not kvsz_deleted"
                        " and kvsz_start > '1900-01-02' order by kvsz_id"
                    )
                ]
                # Each transaction has its own time, not the time of the session's first
                # transaction.
                assert len(times) == len(set(times)) >= 3
                assert min(times) >= began  # type: ignore[type-var,operator]


async def test_without_the_right_it_goes_on_unmarked_and_with_it_marked(
    shared_server: Server, tmp_path: Path
) -> None:
    role = "unprivileged_writer"
    shared_server.execute(f"create role {role} login")
    try:
        with (
            database(shared_server, "source") as source,
            database(shared_server, "target") as target,
        ):
            for db in (source, target):
                db.execute(DDL)
            target.execute(
                f'grant create on database "{target.name}" to {role};'
                f"grant usage, create on schema public to {role};"
                f"grant all on t to {role}"
            )
            target.url_user = role
            async with streaming(tmp_path / "1", source, target, "t: {initial: none}", "x") as it:
                await it.caught_up()
                source.execute("insert into t values (1, 'unmarked')")
                await it.caught_up()
                assert_same(source, target, "t")
            assert not own_origins(target)
            for statement in replication_origin.grants_sql(quote_identifier(role)):
                target.execute(statement)
            path = tmp_path / "1" / "config.yaml"
            again = Streamer(path)
            again.start()
            source.execute("insert into t values (2, 'marked')")
            await again.caught_up()
            assert_same(source, target, "t")
            assert own_origins(target)
            await again.stop()
    finally:
        shared_server.execute(f"drop role {role}")


def own_origins(db: Database) -> list[str]:
    oid = db.value("select oid from pg_database where datname = current_database()")
    rows = db.execute("select roname from pg_replication_origin")
    return [str(name) for (name,) in rows if str(name).startswith(f"streamer_{oid}_")]


def set_up(connection: Any) -> tuple[object, ...]:
    connection.execute(replication_origin.SET_UP_SQL.encode())
    result: tuple[object, ...] = connection.execute(replication_origin.RESULT_SQL).fetchone()
    return result


def ended(db: Database, left: int) -> None:
    """Wait until only *left* sessions have an origin: a closed session keeps its origin for a
    moment.
    """
    used = "select count(*) from pg_locks where locktype = 'advisory' and pid <> pg_backend_pid()"
    here = f"{used} and database = (select oid from pg_database where datname = current_database())"
    eventually(lambda: db.value(here) == left, what="closed sessions end")


def test_places_of_dropped_databases_are_taken_when_there_are_no_others(
    server_directory: Path,
) -> None:
    settings = {"max_replication_slots": "3", "max_active_replication_origins": "3"}
    major = max(versions(), key=int)
    if int(major) < 18:
        del settings["max_active_replication_origins"]
    with running(server_directory / "origins", versions()[major], settings) as server:
        with contextlib.ExitStack() as stack, database(server, "gone") as gone:
            tagged = [set_up(stack.enter_context(gone.connect()))[0] for _ in range(4)]
            # Three places: the fourth goes without.
            assert tagged == [True, True, True, False]
            stack.close()
            ended(gone, 0)
            with gone.connect() as other:
                # A session that ended frees the origin for the next.
                assert set_up(other)[0] is True
                assert len(own_origins(gone)) == 3
        with database(server, "kept") as kept, kept.connect() as one, kept.connect() as two:
            assert (set_up(one)[0], set_up(two)[0]) == (True, True)
            assert len(own_origins(kept)) == 2
            one.close()
            ended(kept, 1)
            kept.execute(replication_origin.DROP_SQL)
            assert len(own_origins(kept)) == 1, "what is in use is left"


async def test_a_session_that_has_an_origin_keeps_it(target: Database) -> None:
    """A round finishes several copies over one session, and each copy requests an origin."""
    target.execute("create table t (id int)")
    session = await TargetConnection.connect(TargetAddress.parse(Secret(target.url)), "streamer")
    try:
        for number in range(2):
            await session.set_up_origin()
            async with transaction(session):
                await session.execute(f"insert into public.t values ({number})")
            (row,) = await session.fetch(replication_origin.RESULT_SQL)
            assert row["tagged"]
    finally:
        await session.close()
