"""A copy reads a table as of the snapshot, and delays no DDL of the application."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from streamer.copy import copy_round
from streamer.copy.copy_snapshot import read_table_seen, read_tables_seen
from streamer.copy.parts import part_copier
from streamer.copy.spark.launcher import SparkLauncher
from streamer.mapping.relation_names import RelationName
from streamer.source.server import wait_limits
from streamer.source.slot_and_publications.slot import create_slot
from tests.support.postgres import Database, assert_same, contents
from tests.support.streamer import MakeStreamer, Streamer

pytestmark = pytest.mark.usefixtures("without_spark", "deferred_indexes")

Job = dict[str, Any]


def resync(target: Database) -> None:
    """Request all tables at once, so that a single round copies the tables."""
    target.execute(
        "insert into streamer.request (relation_id, action)"
        " select id, 'resync' from streamer.relation; notify streamer"
    )


def before_the_slot(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Call *act* once, after a round has read the tables and before the round makes the slot."""

    async def act_first(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(copy_round, "create_slot", create_slot)
        act()
        return await create_slot(*arguments, **options)

    monkeypatch.setattr(copy_round, "create_slot", act_first)


def before_the_first_job(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[Job], Awaitable[None]]
) -> list[int]:
    """Call *act* once, when parts are planned; return the number of parts of each job."""
    submit = SparkLauncher.submit
    sizes: list[int] = []

    async def act_first(self: SparkLauncher, job: Job) -> list[dict[str, Any]]:
        sizes.append(sum(len(task) for task in job["tasks"]))
        if len(sizes) == 1:
            await act(job)
        return await submit(self, job)

    monkeypatch.setattr(SparkLauncher, "submit", act_first)
    return sizes


