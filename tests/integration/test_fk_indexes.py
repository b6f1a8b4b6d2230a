"""streamer builds missing indexes of foreign keys beside the stream, and leaves no invalid index."""

import asyncio
import os
from typing import Any

import pytest

from streamer.commands.missing_indexes import missing_fk
from streamer.commands.table_requests import command_actor
from streamer.indexes import foreign_key_indexes as fk_indexes
from streamer.indexes import index_builder
from streamer.target.connection import TargetAddress
from tests.support.forks import ForkedProcess
from tests.support.postgres import Database, assert_same, ordinary_role
from tests.support.process import command
from tests.support.streamer import MakeStreamer, Streamer, write_config
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("without_spark", "deferred_indexes")

PEOPLE = "create table people (id int primary key, v text)"
ORDERS = "create table orders (id int primary key, person_id int references people, v text)"

TABLES = "people:\norders:"
BUILT: list[tuple[object, ...]] = [("orders", "person_id", True)]


async def look(streamer: Streamer, *, apply: bool = False) -> list[dict[str, Any]]:
    address = TargetAddress.parse(streamer.settings.target.url)
    namespace = streamer.settings.target.schema_
    found = await missing_fk(address, streamer.mapping, namespace, apply=apply)
    return [missing.to_json() for missing in found]


def ours(target: Database) -> list[tuple[object, ...]]:
    """Return our indexes: table, columns, whether valid."""
    return target.execute(
        "select indrelid::regclass::text, (regexp_match(pg_get_indexdef(indexrelid), '\\((.*)\\)'))[1],"
        " indisvalid from pg_index where indexrelid::regclass::text like '%streamer_fk_%' order by 1, 2"
    )


