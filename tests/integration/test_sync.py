"""Copies of tables, with the parts copied in a thread instead of by Spark."""

import asyncio
from typing import Any

import psycopg
import pytest

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.relation_records import read_relation_records
from streamer.bookkeeping.requests import make_request
from streamer.commands.check.check import check
from streamer.copy.copy_round import Round
from streamer.copy.prepare_copy import Preparation
from streamer.copy.spark.launcher import SparkLauncher
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database, assert_same, contents, ordinary_role
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer, Streamer

pytestmark = pytest.mark.usefixtures("without_spark", "deferred_indexes")


async def resync(streamer: Streamer, table: str) -> None:
    """Ask for a resync as the command does, and wait until the copy is there."""
    bookkeeping = Bookkeeping(TargetAddress.parse(streamer.settings.target.url))
    try:
        (relation,) = [r for r in await read_relation_records(bookkeeping) if r.source == table]
        await make_request(bookkeeping, relation.relation_id, "resync")
    finally:
        await bookkeeping.close()

    async def has_begun() -> bool:
        rows = await streamer.status()
        return bool(rows) and await _attempt(streamer, table) > relation.attempt

    await streamer.eventually(has_begun)
    await streamer.caught_up()


async def _attempt(streamer: Streamer, table: str) -> int:
    bookkeeping = Bookkeeping(TargetAddress.parse(streamer.settings.target.url))
    try:
        return next(
            r.attempt for r in await read_relation_records(bookkeeping) if r.source == table
        )
    finally:
        await bookkeeping.close()