async def test_a_table_that_changes_before_the_snapshot_is_copied_as_the_snapshot_has_it(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN tables in step
    names = ("filled", "renamed", "rekeyed", "retyped", "same")
    for name in names:
        source.execute(f"create table {name} (id int primary key, a int not null, b int not null)")
        source.execute(f"insert into {name} select g, g, g * 10 from generate_series(1, 50) g")
    tables = "\n".join(f"{name}: {{on_column_added: add}}" for name in names)
    async with stream(tables) as streamer:
        await streamer.caught_up(60)

        # WHEN definitions change while a resync is about to take a snapshot
        changed = asyncio.Event()

        def change() -> None:
            changed.set()
            source.execute(
                "alter table filled add column n int; update filled set n = id;"
                "alter table renamed rename a to c; alter table renamed rename b to a;"
                "alter table renamed rename c to b;"
                "alter table rekeyed drop constraint rekeyed_pkey, add primary key (b);"
                "alter table retyped alter b type bigint"
            )
            target.execute("alter table retyped alter b type bigint")

        before_the_slot(monkeypatch, change)
        resync(target)
        await asyncio.wait_for(changed.wait(), 60)
        await streamer.eventually(lambda: _are_copied(streamer, 50), 60)

        # THEN the copy has the values that no later change brings
        for name in names:
            columns = "id, a, b" + (", n" if name == "filled" else "")
            assert contents(source, name, columns) == contents(target, name, columns)


async def _are_copied(streamer: Streamer, rows: int) -> bool:
    tables = (await streamer.status())["tables"]
    return all(t["state"] == "ready" and t["rows_copied"] == rows for t in tables)


async def test_a_table_that_is_dropped_and_made_again_does_not_end_the_process(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute("create table gone (id int primary key); create table t (id int primary key)")
    source.execute("insert into gone values (1); insert into t values (1)")
    async with stream("gone:\nt:") as streamer:
        await streamer.caught_up(60)
        replaced = asyncio.Event()

        def replace() -> None:
            source.execute(
                "drop table gone; create table gone (id int primary key);"
                "insert into gone values (2)"
            )
            replaced.set()

        before_the_slot(monkeypatch, replace)
        resync(target)
        await asyncio.wait_for(replaced.wait(), 60)
        await streamer.table_state("public.t", "ready", 60)
        assert streamer._task is not None
        assert not streamer._task.done()

        # AND the new table of that name is copied; if the table stopped before, the error has the
        # next step
        async def goes_on() -> bool:
            table = await streamer.table("public.gone")
            if table["state"] == "error":
                assert "streamer resync public.gone" in table["error"]
                resync(target)
            return bool(
                table["state"] == "ready" and contents(source, "gone") == contents(target, "gone")
            )

        await streamer.eventually(goes_on, 60)


async def test_a_table_whose_key_changes_before_its_copy_is_applied_by_the_new_key(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    """A key with a generated column identifies no row of the stream; the next key does."""
    key = "(a int not null, b int, g int not null generated always as (b) stored"
    source.execute(f"create table t {key}, primary key (a, g)); insert into t values (1, 1)")
    for name in ("late", "t"):
        target.execute(f"create table {name} (a int primary key, b int, g int)")
    attempt = "select attempt from streamer.relation where source = 'public.t'"
    async with stream("t:\nlate:") as streamer:
        # GIVEN a table with such a key, and a table that the source lacks
        await streamer.table_state("public.t", "ready", 60)
        before = target.value(attempt)
        # WHEN the table gets a key that identifies rows, and the missing table appears
        source.execute("alter table t drop constraint t_pkey, add primary key (a)")
        source.execute(f"create table late {key}, primary key (a)); insert into late values (1, 1)")

        async def is_copied_again() -> bool:
            return bool(target.value(attempt) != before)

        await streamer.eventually(is_copied_again, 60)
        await streamer.caught_up(60)
        # THEN changes are applied by the definitions that the copies have read
        source.execute("update t set b = b + 1; update late set b = b + 1")
        await streamer.caught_up(60)
        for name in ("late", "t"):
            assert contents(target, name, "a, b") == contents(source, name, "a, b")


async def test_ddl_does_not_wait_for_a_copy_and_rewritten_tables_are_copied_again(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN several tables whose parts are planned
    changes = {
        "added": "alter table added add column n int",
        "swapped": "alter table swapped rename a to c; alter table swapped rename b to a;"
        "alter table swapped rename c to b",
        "rewritten": "vacuum full rewritten",
        "emptied": "truncate emptied",
        "same": "select",
    }
    for name in changes:
        source.execute(f"create table {name} (id int primary key, a int, b int)")
        source.execute(f"insert into {name} select g, g, g * 10 from generate_series(1, 50) g")

    async def change(job: Job) -> None:
        # WHEN the application alters the tables: no statement waits
        with source.connect() as connection:
            connection.execute("set lock_timeout = '1s'")
            for statement in ";".join(changes.values()).split(";"):
                connection.execute(statement.encode())
        # AND the copy keeps no slot but the slot of the stream
        slots = "select count(*) from pg_replication_slots where database = current_database()"
        await streamer.eventually(lambda: _gives(source, slots, 1))

    sizes = before_the_first_job(monkeypatch, change)
    options = "{on_column_added: add}"
    async with stream("\n".join(f"{name}: {options}" for name in changes)) as streamer:
        # THEN only replaced tables are copied again
        await streamer.eventually(lambda: _are_ready(streamer), 60)
        for name in changes:
            assert contents(source, name, "id, a, b") == contents(target, name, "id, a, b")
        # The three tables come together or one by one, as the process detects the tables.
        assert (sizes[0], sum(sizes[1:])) == (5, 3)
        source.execute("insert into added values (99, 1, 1, 1)")
        await streamer.caught_up(60)
        assert_same(source, target, "added")


async def _gives(db: Database, sql: str, value: object) -> bool:
    return db.value(sql) == value


async def _are_ready(streamer: Streamer) -> bool:
    tables = (await streamer.status())["tables"]
    return bool(tables) and all(table["state"] == "ready" for table in tables)


async def test_a_snapshot_that_is_gone_ends_its_round_at_once(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute("create table t (id int primary key); insert into t values (1)")
    failures: list[dict[str, Any]] = []
    submit = SparkLauncher.submit

    async def keep(self: SparkLauncher, job: Job) -> list[dict[str, Any]]:
        failures.extend(await submit(self, job))
        return failures

    monkeypatch.setattr(SparkLauncher, "submit", keep)

    async def spoil(job: Job) -> None:
        job["ends"]["snapshot_name"] = "00000001-00000001-1"

    sizes = before_the_first_job(monkeypatch, spoil)
    async with stream("t:") as streamer:
        await streamer.caught_up(60)
        assert_same(source, target, "t")
    assert [failure["kind"] for failure in failures] == ["snapshot"]
    assert sizes == [1, 1]


async def test_the_blocking_session_is_shown_while_a_copy_waits_and_others_are_copied(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_limits, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(part_copier, "LOCK_SECONDS", 5)
    for name in ("free", "held"):
        source.execute(f"create table {name} (id int primary key); insert into {name} values (1)")
    with psycopg.connect(source.server.url(source.name)) as holder:

        async def hold(job: Job) -> None:
            holder.execute("lock table held")

        before_the_first_job(monkeypatch, hold)
        async with stream("free:\nheld:") as streamer:
            pid = holder.info.backend_pid

            async def is_said() -> bool:
                tables = (await streamer.status())["tables"]
                return any(f"pid {pid} (role" in (t["waiting_for"] or "") for t in tables)

            await streamer.eventually(is_said, 60)
            await streamer.table_state("public.free", "ready", 60)
            assert (await streamer.table("public.held"))["state"] == "copying"
            # A copy that begins meanwhile waits for no further table.
            resync(target)
            holder.rollback()
            await streamer.caught_up(60)
            assert_same(source, target, "held")
            assert (await streamer.table("public.held"))["waiting_for"] is None


async def test_a_locked_table_is_said_at_the_start_and_a_start_that_waits_is_stopped_at_once(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_limits, "CHECK_SECONDS", 0.1)
    source.execute("create table t (id int primary key, n int generated always as (id + 1) stored)")
    source.execute("create table unmapped (id int primary key)")
    async with stream("t:") as streamer:
        await streamer.caught_up(60)
        await streamer.stop()
        with psycopg.connect(source.server.url(source.name)) as holder:
            # GIVEN a lock on a table that is not mapped, for which no step waits
            holder.execute("lock table unmapped")
            streamer = Streamer(streamer.path)
            streamer.start()
            source.execute("insert into t values (1)")
            await streamer.caught_up(60)
            await streamer.stop()
            # WHEN a table that is mapped is locked, too
            holder.execute("lock table t")
            streamer = Streamer(streamer.path)
            streamer.start()
            pid = holder.info.backend_pid

            async def is_said() -> bool:
                status = await streamer.status()
                return f"pid {pid} (role" in (status["error"] or "")

            # THEN the start names the session, and stopping does not wait for that
            await streamer.eventually(is_said, 60)
            await asyncio.wait_for(streamer.stop(), 60)
            assert (await streamer.status())["state"] == "stopped"


@pytest.mark.parametrize("pause", ["none", "while it is gone", "until it is noticed"])
async def test_a_table_that_is_replaced_while_it_is_copied_begins_its_copy_again(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    monkeypatch: pytest.MonkeyPatch,
    pause: str,
) -> None:
    source.execute("create table t (id int primary key, v text); insert into t values (1, 'old')")
    source.execute("create table u (id int primary key); insert into u values (1)")
    again = "create table t (id int primary key, v text); insert into t values (1, 'new')"
    attempt = "select attempt from streamer.relation where source = 'public.t'"

    async def replace(job: Job) -> None:
        """Replace the table when the parts are planned; let the parts be read late."""
        before = target.value(attempt)
        source.execute("drop table t")
        if pause == "while it is gone":

            async def is_said() -> bool:
                error = (await streamer.table("public.t"))["error"] or ""
                return "does not exist at the source" in error

            asyncio.get_running_loop().create_task(create_when(is_said))
            return
        source.execute(again)
        if pause == "until it is noticed":
            noticed = f"select attempt > {before} from streamer.relation where source = 'public.t'"
            await streamer.eventually(lambda: _gives(target, noticed, True), 60)

    async def create_when(is_said: Callable[[], Awaitable[bool]]) -> None:
        await streamer.eventually(is_said, 60)
        source.execute(again)

    before_the_first_job(monkeypatch, replace)
    async with stream("t:\nu:") as streamer:
        # WHEN the application drops a table and creates it again during the copy
        await streamer.table_state("public.u", "ready", 60)

        async def is_copied() -> bool:
            source.execute("insert into t select coalesce(max(id), 0) + 1, 'later' from t")
            return bool((await streamer.table("public.t"))["state"] == "ready")

        async def is_back() -> bool:
            return bool(source.value("select count(*) from pg_class where relname = 't'"))

        await streamer.eventually(is_back, 60)
        # THEN the new table is copied without a request, and without a missed change
        await streamer.eventually(is_copied, 90)
        await streamer.caught_up(60)
        assert_same(source, target, "t")
        assert_same(source, target, "u")


async def test_a_table_that_is_published_after_the_snapshot_is_copied_by_a_later_one(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream lacks the table's changes between the snapshot and the publication."""
    source.execute("create table t (id int primary key); insert into t values (1)")
    members = "select count(*) from pg_publication_tables where tablename = 't'"
    async with stream("t:") as streamer:
        await streamer.caught_up(60)
        missed = asyncio.Event()

        async def unpublish_first(*arguments: Any, **options: Any) -> Any:
            monkeypatch.setattr(copy_round, "create_slot", create_slot)
            source.execute("alter publication streamer_shop drop table t")
            exported = await create_slot(*arguments, **options)
            source.execute("insert into t values (2)")
            # The guard publishes the table again, because a copy is due.
            await streamer.eventually(lambda: _gives(source, members, 1), 60)
            missed.set()
            return exported

        monkeypatch.setattr(copy_round, "create_slot", unpublish_first)
        resync(target)
        await asyncio.wait_for(missed.wait(), 60)
        await streamer.caught_up(60)
        assert_same(source, target, "t")


async def test_many_tables_are_looked_at_together_unless_a_session_locks_one(
    source: Database,
) -> None:
    """The session of the copy holds locks, so the session must not wait for a lock."""
    source.execute("create table a (id int primary key, v text); create table b (v int, w int)")
    source.execute("create table p (id int) partition by range (id); alter table b drop column v")
    names = [RelationName("public", name) for name in "ab"]
    async with await psycopg.AsyncConnection.connect(
        source.url, autocommit=True, row_factory=dict_row
    ) as plain:
        await plain.execute("begin isolation level repeatable read read only; savepoint look")
        seen = await read_tables_seen(plain, names)
        assert list(seen) == names
        for name, together in seen.items():
            assert together == await read_table_seen(plain, name, is_partitioned=False)
        assert seen[names[1]].heaps[0].numbers == (2,)
        assert await read_tables_seen(plain, [RelationName("public", "p")]) == {}
        await plain.execute("rollback to savepoint look")
        with source.connect() as blocker:
            blocker.execute("begin; lock table b")
            assert await read_tables_seen(plain, names) == {}
            await plain.execute("rollback to savepoint look")
            blocker.execute("alter table b add column x int; commit")
        assert await read_tables_seen(plain, [*names, RelationName("public", "none")]) == {}
        await plain.execute("rollback to savepoint look")
        source.execute("truncate a")
        assert list(await read_tables_seen(plain, names)) == names[1:]
