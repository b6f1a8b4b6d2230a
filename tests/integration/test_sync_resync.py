"""Resyncs: the readers' view meanwhile, written and kept rows, and foreign rows."""

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from streamer.commands.table_requests import request
from streamer.compare import compared_table, cut_ranges, differences_at_point
from streamer.compare.compared_table import ALL_PAGES, ComparedTable, Pages
from streamer.compare.local_launcher import LocalProcess
from streamer.copy import finish_copies
from streamer.copy.copy_snapshot import HeldSnapshot
from streamer.copy.spark.launcher import SparkLauncher
from streamer.errors.error_classes import ComparisonError
from streamer.postgres.secret import Secret
from streamer.target import connection as target_module
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database, assert_same, contents
from tests.support.runbooks import run_block
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer, Streamer
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("without_spark", "deferred_indexes")


async def resync(streamer: Streamer, table: str = "public.t", **options: Any) -> None:
    """Request a resync as the command does, and wait for its end."""
    await streamer.ask("resync", table, **options)
    await streamer.caught_up()


def rows(db: Database, table: str = "t", where: str = "true") -> dict[Any, Any]:
    """Return which row version each id is at."""
    return pairs(db.execute(f"select id, xmin::text || ctid::text from {table} where {where}"))


def pairs(found: list[Any]) -> dict[Any, Any]:
    return dict(found)


def stages(target: Database) -> list[Any]:
    return target.execute(r"select relname from pg_class where relname ~ '^copy_\d'")


READ_SECONDS = 0.002


