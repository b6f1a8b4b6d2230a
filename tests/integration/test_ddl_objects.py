"""`ddl: capture`: indexes and constraints of the target follow those of the source."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from streamer.commands import ddl_decisions
from streamer.schema_changes import definition_builder
from streamer.schema_changes.object_changes import Objects
from streamer.schema_changes.target_definitions import BUILD_LOCK
from streamer.schema_changes.translate.object_translator import ObjectTranslation
from streamer.target.connection import TargetAddress
from tests.support.definitions import described
from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer, Streamer, write_config

pytestmark = [pytest.mark.usefixtures("without_spark"), pytest.mark.hostile_sessions]

GROUP = "ddl: capture\ncreate: all\non_ddl: {drop_column: apply}"
TABLES = "t: {initial: none}\np: {initial: none}"
DDL = (
    "create table p (id int primary key, code text);"
    "create table t (id int primary key, name varchar(10), amount int, parent int)"
)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition_builder, "CHECK_SECONDS", 0.1)


def objects(db: Database, table: str = "public.t") -> dict[str, list[str]]:
    found = described(db, table)
    return {name: found[name] for name in ("indexes", "constraints")}


async def alike(streamer: Streamer, source: Database, target: Database) -> None:
    """Wait until the target has the source's rows, indexes and constraints."""
    await streamer.caught_up()

    async def is_so() -> bool:
        here, there = [await asyncio.to_thread(objects, db) for db in (source, target)]
        return here == there

    try:
        await streamer.eventually(is_so)
    except AssertionError as exc:
        plans = target.execute("select kind, name, state, reason from streamer.definition")
        raise AssertionError(f"{exc}\n{objects(source)}\n{objects(target)}\n{plans}") from exc
    assert_same(source, target, "t")


COMMANDS = [
    # Added, renamed and dropped, each by the statements that migrations use.
    "create index concurrently lowered on t (lower(name), id desc) where amount > 0",
    "create unique index by_name on t (name) include (amount); insert into t values (50, 'x')",
    "alter table t add constraint positive check (amount >= 0) not valid",
    "alter table t validate constraint positive",
    "alter table t add constraint once unique (amount) deferrable initially deferred",
    "alter table t add constraint parent_fk foreign key (parent) references p not valid",
    "alter table t validate constraint parent_fk",
    "alter table t add constraint apart exclude (id with =)",
    "alter index lowered rename to low; alter table t rename constraint positive to not_negative",
    # The index becomes the constraint, and rows use a new column in the same transaction.
    "create unique index concurrently tmp on t (parent, id)",
    "alter table t add constraint parent_key unique using index tmp",
    "alter table t add column extra int; create index on t (extra); update t set extra = id",
    "alter table t rename column extra to more; create index on t ((more + 1))",
    # Another definition under the same name, in one command.
    "alter table t drop constraint not_negative, add constraint not_negative check (amount > -9)",
    (
        "alter table t drop constraint parent_key,"
        " add constraint parent_key unique (parent, id) include (amount)"
    ),
    "alter table t alter column amount type bigint",  # builds indexes and constraints again
    "insert into t (id, amount) values (60, -5)",
    "drop index by_name; insert into t values (61, 'x')",
    "drop index concurrently low",
    "alter table t drop constraint once; insert into t (id, amount) values (62, -5)",
    "alter table t drop column more",
    "alter table t drop constraint t_pkey, add constraint t_key primary key (id)",
    # Undone at the source.
    "begin; create index never on t (name); rollback",
    (
        "begin; savepoint a; create index gone on t (name); rollback to a;"
        "create index kept on t (amount); savepoint b; drop index kept; rollback to b; commit"
    ),
]


