"""DDL while streaming: no value ever gets into a wrong column."""

import asyncio

import pytest

from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import SourceMapping
from streamer.postgres.secret import Secret
from streamer.runtime.session import source_checks
from streamer.source.connection import connection
from streamer.source.tables.attached_partitions import had_rows, read_leaves
from tests.support.postgres import Database, assert_same, contents
from tests.support.remedies import Operator, remedy_of
from tests.support.streamer import MakeStreamer, Streamer
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("without_spark", "deferred_indexes")

DDL = "create table t (id int primary key, a int, b text)"
RESYNC = (
    "insert into streamer.request (relation_id, action) select id, 'resync' from streamer.relation;"
    " notify streamer"
)


async def test_the_target_first_or_the_source_first(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute(f"{DDL}; insert into t values (1, 1, 'one')")
    async with stream("t: {initial: none, truncate_target: true}") as streamer:
        await streamer.caught_up()
        # Added: at the target first, no table stops.
        target.execute("alter table t add c text")
        source.execute("insert into t values (2, 2, 'two')")
        source.execute("alter table t add c text; insert into t values (3, 3, 'three', 'c')")
        await streamer.caught_up()
        assert_same(source, target, "t")
        # Retyped, the target first and then the source; wider and to text.
        target.execute("alter table t alter a type bigint")
        source.execute("update t set a = 2147483647 where id = 1")
        source.execute("alter table t alter a type bigint")
        source.execute("update t set a = 9223372036854775807 where id = 2")
        await streamer.caught_up()
        # The source first: a misfit stops the table until the misfit ends.
        source.execute("alter table t alter a type text using 'n' || a")
        source.execute("insert into t values (4, 'not a number', 'four', null)")
        await streamer.table_state("public.t", "error")
        assert "not a number" not in (await streamer.table("public.t"))["error"].partition(":")[0]
        target.execute("alter table t alter a type text using 'n' || a")
        await streamer.caught_up()
        assert_same(source, target, "t")
        # Two columns swap names: earlier rows have the values of the partner column.
        swap = (
            "alter table t rename a to x; alter table t rename b to a; alter table t rename x to b"
        )
        source.execute(f"{swap}; insert into t (id, a, b, c) values (6, 'new a', 'new b', 'c')")
        await streamer.table_state("public.t", "error")
        assert (await streamer.table("public.t"))["error_code"] == "columns_renamed"
        assert not target.value("select count(*) from t where id = 6")
        target.execute(RESYNC)
        await streamer.caught_up(60)
        columns = "id, a, b, c"
        assert contents(source, "t", columns) == contents(target, "t", columns)
        # Dropped: at the source first, the target's column keeps its default.
        target.execute("alter table t alter c set default 'none'")
        source.execute("alter table t drop c; insert into t values (7, 'b', 'a')")
        await streamer.caught_up()
        assert target.value("select c from t where id = 7") == "none"
        # At the target first: stopped, until the source follows or the column is there again.
        target.execute("alter table t drop a")
        source.execute("insert into t (id, a) values (8, 'kept')")
        await streamer.table_state("public.t", "error")
        assert 'add column "a" text' in (await streamer.table("public.t"))["error"]
        target.execute("alter table t add a text")
        await streamer.caught_up()
        assert target.value("select a from t where id = 8") == "kept"


@pytest.mark.parametrize("streamed", [False, True])
async def test_several_versions_in_one_transaction_and_in_interleaved_ones(
    source: Database, target: Database, stream: MakeStreamer, streamed: bool
) -> None:
    if streamed:
        is_new = int(str(source.value("show server_version_num"))) >= 160000
        setting = "debug_logical_replication_streaming%3Dimmediate"
        source.parameters = (
            f"options=-c%20{setting if is_new else 'logical_decoding_work_mem%3D64kB'}"
        )
    source.execute(f"{DDL.replace('a int', 'a text')}; create table u (id int primary key, a int)")
    tables = "t: {on_column_added: add}\nu: {on_column_added: add}"
    async with stream(tables) as streamer:
        await streamer.caught_up()
        with source.connect() as one, source.connect() as two:
            one.execute("begin; insert into t values (1, 10, 'first')")
            one.execute("alter table t add c text; insert into t values (2, 20, 'second', 'c')")
            two.execute("begin; insert into u values (1, 1); alter table u add t text")
            two.execute("insert into u values (2, 2, 'text')")
            one.execute("alter table t drop a; insert into t values (3, 'third', 'c')")
            one.execute("savepoint s; alter table t rename c to lost; alter table t add d int")
            one.execute("insert into t values (4, 'fourth', 'never', 4); rollback to s")
            one.execute(
                "alter table t add a text default 'again'; insert into t values (5, 'fifth', 'c', 'text')"
            )
            two.execute("alter table u drop a; insert into u values (3, 'three'); commit")
            one.execute("update t set b = 'changed' where id < 3; commit")
        await streamer.caught_up()
        # ADD COLUMN … DEFAULT is not in the stream; a copy fills the column of row 3.
        expected = [
            (1, "again", "changed", None),
            (2, "again", "changed", "c"),
            (3, "again", "third", "c"),
            (5, "text", "fifth", "c"),
        ]

        async def is_copied() -> bool:
            return target.execute("select id, a, b, c from t order by 1") == expected

        await streamer.eventually(is_copied, 60)
        assert target.execute("select id, a, t from u order by 1") == [
            (1, 1, None),
            (2, 2, "text"),
            (3, None, "three"),
        ]


async def test_a_table_that_is_dropped_and_made_again_is_noticed(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(
        f"{DDL}; insert into t values (1, 1, 'old'); create table u (id int primary key)"
    )
    async with stream("t:\nu:") as streamer:
        await streamer.caught_up()
        made_anew = f"drop table t; {DDL}; insert into t values (1, 1, 'new'), (2, 2, 'new')"
        await asyncio.to_thread(source.execute, made_anew)

        async def is_said() -> bool:
            told = (await streamer.table("public.t"))["error"] or ""
            return "streamer resync public.t" in told

        await streamer.eventually(is_said, 40)
        target.execute(
            "insert into streamer.request (relation_id, action)"
            " select id, 'resync' from streamer.relation where source = 'public.t'; notify streamer"
        )
        source.execute("insert into u values (1); insert into t values (3, 3, 'newer')")
        await streamer.caught_up(40)
        assert_same(source, target, "t")
        assert_same(source, target, "u")


@pytest.mark.since(15)  # before, a detached partition stays published
@pytest.mark.follows("copy.gap_reports:_describe")
async def test_partitions_come_and_go_and_tables_are_rewritten(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(
        """
        create table p (id int, day date, v text, big text, primary key (id, day)) partition by range (day);
        alter table p alter big set storage external;
        create table p1 partition of p for values from ('2021-01-01') to ('2022-01-01');
        create table plain (id int primary key, v text, big text);
        alter table plain alter big set storage external;
        insert into p values (1, '2021-05-05', 'copied', repeat('x', 9000));
        insert into plain select g, 'copied', repeat('y', 9000) from generate_series(1, 20) g
        """
    )
    async with stream("p:\nplain:") as streamer:
        await streamer.caught_up()

        async def execute(sql: str) -> None:
            """Execute in a thread: the program must be able to release the locks for which the
            statement waits.
            """
            await asyncio.to_thread(source.execute, sql)

        await execute(
            """
            create table p2 partition of p for values from ('2022-01-01') to ('2023-01-01');
            insert into p values (2, '2022-02-02', 'created', null);
            -- other order, a dropped column, and rows that were there before
            create table p3 (gone int, big text, v text, day date not null, id int not null);
            alter table p3 drop gone;
            insert into p3 values (repeat('z', 9000), 'before', '2023-03-03', 3);
            alter table p attach partition p3 for values from ('2023-01-01') to ('2024-01-01');
            insert into p values (4, '2023-04-04', 'attached', repeat('w', 9000));
            update p set v = 'changed' where id in (1, 4);
            update p set day = '2022-06-06' where id = 1;
            alter table p detach partition p2;
            insert into p2 values (9, '2022-02-02', 'nobody sees this', null);
            delete from p2 where id = 2
            """
        )
        await execute("delete from plain where id % 3 = 0")
        await execute("vacuum full plain")
        await execute("update plain set v = 'full' where id % 2 = 0")
        await execute("cluster plain using plain_pkey; update plain set v = 'cluster' where id = 5")
        await execute(
            "alter table plain alter v type varchar(50); update plain set id = 100 where id = 7"
        )
        await execute("vacuum full")
        await execute("insert into plain values (200, 'end', repeat('e', 9000))")
        await streamer.caught_up()
        assert_same(source, target, "plain")
        # Attaching and detaching move no rows; streamed rows stay, and attached rows are reported.
        assert target.execute("select id, v, length(big) from p order by 1") == [
            (1, "changed", 9000),
            (2, "created", None),
            (4, "changed", 9000),
        ]

        async def is_told() -> bool:
            told = target.value("select error from streamer.relation where source = 'public.p'")
            return told is not None and str(told).startswith(
                '"public.p3" was attached as a partition'
            )

        await streamer.eventually(is_told)
        state = "select state from streamer.relation where source = 'public.p'"
        assert target.value(state) == "ready"
        attempt = "select attempt from streamer.relation where source = 'public.p'"
        before = target.value(attempt)
        remedy = await remedy_of(streamer, "public.p", "was attached as a partition")
        await Operator(streamer.path, source, target).follow(remedy)

        async def is_copied_again() -> bool:
            return target.value(attempt) != before

        await streamer.eventually(is_copied_again)
        await streamer.caught_up()
        assert (await streamer.status())["tables"][0]["error"] is None
        assert contents(source, "p", "id, day, v, big", "id") == contents(
            target, "p", "id, day, v, big", "id"
        )


async def test_only_partitions_unseen_by_the_snapshot_are_reported(source: Database) -> None:
    """CREATE TABLE … PARTITION OF brings no rows, at any depth and after any writes."""
    source.execute(
        """
        create table p (id int default 0, day date check (day > '2000-01-01')) partition by range (day);
        create table made partition of p for values from ('2021-01-01') to ('2022-01-01');
        create table deep partition of p (id default 7, check (id >= 0))
          for values from ('2022-01-01') to ('2023-01-01') partition by range (id);
        create table deep_made partition of deep for values from (0) to (10);
        insert into p values (1, '2021-05-05'), (2, '2022-05-05')
        """
    )
    name = RelationName("public", "p")
    mapping = SourceMapping("shop", None, Secret(source.url), ())
    late = 'late % "x" y'
    async with connection(mapping) as snapshot, connection(mapping) as plain:
        await snapshot.execute("begin isolation level repeatable read")
        before = await read_leaves(snapshot, [name])
        source.execute(
            """
            create table "late % ""x"" y" as select 3 as id, date '2023-05-05' as day;
            alter table "late % ""x"" y" add constraint p_day_check check (day > '2000-01-01');
            alter table p attach partition "late % ""x"" y" for values from ('2023-01-01') to ('2024-01-01');
            create table branch (like p including all) partition by range (id);
            create table twig partition of branch for values from (0) to (10);
            insert into twig values (4, '2024-05-05');
            alter table p attach partition branch for values from ('2024-01-01') to ('2025-01-01')
            """
        )
        for statement in (
            "create table empty (like p including all)",
            "alter table p attach partition empty for values from ('2025-01-01') to ('2026-01-01')",
            "create table locked (like p including all)",
            "insert into locked values (5, '2026-05-05')",
            "alter table p attach partition locked for values from ('2026-01-01') to ('2027-01-01')",
            "insert into p values (6, '2025-05-05')",
            "create table large (like p including all)",
            "insert into large select g, '2027-05-05' from generate_series(1, 9000) g",
            "delete from large where id < 8000",
            "vacuum large",
            "alter table p attach partition large for values from ('2027-01-01') to ('2028-01-01')",
            "insert into p select g, '2027-05-05' from generate_series(1, 5000) g",
        ):
            source.execute(statement)
        assert await read_leaves(snapshot, [name]) == before
        await snapshot.execute("rollback")
        after = (await read_leaves(plain, [name]))[name]
        with source.connect() as user, user.transaction():
            user.execute("lock table locked")
            found = {leaf.name.name: await had_rows(plain, leaf) for leaf in after}
            # Heartbeats have the same connection, and must not end with the abandoned work.
            locked = next(leaf for leaf in after if leaf.name.name == "locked")
            await asyncio.gather(
                had_rows(plain, locked), plain.execute("create table public.beat ()")
            )
        assert source.value("select to_regclass('beat') is not null")
        again = {leaf.name.name: await had_rows(plain, leaf) for leaf in after}
    assert {leaf.name.name for leaf in before[name]} == {"made", "deep_made"}
    assert found == {
        "made": False,
        "deep_made": False,
        late: True,
        "twig": True,
        "empty": False,
        "locked": None,
        "large": True,
    }
    assert again == found | {"locked": True}


@pytest.mark.parametrize("group", ["ddl: off", "ddl: capture"])
@pytest.mark.parametrize("bounds", ["range", "hash"])
async def test_a_partition_is_not_known_before_a_copy_of_its_rows(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    comparing_in_threads: None,
    monkeypatch: pytest.MonkeyPatch,
    group: str,
    bounds: str,
) -> None:
    monkeypatch.setattr(source_checks, "CHECK_SECONDS", 0.5)
    is_hash = bounds == "hash"
    first = "with (modulus 2, remainder 0)" if is_hash else "from (0) to (100)"
    second = "with (modulus 2, remainder 1)" if is_hash else "from (100) to (200)"
    source.execute(
        f"create table p (id int primary key) partition by {bounds} (id);"
        f"create table p1 partition of p for values {first};"
        f"create table p2 (id int primary key); alter table p attach partition p2 for values {second};"
        "insert into p select generate_series(0, 150); alter table p detach partition p2;"
        "delete from p1 where id >= 100; delete from p2 where id < 100"
    )
    error = "select error from streamer.relation"

    def ask(action: str, options: str = "{}") -> None:
        target.execute(
            "insert into streamer.request (relation_id, action, options)"
            f" select id, '{action}', '{options}' from streamer.relation; notify streamer"
        )

    async def forget_the_error(streamer: Streamer) -> None:
        ask("pause")
        await streamer.table_state("public.p", "paused")
        ask("resume")
        # The gap may show again at once.
        await until(lambda: "check constraint" not in str(target.value(error)))

    async with stream("p:", group=group) as streamer:
        await streamer.caught_up()
        target.execute("alter table p add check (id < 100)")
        await asyncio.to_thread(
            source.execute, f"alter table p attach partition p2 for values {second}"
        )
        # GIVEN a copy of the rows that the target refuses
        if group == "ddl: off":
            await until(lambda: "was attached as a partition" in str(target.value(error)))
            ask("resync", '{"mode": "diff"}')
        await until(lambda: "check constraint" in str(target.value(error)))
        # WHEN the table goes on without the error THEN it shows the gap again, or closes the gap
        target.execute("alter table p drop constraint p_id_check")
        await forget_the_error(streamer)
        if group == "ddl: off":
            await until(lambda: "was attached as a partition" in str(target.value(error)))
            ask("resync", '{"mode": "diff"}')

        async def is_equal() -> bool:
            return contents(source, "p") == contents(target, "p")

        await streamer.eventually(is_equal)
        await streamer.caught_up()
    assert target.value(error) is None


NEXT = "for values in (2)"
ATTACHED_WITH_ROWS = {
    "rows of a subtransaction": f"""
        begin; create table p2 (id int); savepoint s; insert into p2 values (2); release s;
        alter table p attach partition p2 {NEXT}; commit""",
    "a table and rows of a subtransaction": f"""
        begin; select txid_current(); savepoint s; create table p2 (id int);
        insert into p2 values (2); release s; alter table p attach partition p2 {NEXT}; commit""",
    "rows of a block that catches errors": f"""
        do $$ begin create table p2 (id int);
        begin insert into p2 values (2); exception when unique_violation then null; end;
        alter table p attach partition p2 {NEXT}; end $$""",
    "rows of a subtransaction in an older table": f"""
        create table p2 (id int); begin; select txid_current(); savepoint s;
        insert into p2 values (2); release s; alter table p attach partition p2 {NEXT}; commit""",
    "rows of a subtransaction below another partition": f"""
        begin; create table b (id int) partition by list (id); savepoint s;
        create table p2 partition of b {NEXT}; insert into p2 values (2); release s;
        alter table p attach partition b {NEXT}; commit""",
    "a table with a column that is gone": f"""
        begin; create table p2 (gone int, id int); alter table p2 drop gone; savepoint s;
        insert into p2 values (2); release s; alter table p attach partition p2 {NEXT}; commit""",
}
CAME_LATER = {
    "rows of a later transaction": f"""
        begin; savepoint s; create table p2 partition of p {NEXT}; release s; commit;
        insert into p values (2)""",
    "rows of a later subtransaction": f"""
        begin; create table p2 partition of p {NEXT}; savepoint s; insert into p values (2); commit""",
    "rows of an attached table": f"""
        create table p2 (id int); begin; alter table p attach partition p2 {NEXT}; savepoint s;
        insert into p values (2); release s; commit""",
    "rows of a table that was empty": f"""
        create table p2 (id int); commit; alter table p attach partition p2 {NEXT}; commit;
        insert into p values (2)""",
}


@pytest.mark.parametrize("way", [*ATTACHED_WITH_ROWS, *CAME_LATER])
async def test_rows_of_a_subtransaction_are_older_than_the_partition_by_their_command(
    source: Database, way: str
) -> None:
    source.execute("create table p (id int) partition by list (id)")
    source.execute((ATTACHED_WITH_ROWS | CAME_LATER)[way])
    mapping = SourceMapping("shop", None, Secret(source.url), ())
    name = RelationName("public", "p")
    async with connection(mapping) as plain:
        (leaf,) = (await read_leaves(plain, [name]))[name]
        assert await had_rows(plain, leaf) == (way in ATTACHED_WITH_ROWS)
        # A new table takes the name between the two checks.
        source.execute("alter table p2 rename to aside; create table p2 (id int)")
        assert await had_rows(plain, leaf) in (None, *[False] * (way in CAME_LATER))


async def test_a_partition_that_may_not_be_read_goes_by_the_catalog(source: Database) -> None:
    source.execute(
        "create role reader login; create table p (id int) partition by list (id); create schema hidden"
    )
    try:
        source.execute(
            "create table made partition of p for values in (1); insert into p values (1)"
        )
        source.execute("create table late (id int); insert into late values (2)")
        source.execute("alter table p attach partition late for values in (2)")
        source.execute("create table hidden.late (id int); insert into hidden.late values (3)")
        source.execute("alter table p attach partition hidden.late for values in (3)")
        source.execute("grant select on hidden.late to reader")
        source.url_user = "reader"
        name = RelationName("public", "p")
        mapping = SourceMapping("shop", None, Secret(source.url), ())
        async with connection(mapping) as plain:
            leaves = (await read_leaves(plain, [name]))[name]
            had_rows_by_leaf = {str(leaf.name): await had_rows(plain, leaf) for leaf in leaves}
        assert had_rows_by_leaf == {"public.made": False, "public.late": True, "hidden.late": True}
    finally:
        source.execute("drop owned by reader; drop role reader")


async def test_a_key_that_changes_live_no_longer_tells_rows_apart(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    """With REPLICA IDENTITY FULL, RELATION does not show the primary key."""
    columns = "id int not null, part int not null, keep bool, v text"
    source.execute(
        f"create table t ({columns}, primary key (id)); alter table t replica identity full"
    )
    target.execute(f"create table t ({columns})")
    async with stream('t: {initial: none, filter: "coalesce(keep, false)"}') as streamer:
        await streamer.caught_up()
        source.execute("insert into t values (1, 1, true, 'a'), (2, 1, true, 'b')")
        await streamer.caught_up()
        source.execute(
            "alter table t drop constraint t_pkey, add primary key (id, part);"
            "insert into t values (1, 2, false, 'x')"
        )
        await streamer.caught_up()
        source.execute("update t set v = 'y' where id = 1 and part = 2")
        await streamer.caught_up()
        source.execute("delete from t where part = 2; update t set v = 'c' where id = 2")
        await streamer.caught_up()
        assert target.execute("select id, part, v from t order by id") == [
            (1, 1, "a"),
            (2, 1, "c"),
        ]