async def test_only_missing_indexes_are_built(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(
        PEOPLE
        + """;
        create table pairs (a int, b int, primary key (a, b));
        create table "or""ders" (id int primary key, "per son" int references people,
            hidden int references people, parent int references "or""ders");
        create table indexed (id int primary key, person_id int references people, a int, b int,
            foreign key (a, b) references pairs);
        create index on indexed (person_id, id); create index on indexed (b, a);
        create table hist (id int primary key, person_id int references people);
        create table parted (id int primary key, person_id int references people);
        insert into people values (1); insert into "or""ders" values (1, 1, 1, 1);
        insert into hist values (1, 1); insert into parted values (1, 1), (5, 1);
        """
    )
    target.execute(
        """
        create table indexed (sid text, id int, person_id int, a int, b int, primary key (sid, id));
        create index on indexed (person_id); create index on indexed (b, a, id);
        create table parted (sid text, id int, person_id int, primary key (sid, id)) partition by range (id);
        create table parted_1 partition of parted for values from (0) to (3);
        create table parted_2 partition of parted for values from (3) to (9) partition by range (id);
        create table "parted 2" partition of parted_2 for values from (3) to (9);
        create table other (id int primary key);
        create table people (sid text, id int, v text, other_id int references other, primary key (sid, id));
        """
    )
    tables = """
    people:
    pairs:
    'or"ders': {target: 'o"', columns: {id: id, "per son": person, parent: parent}}
    indexed:
    hist: {type: history}
    parted:
    """
    async with stream(tables, sid="eu") as streamer:
        await streamer.caught_up()
        found = await look(streamer)
        assert {missing["state"] for missing in found} == {"missing"}
        assert {(missing["target"], *missing["columns"]) for missing in found} == {
            ('public.o"', "sid", "parent"),
            ('public.o"', "sid", "person"),
            ("public.hist", "sid", "person_id"),
            ("public.parted", "sid", "person_id"),
            ("public.people", "other_id"),
        }
        built = await look(streamer, apply=True)
        assert [(m["state"], m["reason"]) for m in built] == [("built", None)] * 5
        assert target.execute(
            "select actor, label, options ->> 'index' from streamer.request"
            " where action = 'build index' order by id"
        ) == [(command_actor(), m["target"], m["index"]) for m in built]
        assert await look(streamer) == []
        assert ours(target) == [
            ('"o"""', "sid, parent", True),
            ('"o"""', "sid, person", True),
            ('"parted 2"', "sid, person_id", True),
            ("hist", "sid, person_id", True),
            ("parted", "sid, person_id", True),
            ("parted_1", "sid, person_id", True),
            ("people", "other_id", True),
        ]
        # PostgreSQL does not record the origin of an index that the table has attached.
        attached = "select count(*) from pg_inherits i join pg_class c on c.oid = i.inhrelid and c.relkind in ('i', 'I') where pg_get_indexdef(c.oid) like '%person_id%'"
        assert target.value(attached) == 3
        printed = command(streamer.path, "indexes", "--missing-fk", "--json")
        assert (printed.returncode, printed.stdout) == (0, '{\n  "indexes": []\n}\n')


async def test_run_builds_them_once_tables_are_in_step_and_never_while_they_lag(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_builder, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(fk_indexes, "LAG_BYTES_MAX", 100_000)
    source.execute(f"{PEOPLE}; {ORDERS}; insert into people select generate_series(1, 100)")
    source.execute("insert into orders select g, g from generate_series(1, 100) g")
    async with stream(TABLES) as streamer:
        await streamer.caught_up()
        assert ours(target) == [], "nobody asked for them"
    monkeypatch.setenv("STREAMER_TARGET__CREATE_FK_INDEXES", "true")
    rounds = 0
    read_once = fk_indexes.find_missing_indexes

    async def find_missing_indexes(*arguments: Any) -> Any:
        nonlocal rounds
        rounds += 1
        return await read_once(*arguments)

    monkeypatch.setattr(index_builder, "find_missing_indexes", find_missing_indexes)
    source.execute(
        "insert into people select g, repeat('x', 500) from generate_series(101, 1000) g"
    )
    with target.connect() as blocker:
        blocker.execute("begin; lock table people in exclusive mode")
        async with stream(TABLES) as streamer:

            async def has_looked_often() -> bool:
                return rounds > 8

            await streamer.eventually(has_looked_often)
            (missing,) = await look(streamer)
            assert missing["state"] == "waiting"
            assert "lags by" in missing["reason"]
            assert ours(target) == []
            blocker.execute("rollback")
            await streamer.eventually(lambda: is_built(target))
            await streamer.caught_up()
            assert_same(source, target, "people")


async def is_built(target: Database) -> bool:
    return ours(target) == BUILT


async def test_a_paused_table_gets_none(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(f"{PEOPLE}; {ORDERS}")
    async with stream(TABLES) as streamer:
        await streamer.caught_up()
        paused = await asyncio.to_thread(command, streamer.path, "pause", "orders")
        assert paused.returncode == 0, paused.stderr
        await streamer.table_state("public.orders", "paused")
        result = command(streamer.path, "indexes", "--missing-fk", "--apply")
        assert result.returncode == 1
        assert "public.orders: waiting, the table of shop is in state paused" in result.stdout
        assert ours(target) == []


def start(streamer: Streamer) -> ForkedProcess:
    """Let a process build the missing indexes."""
    return ForkedProcess(
        "streamer",
        ["--config", str(streamer.path), "indexes", "--missing-fk", "--apply"],
        environment=dict(os.environ),
        stdout=streamer.path.with_name("stdout"),
        stderr=streamer.path.with_name("stderr"),
    )


BUILDING = (
    "select pid from pg_stat_activity where datname = current_database()"
    " and query like 'create index concurrently%' and wait_event_type = 'Lock'"
)


async def test_the_index_of_a_killed_build_is_dropped_and_built_again(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute(f"{PEOPLE}; {ORDERS}")
    async with stream(TABLES) as streamer:
        await streamer.caught_up()
    with target.connect() as user:
        user.execute("begin; insert into orders values (7)")
        process = start(streamer)
        eventually(lambda: target.execute(BUILDING), 60, "it waits for the user's transaction")
        process.kill()
        process.wait()
        # The backend continues, so the index is not a leftover yet.
        (result,) = await look(streamer, apply=True)
        assert (result["state"], "another process builds" in result["reason"]) == ("failed", True)
        assert ours(target) == [("orders", "person_id", False)]
        target.execute(f"select pg_terminate_backend(pid) from ({BUILDING}) b")
        eventually(lambda: not target.execute(BUILDING))
        # Given up after a while, and said so.
        monkeypatch.setattr(fk_indexes, "LOCK_SECONDS", 1)
        (result,) = await look(streamer, apply=True)
        assert (result["state"], "lock timeout" in result["reason"]) == ("failed", True)
        user.execute("rollback")
    (result,) = await look(streamer, apply=True)
    assert result["state"] == "built"
    assert ours(target) == BUILT


async def test_a_truncate_that_meets_a_build_passes(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    """The build waits for a user, the TRUNCATE for the build: neither blocks the other."""
    source.execute(f"{PEOPLE}; {ORDERS}; insert into orders values (1)")
    async with stream(TABLES) as streamer:
        await streamer.caught_up()
        with target.connect() as user:
            user.execute("begin; select * from orders; insert into orders values (7)")
            building = asyncio.create_task(look(streamer, apply=True))

            async def is_waiting() -> bool:
                return bool(target.execute(BUILDING))

            await streamer.eventually(is_waiting)
            source.execute("truncate orders; insert into orders values (2), (3)")
            # The worker sends BEGIN and TRUNCATE as a single query.
            truncating = (
                "select pid from pg_stat_activity where datname = current_database()"
                " and application_name like 'streamer %' and wait_event_type = 'Lock'"
                """ and query ilike '%truncate only "public"."orders"%'"""
            )

            async def is_truncating() -> bool:
                return bool(target.execute(truncating))

            await streamer.eventually(is_truncating)
            user.execute("rollback")
        (result,) = await building
        assert result["state"] == "built"
        await streamer.caught_up()
        assert_same(source, target, "orders")
        assert ours(target) == BUILT


@pytest.mark.follows("indexes.foreign_key_indexes:_build_once")
async def test_a_table_of_somebody_else_is_reported_with_the_sql_to_run(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(f"{PEOPLE}; {ORDERS}")
    async with stream(TABLES) as streamer:
        await streamer.caught_up()
        with ordinary_role(target) as role:
            target.execute(
                f"grant usage on schema streamer to {role};"
                f" grant all on all tables in schema streamer, public to {role}"
            )
            write_config(streamer.path, source, target, TABLES)
            result = command(streamer.path, "indexes", "--missing-fk", "--apply")
            target.url_user = "postgres"
        assert result.returncode == 1
        assert (
            "failed, target: must be owner of table orders; run at the target as the"
            in result.stdout
        )
        printed = result.stdout.partition("table's owner: ")[2].splitlines()[0]
        assert 'on "public"."orders" ("person_id")' in printed
        target.execute(printed)
        assert await look(streamer) == []