@contextlib.contextmanager
def reading(db: Database, sql: str) -> Iterator[list[Any]]:
    """Run a query over and over meanwhile; yield the results."""
    seen: list[Any] = []
    ended = threading.Event()

    def read() -> None:
        with db.connect() as connection:
            while not ended.wait(READ_SECONDS):
                seen.append(connection.execute(sql.encode()).fetchone())

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("options", [{}, {"mode": "diff"}])
@pytest.mark.parametrize("sid", [None, "eu"])
@streams(
    "t:",
    source="create table t (id int primary key, v int not null);"
    " insert into t select g, 1 from generate_series(1, 5000) g",
    sid="<sid>",
)
async def test_readers_see_the_old_rows_or_the_new_ones(
    shared: Shared, options: Any, sid: str | None
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    key = "sid, id" if sid else "id"
    target.execute(
        f"""
        create table child (sid text default '{sid}', id int, foreign key ({key}) references t
                            on delete cascade);
        insert into child (id) select g from generate_series(1, 5000) g;
        create index on t (v);
        create view v as select count(*) from t;
        grant select on t to pg_monitor;
        """
    )
    if sid:
        target.execute("insert into t values ('us', 5000, 1)")
    target.execute("update t set v = 2 where id <= 1000")
    facts = """
        select relfilenode, relacl::text,
               array(select indexrelid from pg_index where indrelid = c.oid order by 1),
               array(select conname from pg_constraint where confrelid = c.oid)
        from pg_class c where oid = 't'::regclass
    """
    before = target.execute(facts)
    with reading(target, "select count(*), sum(v) from t where id <= 5000") as seen:
        await shared.ask("resync", **options)
        for n in range(5001, 5300):
            source.execute(f"insert into t values ({n}, 1); update t set v = 3 where id = {n}")
        await shared.caught_up()
    extra = 1 if sid else 0
    changed = 5000 + extra, 6000 + extra
    assert set(seen) == {changed, (5000 + extra, 5000 + extra)}
    assert target.execute(facts) == before
    assert target.value("select count(*) from child") == 5000
    assert target.value("select count from v") == 5299 + extra
    own = "(select id, v from t where sid = 'eu')" if sid else "t"
    assert_same(source, target, "t", own)
    assert stages(target) == []


@pytest.mark.parametrize("mode", ["reload", "diff"])
@streams(
    "t:",
    source="create table t (id int primary key, v text, j json);"
    """ insert into t select g, 'v', '{"a":  1}' from generate_series(1, 100) g""",
    sid="eu",
)
async def test_what_is_written(shared: Shared, mode: str) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    target.execute(
        """
        insert into t values ('us', 1, 'theirs'), ('us', 2, 'theirs');
        update t set v = null where sid = 'eu' and id = 1;
        update t set j = '{"a": 1}' where sid = 'eu' and id = 2;
        delete from t where sid = 'eu' and id = 3;
        insert into t values ('eu', 777, 'never there');
        """
    )
    theirs = rows(target, where="sid = 'us'")
    before = rows(target, where="sid = 'eu' and id between 4 and 100")
    await resync(shared, mode=mode)
    after = rows(target, where="sid = 'eu' and id between 4 and 100")
    assert rows(target, where="sid = 'us'") == theirs
    assert_same(source, target, "t", "(select id, v, j from t where sid = 'eu')")
    if mode == "diff":
        assert after == before
    else:
        assert not set(after.items()) & set(before.items())


HOSTILE = '"t ""{}\'; drop table x; --"'


@pytest.mark.parametrize("mode", ["reload", "diff"])
async def test_rows_without_a_key_and_names_of_all_kinds(
    source: Database, target: Database, stream: MakeStreamer, mode: str
) -> None:
    columns = """("a "" {}'" text, "sid " json, "row" point, "s" bytea, n numeric)"""
    source.execute(f"create table {HOSTILE} {columns}")
    row = """('x', '{"n": 1}', '(1,2)', '\\x00', 1.0)"""
    source.execute(f"insert into {HOSTILE} values {row}, {row}, {row}")
    source.execute(f"insert into {HOSTILE} values ('y'), (null), (null)")
    source.execute(f"alter table {HOSTILE} replica identity full")
    name = HOSTILE.strip('"').replace('""', '"')
    quoted = "'" + ('"' + name.replace('"', '""') + '"').replace("'", "''") + "'"
    async with stream(f"{quoted}:", sid="it's") as streamer:
        await streamer.caught_up()
        target.execute(
            f"""
            insert into {HOSTILE} values ('us', 'x');
            insert into {HOSTILE} select 'it''s', 'x', '{{"n": 1}}', '(1,2)', '\\x00', 1.0
                from generate_series(1, 4);
            update {HOSTILE} set n = 1.00 where ctid = (select min(ctid) from {HOSTILE}
                where sid = 'it''s' and n = 1);
            delete from {HOSTILE} where sid = 'it''s' and ctid =
                (select min(ctid) from {HOSTILE} where sid = 'it''s' and "a "" {{}}'" is null);
            """
        )
        kept = f'select ctid, xmin from {HOSTILE} where "a "" {{}}\'" = \'y\''
        before = target.execute(kept)
        table = str((await streamer.status())["tables"][0]["source"])
        await resync(streamer, table, mode=mode)
        listed = """"a "" {}'", "sid ", "row", "s", n"""
        own = f"(select {listed} from {HOSTILE} where sid = 'it''s')"
        assert_same(source, target, HOSTILE, own)
        assert target.value(f"select count(*) from {HOSTILE} where sid = 'us'") == 1
        assert (target.execute(kept) == before) == (mode == "diff")


@pytest.mark.parametrize("version", [14_00_00, 99_00_00])
@streams(
    "t:",
    source="create table t (id int, v text);"
    " insert into t select g % 2900, repeat('v', 100) from generate_series(1, 3000) g",
)
async def test_several_sessions_read_the_pages_of_a_table_without_ranges(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    read: list[tuple[int, Pages]] = []
    digest_sql = ComparedTable.digest_sql
    both_read = threading.Barrier(2)
    numbers = itertools.count()

    def note(self: ComparedTable, *arguments: Any, pages: Pages = ALL_PAGES) -> str:
        read.append((arguments[0] is self.source, pages))
        if next(numbers) < 2:
            both_read.wait(30)  # for the second of two sessions
        return digest_sql(self, *arguments, pages=pages)

    monkeypatch.setattr(cut_ranges, "PAGES_BYTES", 65_536)
    monkeypatch.setattr(cut_ranges, "LISTED_BYTES", 65_536)
    monkeypatch.setattr(compared_table, "TID_RANGES_MIN", version)
    monkeypatch.setattr(ComparedTable, "digest_sql", note)
    target.execute("delete from t where id = 2000; update t set v = 'x' where id = 7")
    before = set(target.execute("select id, xmin::text, ctid::text from t"))
    await resync(shared, mode="diff")
    assert_same(source, target, "t")
    for side in (True, False):
        assert len({pages for of_source, pages in read if of_source is side} - {ALL_PAGES}) > 2
    after = set(target.execute("select id, xmin::text, ctid::text from t"))
    assert len(after - before) < 100


@streams(
    "t:",
    source="create table t (id int primary key, v text);"
    " insert into t select g, 'v' from generate_series(1, 100) g",
)
async def test_a_process_compares_at_the_point_and_one_that_ends_makes_the_copy_wait(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = shared.target
    await shared.caught_up()
    ended: list[str] = []

    class EndsOnce(LocalProcess):
        async def submit(self, job: dict[str, Any]) -> list[dict[str, Any]]:
            if not ended:
                ended.append(job["ends"]["copy"]["snapshot_name"])
                raise ComparisonError("the comparison stopped: its process ended")
            return await super().submit(job)

    monkeypatch.setattr(differences_at_point, "LocalProcess", EndsOnce)
    target.execute("update t set v = 'x' where id = 7; delete from t where id = 8")
    before = rows(target)
    with capture_logs() as logs:
        await resync(shared, mode="diff")
    assert_same(shared.source, target, "t")
    (compared,) = [entry for entry in logs if entry["event"].startswith("table compared at")]
    assert (compared["ranges"], compared["differing"]) == (1, 1)
    assert len(ended) == 1
    assert {n for n, version in rows(target).items() if version != before.get(n)} == {7, 8}


@streams(
    "t:",
    source="create table t (id int primary key, v int unique);"
    " insert into t select g, g from generate_series(1, 9) g",
    target="create table t (id int primary key, v int unique, note text default 'new')",
)
async def test_columns_of_the_target_alone_survive_a_diff(shared: Shared) -> None:
    """And a second unique constraint does not stand in the way of values that change places."""
    source, target = shared.source, shared.target
    await shared.caught_up()
    target.execute("update t set note = 'mine'; update t set v = -v where id = 1")
    await resync(shared, mode="diff")
    assert target.execute("select distinct note from t") == [("mine",)]
    target.execute("update t set v = v + 100; update t set v = 10 - (v - 100)")
    await resync(shared, mode="diff")
    assert_same(source, target, "t", "(select id, v from t)")


@pytest.mark.parametrize("mode", ["reload", "diff"])
async def test_history_keeps_its_versions(
    source: Database, target: Database, stream: MakeStreamer, mode: str
) -> None:
    source.execute("create table t (id int primary key, v text)")
    source.execute("insert into t select g, 'first' from generate_series(1, 6) g")
    async with stream("t: {type: history}") as streamer:
        await streamer.caught_up()
        source.execute("update t set v = 'second' where id <= 4")
        source.execute("delete from t where id = 6")
        await streamer.caught_up()
        await streamer.kill()
        # A write past streamer, as by a foreign program.
        target.execute(
            """
            update t set v = 'wrong' where id = 1 and kvsz_end = '9999-01-01';
            insert into t (id, v) values (99, 'never there');
            delete from t where id = 3 and kvsz_end = '9999-01-01';
            delete from t where id = 4;
            """
        )
        old = set(contents(target, "t"))
        streamer.start()
        before = source.value("select now()")
        await resync(streamer, mode=mode)
        after = source.value("select now()")
        current = "(select id, v from t where kvsz_end = '9999-01-01')"
        assert_same(source, target, "t", current)
        assert len(old - set(contents(target, "t"))) == 2  # 1 and 99 ended
        versions = pairs(
            target.execute(
                "select id, array_agg(array[v, (kvsz_start > '1900-01-01')::text,"
                " kvsz_deleted::text] order by kvsz_id) from t group by id"
            )
        )
        assert versions == {
            1: [
                ["first", "false", "false"],
                ["wrong", "true", "false"],
                ["second", "true", "false"],
            ],
            2: [["first", "false", "false"], ["second", "true", "false"]],
            3: [["first", "false", "false"], ["second", "true", "false"]],
            4: [["second", "false", "false"]],
            5: [["first", "false", "false"]],
            6: [["first", "false", "true"]],
            99: [["never there", "false", "true"]],
        }
        at: Any = target.value("select kvsz_end from t where id = 99")
        assert before < at < after
        assert at == target.value(
            "select kvsz_start from t where id = 1 and v = 'second' and kvsz_end = '9999-01-01'"
        )
        assert not target.execute(
            "select a.id from t a join t b on a.id = b.id and a.ctid <> b.ctid"
            " where (a.kvsz_start, a.kvsz_end) overlaps (b.kvsz_start, b.kvsz_end)"
        )
        source.execute("update t set v = 'third'")
        await streamer.caught_up()
        assert_same(source, target, "t", current)


@streams("t: {type: history}", source="create table t (id int primary key, v text)")
async def test_a_change_after_the_snapshot_is_no_older_than_the_versions_that_the_copy_ends(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = shared.source, shared.target
    take_over = HeldSnapshot.take_over

    async def take_over_late(*arguments: Any) -> HeldSnapshot:
        source.execute("insert into t values (2, 'after the snapshot')")
        return await take_over(*arguments)

    await shared.caught_up()
    target.execute("insert into t (id, v) values (2, 'never there')")
    monkeypatch.setattr(HeldSnapshot, "take_over", take_over_late)
    await resync(shared)
    committed = source.value("select pg_xact_commit_timestamp(xmin) from t")
    closed: Any = target.value("select kvsz_end from t where v = 'never there'")
    assert closed <= committed
    assert target.execute("select kvsz_start from t where v <> 'never there'") == [(committed,)]


@streams(
    "t: {type: history}", source="create table t (v text); insert into t values ('a'), ('a'), ('b')"
)
async def test_history_without_a_key(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    target.execute("insert into t (v) values ('a'), ('c'); delete from t where v = 'b'")
    await resync(shared)
    current = "(select v from t where kvsz_end = '9999-01-01')"
    assert_same(source, target, "t", current)
    closed = "select v from t where kvsz_deleted order by 1"
    assert target.execute(closed) == [("a",), ("c",)]


@streams(
    "t: {type: append}",
    source="create table t (id int primary key, v text);"
    " insert into t select g, 'v' from generate_series(1, 9) g",
)
async def test_append_loses_nothing(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("delete from t where id < 4")
    await shared.caught_up()
    target.execute("update t set v = 'wrong' where id > 7; delete from t where id = 5")
    before = rows(target, where="id in (1, 2, 3, 4, 6, 7)")
    await resync(shared)
    assert contents(target, "t") == [(f"({n},v)",) for n in range(1, 10)]
    assert rows(target, where="id in (1, 2, 3, 4, 6, 7)") == before


@pytest.mark.follows("runbooks:copy-does-not-finish#2")
async def test_rows_of_others_are_removed_with_consent_only(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    ddl = "create table t (id int primary key, v text); insert into t values {};"
    for table in ("t", "emptied"):
        of_table = ddl.replace("table t", f"table {table}").replace("into t", f"into {table}")
        source.execute(of_table.format("(1, 'a'), (2, 'b')"))
        target.execute(of_table.format("(2, 'old'), (3, 'old')"))
    async with stream("t:\nemptied:") as streamer:
        await streamer.table_state("public.t", "error")
        error = (await streamer.table("public.t"))["error"]
        assert "truncate_target: true" in error
        assert "initial: keep" in error
        assert len(contents(target, "t")) == 2
        await streamer.table_state("public.emptied", "error")
        target.execute("truncate emptied")
        await asyncio.to_thread(
            run_block, streamer.path, "copy-does-not-finish#2", {"orders": "emptied"}
        )
        await streamer.table_state("public.emptied", "ready")
        assert_same(source, target, "emptied")
    with reading(target, "select count(*) from t") as seen:
        async with stream("t: {truncate_target: true}") as streamer:
            await streamer.caught_up()
            assert_same(source, target, "t")
            target.execute("insert into t values (4, 'put here')")
    assert {count for (count,) in seen} <= {2, 3}
    async with stream("t:") as streamer:  # the rows are ours now
        await resync(streamer)
        assert_same(source, target, "t")


async def test_keep_leaves_rows_that_the_source_lacks(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    ddl = "create table t (id int primary key, v text); insert into t values {};"
    source.execute(ddl.format("(1, 'a'), (2, 'b'), (5, 'same')"))
    target.execute(ddl.format("(2, 'old'), (3, 'old'), (5, 'same')"))
    source.execute("create table k (v int); insert into k values (1), (1), (2)")
    target.execute("create table k (v int); insert into k values (1), (3)")
    before = rows(target, where="id in (3, 5)")
    async with stream("{t: {initial: keep}, k: {initial: keep}}") as streamer:
        await streamer.caught_up()
        for _ in range(2):
            expected = [("(1,a)",), ("(2,b)",), ("(3,old)",), ("(5,same)",)]
            assert contents(target, "t") == expected
            assert rows(target, where="id in (3, 5)") == before
            assert contents(target, "k") == [("(1)",), ("(1)",), ("(2)",), ("(3)",)]
            await resync(streamer)
            await resync(streamer, "public.k", mode="diff")
        source.execute("update t set v = 'c' where id = 2")
        await streamer.caught_up()
        assert target.value("select v from t where id = 2") == "c"
    async with stream("{t: , k: {initial: keep}}") as streamer:
        # Kept rows have not become ours.
        await streamer.ask("resync")
        await streamer.table_state("public.t", "error")
        assert len(contents(target, "t")) == 4


@pytest.mark.parametrize("mode", ["reload", "diff"])
async def test_an_ordinary_role_fires_no_foreign_keys_that_refer_to_the_rows(
    source: Database, target: Database, stream: MakeStreamer, mode: str
) -> None:
    """Foreign keys work for such a role, so deleting all rows would delete referencing rows."""
    source.execute("create table t (id int primary key, v text)")
    source.execute("insert into t select g, 'v' from generate_series(1, 9) g")
    role = f"owner_{target.name}"
    target.execute(
        f"drop schema streamer cascade; create role {role} login;"
        f"alter database {target.name} owner to {role};"
        f"grant all on schema public to {role}"
    )
    target.url_user = role
    try:
        async with stream("t:") as streamer:
            await streamer.caught_up()
            target.execute(
                "create table child (id int references t on delete cascade);"
                "insert into child select id from t;"
                "update t set v = 'wrong' where id < 4; insert into t values (99)"
            )
            await resync(streamer, mode=mode)
            assert_same(source, target, "t")
            assert target.value("select count(*) from child") == 9
    finally:
        target.execute(
            f"reassign owned by {role} to postgres; drop owned by {role}; drop role {role}"
        )


@streams(
    "t:",
    source="create table t (id int primary key, v text); insert into t values (1, 'a')",
    target="create table t (id int primary key)",
)
async def test_force_leaves_out_columns_that_the_target_lacks(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.table_state("t", "error")
    await resync(shared, force=True)
    assert contents(target, "t") == [("(1)",)]
    source.execute("insert into t values (2, 'b')")
    await shared.table_state("t", "error")
    assert 'no column "v"' in (await shared.table("t"))["error"]


async def test_a_swap_waits_for_a_user_with_row_locks(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamer.copy.staging_tables.LOCK_SECONDS", 1)
    submitted: list[int] = []
    submit = SparkLauncher.submit
    source.execute("create table t (id int primary key, v int); insert into t values (1, 1)")
    source.execute("create table u (id int primary key)")
    attempts: set[object] = set()

    def has_given_up() -> bool:
        waiting = (
            "select query_start from pg_stat_activity where wait_event_type = 'Lock'"
            " and datname = current_database() and application_name like 'streamer%'"
        )
        attempts.update(target.execute(waiting))
        return len(attempts) > 1

    with target.connect() as user:

        async def lock_before_the_exchange(
            self: SparkLauncher, job: dict[str, Any]
        ) -> list[dict[str, Any]]:
            submitted.append(1)
            if len(submitted) == 2:  # earlier, the new slot would wait for this transaction
                user.execute(b"begin; select from t for update")
            return await submit(self, job)

        monkeypatch.setattr(SparkLauncher, "submit", lock_before_the_exchange)
        async with stream("{t: , u: }") as streamer:
            await streamer.caught_up()
            await streamer.ask("resync")
            await until(has_given_up, "the exchange is tried again")
            source.execute("insert into u values (1)")
            await streamer.eventually(lambda: holds(target, "u", 1))
            assert (await streamer.table("public.t"))["state"] == "copying"
            user.execute(b"update t set v = 2; commit")
            await streamer.caught_up()
            assert_same(source, target, "t")
    assert len(submitted) == 2  # the next attempt uses the rows that were copied


async def holds(db: Database, table: str, count: int) -> bool:
    return len(contents(db, table)) == count


async def test_an_exchange_whose_commit_was_not_heard_of_is_not_made_twice(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute("create table t (v int); insert into t values (1), (1)")
    async with stream("t:") as streamer:
        await streamer.caught_up()
        transaction = target_module.transaction
        lost: list[int] = []

        @contextlib.asynccontextmanager
        async def lose(connection: Any) -> Any:
            async with transaction(connection):
                yield
            if not lost and not await connection.fetch_value(
                "select exists (select from streamer.relation where state = 'copying')"
            ):
                lost.append(1)
                connection.terminate()
                await connection.fetch_value("select 1")

        monkeypatch.setattr(finish_copies, "transaction", lose)
        source.execute("insert into t values (2)")
        await resync(streamer)
        assert lost
        source.execute("insert into t values (3)")
        await streamer.caught_up()
        assert_same(source, target, "t")


async def test_killed_meanwhile_the_old_rows_stay(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute("create table t (id int primary key, v text)")
    source.execute("insert into t select g, 'v' from generate_series(1, 100) g")
    armed = ""
    killed = asyncio.Event()

    def fail(at: str) -> None:
        if at == armed:
            killed.set()
            raise asyncio.CancelledError

    for module in ("finish_copies", "plan_copies", "copy_round", "prepare_copy", "staging_tables"):
        monkeypatch.setattr(f"streamer.copy.{module}.failpoint", fail, raising=False)
    async with stream("t:") as streamer:
        await streamer.caught_up()
        names = ("sync.prepared", "sync.job_started", "sync.copied", "sync.exchanged")
        for rows, name in enumerate(names, 100):
            target.execute("update t set v = 'old' where id < 50")
            armed = name
            killed.clear()
            with reading(target, "select count(*) from t") as seen:
                await streamer.ask("resync")
                await asyncio.wait_for(killed.wait(), 60)
                await streamer.kill()
                assert len(contents(target, "t")) == rows, name
                assert target.value("select count(*) from t where v = 'old'") == 49, name
                source.execute(
                    f"update t set v = '{name}' where id % 3 = 0;"
                    f"insert into t values ({rows + 1}, 'x')"
                )
                armed = ""
                streamer.start()
                await streamer.caught_up()
            assert {count for (count,) in seen} <= {rows, rows + 1}, name
            assert_same(source, target, "t")
            assert stages(target) == [], name


async def test_a_resync_during_a_copy_that_fails_begins_another(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator corrects a row after the snapshot of the copy, and requests a resync."""
    source.execute("create table t (id int primary key, v text); insert into t values (1, 'bad')")
    target.execute("create table t (id int primary key, v text check (v <> 'bad'))")
    has_snapshot, is_corrected, is_asked = asyncio.Event(), asyncio.Event(), asyncio.Event()
    submit = SparkLauncher.submit

    async def wait_and_submit(self: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
        has_snapshot.set()
        await is_asked.wait()
        return await submit(self, job)

    monkeypatch.setattr(SparkLauncher, "submit", wait_and_submit)

    def taken(_: str) -> None:
        # The engine also reads requests at the start, and fulfils them before further tasks run.
        if is_corrected.is_set():
            is_asked.set()

    monkeypatch.setattr("streamer.runtime.session.operator_requests.failpoint", taken)
    async with stream("t:") as streamer:
        await asyncio.wait_for(has_snapshot.wait(), 60)
        source.execute("update t set v = 'good'")
        is_corrected.set()
        await streamer.ask("resync")
        await streamer.caught_up()
        assert contents(target, "t") == [("(1,good)",)]


@pytest.mark.parametrize("options", [{}, {"mode": "diff"}, {"scope": {"where": ["id < 50"]}}])
@streams(
    "t: {initial: none}",
    both="create table t (id int primary key, v int);"
    " insert into t select g, g from generate_series(1, 9) g",
)
async def test_a_resync_replaces_rows_that_were_declared_to_be_those_of_the_source(
    shared: Shared, options: Any
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    target.execute("update t set v = -v where id = 1; delete from t where id = 2")
    target.execute("insert into t values (42, 42)")
    await resync(shared, **options)
    assert_same(source, target, "t")


async def test_a_lost_slot_is_no_dead_end_for_a_table_that_began_with_the_changes(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key); insert into t values (1)")
    async with stream("t: {initial: none}") as streamer:
        await streamer.caught_up()
        await streamer.stop()
        source.execute("select pg_drop_replication_slot('streamer_shop')")
        source.execute("insert into t values (2)")
        streamer.start()
        await streamer.source_state("error")
        assert "streamer resync '*.*' --database shop" in str((await streamer.status())["error"])
        address = TargetAddress.parse(Secret(target.url))
        await request(address, "resync", "*.*", database="shop", sid=None)
        await streamer.caught_up()
        assert_same(source, target, "t")