async def test_an_ordinary_owner_may_resync_a_table_with_sid(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute("create table t (id int primary key, v text)")
    source.execute("insert into t select g, 'v' from generate_series(1, 100) g")
    with ordinary_role(target):
        async with stream("t:", sid="eu") as streamer:
            await streamer.caught_up()
            target.execute("insert into t values ('us', 1, 'theirs')")
            target.execute("update t set v = 'spoilt' where sid = 'eu' and id < 50")
            await resync(streamer, "public.t")
            assert target.execute("select * from t where sid = 'us'") == [("us", 1, "theirs")]
            assert_same(source, target, "t", "(select id, v from t where sid = 'eu')")


async def test_a_table_of_somebody_else_is_copied_with_its_indexes_left_alone(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    ddl = "create table {0} (id int primary key, v text); create index on {0} (v);"
    for name in ("mine", "theirs"):
        source.execute(ddl.format(name) + f"insert into {name} values (1, 'a'), (2, 'b')")
    with ordinary_role(target) as role:
        target.execute(ddl.format("theirs") + f"grant all on theirs to {role}")
        target.execute(ddl.format("mine") + f"alter table mine owner to {role}")
        async with stream("mine:\ntheirs:") as streamer:
            await streamer.caught_up()
            for name in ("mine", "theirs"):
                assert_same(source, target, name)
                assert (
                    target.value(
                        f"select count(*) from pg_index where indrelid = '{name}'::regclass"
                    )
                    == 2
                )


async def test_tables_are_prepared_together_and_those_in_the_way_alone(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        source.execute(
            f"create table t_{number} (id int primary key); insert into t_{number} values (1)"
        )
    target.execute("create table t_0 (id int primary key); insert into t_0 values (99)")
    target.execute("create table t_1 (other int primary key)")
    target.execute("create table t_2 (id int primary key)")
    monkeypatch.setattr("streamer.copy.copy_round.PREPARE_LOCK_SECONDS", 1)
    prepare = Preparation.prepare
    counts: list[int] = []

    async def counting(self: Preparation, first: Any, second: Any, pairs: Any) -> Any:
        if not counts:  # before that, the lock would keep the slot from being made
            session.execute("lock table t_2 in access exclusive mode")
        counts.append(len(pairs))
        return await prepare(self, first, second, pairs)

    monkeypatch.setattr(Preparation, "prepare", counting)
    with psycopg.connect(target.url) as session:
        async with stream('"t_*":') as streamer:
            for number in (3, 4, 5):
                await streamer.table_state(f"public.t_{number}", "ready")
            assert counts[0] == 6
            for number in (0, 1):
                await streamer.table_state(f"public.t_{number}", "error")
            assert "already holds rows" in (await streamer.table("public.t_0"))["error"]
            session.rollback()
            await streamer.table_state("public.t_2", "ready")
            for number in (2, 3, 4, 5):
                assert_same(source, target, f"t_{number}")


async def test_a_table_that_cannot_be_prepared_fails_alone(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    """A defective preparation: an index that cannot be dropped."""
    for name in ("bad", "good"):
        source.execute(f"create table {name} (id int primary key); insert into {name} values (1)")
    target.execute(
        "create table bad (id int primary key);"
        "create function refuse() returns event_trigger language plpgsql as $$ begin"
        " if exists (select from pg_event_trigger_dropped_objects()"
        " where object_identity like '%bad%') then raise exception 'not this one'; end if; end $$;"
        "create event trigger refuse on sql_drop execute function refuse()"
    )
    async with stream("bad:\ngood:") as streamer:
        await streamer.table_state("public.bad", "error")
        await streamer.table_state("public.good", "ready")
        assert "not this one" in (await streamer.table("public.bad"))["error"]
        assert_same(source, target, "good")


async def test_a_table_that_cannot_be_locked_fails_alone(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session dropped the table after the check."""
    for name in ("gone", "here"):
        source.execute(f"create table {name} (id int primary key); insert into {name} values (1)")
    copy = Round._copy

    async def drop_first(self: Round, snapshot: Any) -> None:
        monkeypatch.setattr(Round, "_copy", copy)
        source.execute("drop table gone")
        await copy(self, snapshot)

    monkeypatch.setattr(Round, "_copy", drop_first)
    async with stream("gone:\nhere:") as streamer:
        await streamer.table_state("public.gone", "error")
        await streamer.table_state("public.here", "ready")
        assert_same(source, target, "here")


@pytest.mark.parametrize("setting", ["stop", "add", "ignore"])
@streams(
    "t: {on_column_added: <setting>}",
    source="create table t (id int primary key, n numeric(5,1)); insert into t values (1, 2)",
    target="create table t (id int primary key)",
)
async def test_a_column_that_the_target_lacks_before_the_copy(shared: Shared, setting: str) -> None:
    source, target = shared.source, shared.target
    if setting == "stop":
        await shared.table_state("t", "error")
        statement = f'alter table "{target.schema}"."t" add column "n" numeric(5,1);'
        assert statement in (await shared.table("t"))["error"]
        assert target.execute("select * from t") == []
        return
    await shared.caught_up()
    if setting == "add":
        assert_same(source, target, "t")
    else:
        assert target.execute("select * from t") == [(1,)]


@streams(
    "h: {type: history}\nc:",
    source="create table h (id int primary key); insert into h values (1);"
    " create table c (id int primary key); insert into c values (1)",
    target="create table h (id int primary key)",
)
async def test_a_history_table_made_by_hand_without_its_columns_is_refused(shared: Shared) -> None:
    await shared.table_state("h", "error")
    await shared.table_state("c", "ready")
    assert "kvsz_start" in (await shared.table("h"))["error"]


async def test_a_round_that_begins_again_does_not_copy_finished_tables(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute("create table a (v int); create table b (v int)")
    source.execute("insert into a values (1); insert into b values (1)")
    submit = SparkLauncher.submit
    sizes: list[int] = []

    async def lose_the_snapshot(self: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
        parts = [part for task in job["tasks"] for part in task]
        sizes.append(len(parts))
        if len(sizes) > 1:
            return await submit(self, job)
        await submit(self, {**job, "tasks": [parts[:1]]})
        await streamer.eventually(lambda: is_done(streamer))
        source.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'streamer snapshot' and datname = current_database()"
        )
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def is_done(streamer: Streamer) -> bool:
        return any(t["state"] == "ready" for t in (await streamer.status())["tables"])

    monkeypatch.setattr(SparkLauncher, "submit", lose_the_snapshot)
    async with stream("{a: {}, b: {}}") as streamer:
        await streamer.eventually(lambda: has_begun_again(sizes))
        source.execute("insert into a values (2); insert into b values (2)")
        await streamer.caught_up()
        assert_same(source, target, "a")
        assert_same(source, target, "b")
    assert sizes == [2, 1]


async def has_begun_again(sizes: list[int]) -> bool:
    return len(sizes) > 1


async def test_spark_starts_before_the_slot_is_made_and_only_for_a_copy(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute("create table t (id int primary key); insert into t values (1)")
    source.execute("create table n (id int primary key)")
    target.execute("create table n (id int primary key)")
    slots: list[Any] = []

    def prepare(self: SparkLauncher) -> None:
        database = "select count(*) from pg_replication_slots where database = current_database()"
        slots.append(source.value(database))

    monkeypatch.setattr(SparkLauncher, "prepare", prepare)
    async with stream("{n: {initial: none}}") as streamer:
        await streamer.caught_up()
        assert slots == []
    async with stream("{t: {}, n: {initial: none}}") as streamer:
        await streamer.caught_up()
        assert_same(source, target, "t")
        await streamer.kill()
        streamer.start()
        await streamer.caught_up()
    assert len(slots) == 1


async def test_a_long_end_of_one_copy_keeps_no_other_table_waiting(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index of a large table takes long. Here a session delays the creation."""
    for name in ("large", "small"):
        source.execute(f"create table {name} (id int primary key); insert into {name} values (1)")
    submit = SparkLauncher.submit
    lock = "pg_advisory_lock(hashtextextended('streamer indexes public.large', 0))"
    with target.connect() as blocker:

        async def submit_under_lock(
            self: SparkLauncher, job: dict[str, Any]
        ) -> list[dict[str, Any]]:
            blocker.execute(f"select {lock}".encode())
            return await submit(self, job)

        monkeypatch.setattr(SparkLauncher, "submit", submit_under_lock)
        async with stream("large:\nsmall:") as streamer:
            await streamer.table_state("public.small", "ready")
            assert (await streamer.table("public.large"))["state"] == "copying"
            blocker.execute("select pg_advisory_unlock_all()")
            await streamer.caught_up()
            assert_same(source, target, "large")
            keys = "select count(*) from pg_constraint where contype = 'p'"
            assert target.value(f"{keys} and conrelid = 'large'::regclass") == 1


async def test_a_paused_table_is_copied_when_it_is_resumed(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute("create table t (v int); insert into t values (1)")
    submit = SparkLauncher.submit
    may_go = asyncio.Event()

    async def wait(self: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
        await may_go.wait()
        return await submit(self, job)

    monkeypatch.setattr(SparkLauncher, "submit", wait)
    async with stream("{t: {}}") as streamer:
        await streamer.table_state("public.t", "copying")
        await streamer.ask("pause")
        await streamer.table_state("public.t", "paused")
        await streamer.kill()
        streamer.start()
        source.execute("insert into t values (2)")
        await streamer.ask("resume")
        # An operator pauses and resumes the table during the copy: no second copy, and no resume
        # without a request.
        await streamer.table_state("public.t", "copying")
        await streamer.ask("pause")
        await streamer.ask("resume")
        await streamer.ask("pause")
        may_go.set()
        await streamer.eventually(lambda: holds(target, "t", 2))
        source.execute("insert into t values (3)")
        await streamer.eventually(lambda: is_held(streamer))
        assert (await streamer.table("public.t"))["state"] == "paused"
        assert len(contents(target, "t")) == 2
        await streamer.ask("resume")
        await streamer.caught_up()
        assert_same(source, target, "t")


async def is_held(streamer: Streamer) -> bool:
    return bool((await streamer.table("public.t"))["held_changes"] == 1)


async def holds(db: Database, table: str, count: int) -> bool:
    return len(contents(db, table)) == count


@streams(
    "t: {initial: none}",
    both="create table t (id int primary key, v text); insert into t values (1, 'a')",
    target="insert into t values (7, 'not from here')",
)
async def test_a_declared_table_is_copied_when_it_is_asked_for(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (2, 'b')")
    await shared.caught_up()
    await shared.ask("resync")  # the consent to lose row 7
    await shared.caught_up()
    assert_same(source, target, "t")


@pytest.mark.parametrize("kind", ["real", "bigint"])
async def test_a_type_that_changes_at_the_target_before_rows_come_is_not_misread(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key, n int)")
    source.execute("insert into t select g, g from generate_series(1, 100) g")
    submit = SparkLauncher.submit
    changed = asyncio.Event()

    async def change_and_submit(self: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
        if not changed.is_set():
            changed.set()
            target.execute(f"alter table t alter n type {kind}")
        return await submit(self, job)

    monkeypatch.setattr(SparkLauncher, "submit", change_and_submit)
    async with stream("t:") as streamer:
        await changed.wait()
        await streamer.caught_up()  # the copy begins again
        assert_same(source, target, "t")


async def test_a_task_that_outlives_its_process_copies_no_row_twice(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a process that dies while a task holds a part with uncommitted rows
    source.execute("create table t (v int); insert into t values (1), (1)")
    source.execute("create table other (v int)")
    submit = SparkLauncher.submit
    has_died = asyncio.Event()

    async def last(self: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
        if has_died.is_set():
            return await submit(self, job)
        has_died.set()
        others = [[part for part in task if "other" in part["copy_out"]] for task in job["tasks"]]
        await submit(self, {**job, "tasks": others})
        return await asyncio.Event().wait()  # type: ignore[return-value]

    monkeypatch.setattr(SparkLauncher, "submit", last)
    async with stream("t:\nother:") as streamer:
        await streamer.table_state("public.other", "ready", 40)
        await streamer.kill()
        with psycopg.connect(target.server.url(target.name)) as task:
            task.execute("select from streamer.sync_partition where finished_at is null for update")
            task.execute("insert into t values (1), (1)")
            task.execute(
                "update streamer.sync_partition set finished_at = now() where finished_at is null"
            )

            # WHEN the next process begins that copy again, and the task commits meanwhile
            streamer.start()
            waits = (
                "select count(*) > 0 from pg_stat_activity where wait_event_type = 'Lock'"
                " and query like 'delete from streamer.sync_partition%'"
                " and datname = current_database()"
            )
            await streamer.eventually(lambda: gives(target, waits), 40)
        # THEN the rows of the task are replaced, not added to
        await streamer.caught_up(40)
        assert_same(source, target, "t")


async def gives(db: Database, sql: str) -> bool:
    return bool(db.value(sql))


async def test_a_failed_copy_leaves_a_table_with_its_own_key_and_indexes(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute("create table t (id int primary key, v int); insert into t values (1, 1)")
    target.execute("create table t (id int primary key, v int check (v > 5))")
    target.execute("create index t_v on t (v)")
    indexes = "select string_agg(indexname, ' ' order by 1) from pg_indexes where tablename = 't'"
    while_copied: list[object] = []
    submit = SparkLauncher.submit

    async def look(self: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
        while_copied.append(target.value(indexes))
        report = await check(streamer.settings, streamer.mapping)
        while_copied.append([f.problem for f in report.findings if "index on" in f.problem])
        return await submit(self, job)

    monkeypatch.setattr(SparkLauncher, "submit", look)
    async with stream("t:") as streamer:
        # WHEN the target refuses the rows
        await streamer.table_state("public.t", "error", 60)
        # THEN key and index are back before the error is shown, and check asked for no index
        assert target.value(indexes) == "t_pkey t_v"
        assert "violates check constraint" in (await streamer.table("public.t"))["error"]
        assert while_copied == [None, []]
        target.execute("alter table t drop constraint t_v_check")
        await streamer.ask("resume")
        await streamer.caught_up(60)
        assert_same(source, target, "t")
        assert target.value(indexes) == "t_pkey t_v"