async def test_indexes_and_constraints_follow_the_source(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute(DDL)
        db.execute("insert into p values (1, 'a'); insert into t values (1, 'a', 1, 1)")
    async with stream(TABLES, group=GROUP) as streamer:
        await streamer.caught_up()
        for command in COMMANDS:
            if "concurrently" in command or command.startswith("begin"):
                await asyncio.to_thread(source.execute, command)
                continue
            # The transaction also inserts rows before and after the command.
            await asyncio.to_thread(
                source.execute,
                f"insert into t (id) select max(id) + 100 from t; {command};"
                "insert into t (id) select max(id) + 100 from t",
            )
            if len(command) % 2:  # others come before the former is made
                await alike(streamer, source, target)
        await alike(streamer, source, target)
        assert target.execute("select * from streamer.definition where state <> 'made'") == []
        indexes = "select count(*) from pg_stat_progress_create_index"
        assert target.value(indexes) == 0


async def test_the_halves_that_a_builder_left_are_made_whole_under_their_new_names(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The builder died: its index is invalid, a check NOT VALID, a unique constraint an index.

    Or it makes a constraint after the lane has looked, and before the lane stores its plans.
    """
    for db in (source, target):
        db.execute(DDL)
    async with stream(TABLES, group=GROUP) as streamer:

        async def arrived(row: int) -> None:
            async def is_there() -> bool:
                return bool(
                    await asyncio.to_thread(target.execute, f"select 1 from t where id = {row}")
                )

            await streamer.eventually(is_there)

        await streamer.caught_up()
        with target.connect() as builder:
            builder.execute(f"select pg_advisory_lock({BUILD_LOCK})")
            await asyncio.to_thread(
                source.execute,
                "create index i on t (name); alter table t add constraint positive check (id > 0);"
                "alter table t add constraint once unique (amount); insert into t values (2)",
            )
            await arrived(2)
            assert target.value("select count(*) from streamer.definition") == 3, "plans"
            await asyncio.to_thread(
                target.execute,
                "create index i on t (name); create unique index once on t (amount);"
                "update pg_index set indisvalid = false where indexrelid = 'i'::regclass;"
                "alter table t add constraint positive check (id > 0) not valid",
            )
            await asyncio.to_thread(
                source.execute,
                "alter index i rename to j; alter table t rename constraint once to single;"
                "alter table t rename constraint positive to above; insert into t values (3)",
            )
            await arrived(3)
            # The source takes an identity and a serial back that the builder commits later.
            identity = "alter table t alter id add generated by default as identity"
            serial = "alter table t add column s serial"
            added = f"{identity}; {serial}; insert into t values (4)"
            await asyncio.to_thread(source.execute, added)
            await arrived(4)
            await asyncio.to_thread(
                source.execute,
                "alter table t alter id drop identity, alter s drop default, alter s drop not null;"
                "insert into t values (5, null, null, null, 5)",
            )
            await arrived(5)
            await asyncio.to_thread(
                target.execute,
                f"{identity}; create sequence t_s_seq owned by t.s;"
                "alter table t alter s set default nextval('t_s_seq')",
            )
        await alike(streamer, source, target)
        with target.connect() as builder:
            builder.execute(f"select pg_advisory_lock({BUILD_LOCK})")
            add = "alter table t add constraint late check (id > -5); insert into t values (6)"
            await asyncio.to_thread(source.execute, add)
            await arrived(6)
            store = Objects.store

            async def store_late(self: Objects, translation: ObjectTranslation) -> None:
                builder.execute(f"select pg_advisory_unlock({BUILD_LOCK})")
                await streamer.eventually(partial(asyncio.to_thread, has_built, target))
                await store(self, translation)

            monkeypatch.setattr(Objects, "store", store_late)
            await asyncio.to_thread(
                source.execute,
                "alter table t drop constraint late, add constraint late check (id > -6)",
            )
            await alike(streamer, source, target)


def has_built(target: Database) -> bool:
    """Whether the builder has stored that the constraint is made, or waits for the lane."""
    return bool(
        target.execute(
            "select 1 from streamer.definition where name = 'late' and state = 'made' union all"
            " select 1 from pg_stat_activity where application_name = 'streamer definitions'"
            " and datname = current_database() and wait_event_type = 'Lock'"
        )
    )


async def test_a_definition_that_cannot_be_made_is_named_unless_it_stops(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute(DDL)
    source.execute("create table elsewhere (id int primary key)")
    group = "ddl: capture\ncreate: keys\non_ddl: {add_index: stop, add_constraint: stop}"
    rules = "t: {initial: none, exclude: [amount]}"
    async with stream(rules, group=group) as streamer:
        await streamer.caught_up()
        # `keys` has no checks and no foreign keys, so there is nothing to decide.
        source.execute(
            "alter table t add check (id > 0), add foreign key (parent) references elsewhere;"
            "insert into t values (1)"
        )
        await streamer.caught_up()
        source.execute("create index by_parent on t (parent); insert into t values (2)")
        await streamer.table_state("public.t", "error")
        error = str((await streamer.table("public.t"))["error"])
        assert "on_ddl is stop for add_index" in error
        assert 'create index concurrently "by_parent"' in error
        assert "streamer ddl apply public.t" in error
        await streamer.decide("apply")
        await streamer.table_state("public.t", "ready")
        await streamer.caught_up()

        async def is_made() -> bool:
            return "by_parent" in str(await asyncio.to_thread(described, target, "public.t"))

        await streamer.eventually(is_made)
        # The target lacks the column: named, with its SQL.
        source.execute("create index by_amount on t (amount); insert into t values (3)")
        await streamer.table_state("public.t", "error")
        await streamer.decide("apply")
        await streamer.table_state("public.t", "ready")
        await streamer.caught_up()
        named = target.execute(
            "select state, sql, reason from streamer.definition where name = 'by_amount'"
        )
        assert [row[0] for row in named] == ["unmade"]
        assert "by_amount" in str(named[0][1])
        assert "amount" in str(named[0][2])


async def test_tenants_of_one_table_are_not_bound_by_each_other(
    source: Database, second: Database, target: Database, tmp_path: Path
) -> None:
    for db in (source, second):
        db.execute("create table t (id int primary key, n int)")
    target.execute("create table t (sid text, id int, n int, primary key (sid, id))")
    path = tmp_path / "config.yaml"
    write_config(
        path, source, target, "t: {initial: none}", sid="a", others={"b": second}, group=GROUP
    )
    streamer = Streamer(path)
    streamer.start()

    def names() -> set[str]:
        found = objects(target)
        return {line.split()[0] for line in found["constraints"]} | {
            line.split()[line.split().index("INDEX") + 1] for line in found["indexes"]
        }

    async def has(*wanted: str) -> None:
        await streamer.caught_up()

        async def is_so() -> bool:
            return await asyncio.to_thread(names) == {"t_pkey", *wanted}

        await streamer.eventually(is_so)

    try:
        await streamer.caught_up()
        added = "alter table t add constraint positive check (n > 0); create index i on t (n)"
        source.execute(f"{added}; insert into t values (1, 1)")
        await has("i")
        second.execute("insert into t values (1, -1), (2, -1)")  # not bound by it
        await streamer.caught_up()
        second.execute(f"update t set n = 1; {added}; create unique index u on t (id, n)")
        await has("i", "positive")
        source.execute("create unique index u on t (id, n)")
        await has("i", "positive", "u")
        assert "UNIQUE INDEX u ON public.t USING btree (sid, id, n)" in str(objects(target))
        second.execute(
            "alter table t drop constraint positive; drop index i; insert into t values (9, -9)"
        )
        await has("i", "u")
        source.execute("alter table t drop constraint positive; drop index i, u")
        second.execute("drop index u")
        await has()
    finally:
        await streamer.stop()


async def test_a_renamed_column_of_several_tenants_keeps_its_indexes_and_constraints(
    source: Database, second: Database, target: Database, tmp_path: Path
) -> None:
    for db in (source, second):
        db.execute(
            "create table t (id int primary key, amount int constraint positive check (amount > 0));"
            "create index i on t (amount); alter table t add constraint once unique (amount)"
        )
    path = tmp_path / "config.yaml"
    write_config(path, source, target, "t:", sid="a", others={"b": second}, group=GROUP)
    streamer = Streamer(path)
    streamer.start()

    async def has(column: str) -> bool:
        found = str(await asyncio.to_thread(objects, target))
        parts = f"i on public.t using btree ({column})", f"({column} > 0)", f"(sid, {column})"
        return all(part in found.lower() for part in parts)

    try:
        await streamer.caught_up()
        await streamer.eventually(lambda: has("amount"))
        for number, db in enumerate((source, second)):
            rename = f"alter table t rename amount to total; insert into t values ({number}, 1)"
            await asyncio.to_thread(db.execute, rename)
            await streamer.caught_up()
        await streamer.eventually(lambda: has("total"), 15)
    finally:
        await streamer.stop()


async def test_a_renamed_column_of_the_key_of_several_tenants_waits_for_all_of_them(
    source: Database, second: Database, target: Database, tmp_path: Path
) -> None:
    tenants = {"a": source, "b": second}
    for db in tenants.values():
        db.execute("create table t (id int primary key, v text)")
        db.execute("insert into t values (1, 'a'), (2, 'b'), (3, 'c')")
    path = tmp_path / "config.yaml"
    write_config(path, source, target, "t:", sid="a", others={"b": second}, group=GROUP)
    streamer = Streamer(path)
    streamer.start()
    rename = 'alter table "public"."t" rename column "id" to "num"'
    try:
        await streamer.caught_up()
        for sid, db in tenants.items():
            db.execute("update t set v = 'before' where id = 1")
            db.execute("alter table t rename id to num; delete from t where num = 3")
            db.execute("update t set num = 9 where num = 2; insert into t values (2, 'new')")

            async def waits(sid: str = sid) -> bool:
                statuses = await streamer.statuses()
                (table,) = next(its["tables"] for its in statuses if its["sid"] == sid)
                return f"with: {rename}; then run `ddl apply`" in str(table["error"])

            await streamer.eventually(waits)
        address = TargetAddress.parse(streamer.settings.target.url)
        await ddl_decisions.store_decision(address, "apply", "t", "shop", "b", [rename])
        await ddl_decisions.store_decision(address, "apply", "t", "shop", "a")
        await streamer.caught_up()
        rows = "select num, v from t {} order by num"
        for sid, db in tenants.items():
            db.execute("delete from t where num = 1; update t set v = 'after' where num = 9")
            await streamer.caught_up()
            mine = target.execute(rows.format(f"where sid = '{sid}'"))
            assert mine == db.execute(rows.format("")) == [(2, "new"), (9, "after")]
        assert "t_pkey PRIMARY KEY (sid, num)" in objects(target)["constraints"]
    finally:
        await streamer.stop()


async def test_a_tenant_that_joins_again_brings_the_constraints_that_waited_for_it(
    source: Database, second: Database, target: Database, tmp_path: Path
) -> None:
    """The removed tenant had created the table of all."""
    tenants = {"a": source, "b": second}
    for db in tenants.values():
        db.execute("create table t (id int primary key, amount int)")
    path = tmp_path / "config.yaml"
    write_config(
        path,
        source,
        target,
        "t: {truncate_target: true}",
        sid="a",
        others={"b": second},
        group=GROUP,
    )
    streamer = Streamer(path)
    streamer.start()
    check = "alter table t add constraint positive check (amount > 0)"
    creators = "streamer.source where id in (select source_id from streamer.relation where {})"
    creators = creators.format("target_created")
    try:
        await streamer.caught_up()
        creator = str(target.value(f"select sid from {creators}"))
        (other,) = tenants.keys() - {creator}
        tenants[other].execute(check)
        await streamer.caught_up()
        await streamer.stop()
        target.execute(f"delete from {creators}")
        tenants[creator].execute(f"select pg_drop_replication_slot('streamer_shop_{creator}')")
        tenants[creator].execute(check)
        streamer.start()

        async def has_it() -> bool:
            return "positive" in str(await asyncio.to_thread(objects, target))

        await streamer.eventually(has_it, 15)
    finally:
        await streamer.stop()
