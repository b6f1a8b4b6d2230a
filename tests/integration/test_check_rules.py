"""`streamer check` and the rules of the mapping: tables, identities, several sources of a table."""

import pytest

from streamer.bookkeeping.requests import make_request
from tests.support.checking import ERROR, INFO, ITEMS, WARNING, Checker, both, matching, two_sources
from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer, Streamer
from tests.support.waiting import until


async def test_rules_that_are_wrong_are_all_named(checker: Checker) -> None:
    checker.source.execute(
        'create table "Orders" (id int primary key); create table a1 (id int primary key);'
        "create schema b; create table b.t (id int primary key); create table t (id int primary key);"
        "create table lists (id int primary key, name text)"
    )
    checker.configure(
        "orders: {}\ngone: {}\n'a*': {}\n'*1': {}\n'none*': {}\nb.t: {}\nt: {}\n"
        "lists: {exclude: [nome], columns: {id: id, naam: name}}"
    )
    await checker.finds(
        ERROR, "public.orders", "does not exist at the source", "write public.Orders"
    )
    await checker.finds(ERROR, "public.gone", "does not exist at the source")
    await checker.finds(ERROR, "public.a1", "both claim table")
    await checker.finds(
        ERROR, '"b.t" and "public.t" of source "shop" would both be written to target'
    )
    await checker.finds(WARNING, "public.none*: matches no table")
    await checker.finds(WARNING, "public.lists", 'names column "naam"')
    await checker.finds(
        WARNING, "public.lists", 'names column "nome"', "the table has the columns: id, name"
    )
    checker.configure("'none*':")
    await checker.finds(ERROR, "shop: no table matches its rules")


async def test_a_dropped_table_that_the_target_keeps_is_no_error(checker: Checker) -> None:
    checker.source.execute(ITEMS)
    checker.configure(
        "items:\nkept: {on_table_dropped: keep}\nclosed: {type: history, on_table_dropped: close}"
    )
    for name in ("kept", "closed"):
        await checker.finds(INFO, f"public.{name}: does not exist at the source")
    assert not matching(await checker.findings(), ERROR)


KINDS = """
create table items (id int primary key);
create unlogged table u (id int primary key);
create view v as select 1 as x;
create materialized view m as select 1 as x;
create foreign data wrapper w; create server s foreign data wrapper w;
create foreign table f (x int) server s;
create table p (id int primary key) partition by range (id);
create table p1 partition of p for values from (1) to (2);
"""


async def test_relations_that_a_pattern_matches_but_streamer_cannot_replicate(
    checker: Checker,
) -> None:
    checker.source.execute(KINDS)
    checker.configure("'*':")
    await checker.finds(INFO, "public.*: also matches views, not replicated: public.v")
    await checker.finds(WARNING, "public.m: is a materialized view: not replicated")
    await checker.finds(WARNING, "public.f: is a foreign table: not replicated")
    await checker.mends(WARNING, "public.u: is unlogged: not replicated")
    await checker.finds(INFO, "TRUNCATE of a single partition is not replicated")
    assert not [f for f in await checker.findings() if "public.p1" in str(f)]
    assert not matching(await checker.findings(), ERROR)

    with checker.source.connect() as connection:
        connection.execute("create temporary table temporary_one (id int)")
        checker.configure("'*.*':")
        await checker.finds(INFO, "also matches temporary tables", "temporary_one")


async def test_excluded_tables_are_named_once_and_are_no_problem(checker: Checker) -> None:
    checker.source.execute(
        "create schema bi; create table bi.report (id int); create table t (id int primary key);"
        "create unlogged table bi.fast (id int); create table tmp_1 (id int) inherits (t);"
        "create table config (id int); create table kept (id int primary key);"
        "alter extension plpgsql add table config; alter extension plpgsql add table kept"
    )
    group = 'exclude_tables: ["bi.*", "*.tmp_*", none]'
    checker.configure("'*.*': {target: '*.*'}\nkept:", group=group)
    await checker.finds(INFO, "bi.*: exclude_tables: leaves out bi.report")
    await checker.finds(INFO, "*.tmp_*: exclude_tables: leaves out public.tmp_1")
    await checker.finds(INFO, "public.none: exclude_tables: matches no table")
    await checker.finds(
        INFO, "extensions are not replicated: public.config (plpgsql)", "exact name"
    )
    seen = await checker.findings()
    assert not matching(seen, ERROR)
    for name in ("bi.report", "bi.fast", "tmp_1", "public.config"):
        assert len([f for f in seen if name in str(f)]) == (name != "bi.fast"), name


async def test_a_condition_of_copies_is_checked_on_both_sides(checker: Checker) -> None:
    both(checker, "create table t (id int primary key, v int, w text)")
    checker.configure("t: {copy_where: 'none > 1'}")
    await checker.finds(ERROR, "public.t: copy_where of table", 'column "none" does not exist')
    checker.target.execute("alter table t alter v type bigint")
    checker.configure("t: {copy_where: 'v > 1'}")
    await checker.finds(
        ERROR, "public.t: copy_where", 'column "v"', "does not store the source's values"
    )
    checker.configure("t: {copy_where: 'id > 1'}")
    await checker.finds(INFO, "public.t: changes of rows outside `copy_where` may need w")
    checker.configure("t: {copy_where: 'id > 1', set: {v: 'v + 1'}}")
    await checker.finds(INFO, "public.t: changes of rows outside `copy_where` may need w")
    checker.configure("t: {filter: 'id > 1', set: {w: 'upper(w)'}}")
    await checker.finds(INFO, "public.t: `filter` and `set` may need w")


async def test_a_partition_that_is_a_foreign_table_is_named(checker: Checker) -> None:
    checker.source.execute(
        "create foreign data wrapper w; create server s foreign data wrapper w;"
        "create table far (id int, v text) partition by range (id);"
        "create table near partition of far for values from (0) to (10);"
        "alter table far replica identity full; alter table near replica identity full;"
        "create foreign table farther partition of far for values from (10) to (20) server s"
    )
    checker.configure("far:")
    await checker.finds(
        WARNING,
        "public.far: has partitions that are foreign tables",
        "WAL: public.farther;",
        "detach",
    )
    # The replica identity of the table does not count, so that updates of the remaining tables
    # travel.
    await checker.is_gone(WARNING, "updates and deletes are not replicated")


async def test_named_relations_that_cannot_be_replicated(checker: Checker) -> None:
    checker.source.execute(KINDS)
    checker.configure("u: {}\nv: {}\nm: {}\nf: {}\np1: {}\ntemporary_one: {}")
    await checker.mends(ERROR, "public.u: is unlogged and cannot be replicated")
    await checker.finds(ERROR, "public.v: is a view and cannot be replicated", "remove it from")
    await checker.finds(ERROR, "public.m: is a materialized view and cannot")
    await checker.finds(ERROR, "public.f: is a foreign table and cannot")
    await checker.finds(
        ERROR, "public.p1: is a partition of public.p", "put its root public.p into"
    )
    with checker.source.connect() as connection:
        connection.execute("create temporary table temporary_one (id int)")
        await checker.finds(ERROR, "temporary_one: is a temporary table and cannot")
    checker.configure("'p1*': {}\nitems: {}")
    await checker.finds(WARNING, "public.p1: is a partition of public.p: not replicated")


async def test_children_large_objects_and_sequences(checker: Checker) -> None:
    checker.source.execute(f"{ITEMS}; create table child (primary key (id)) inherits (items)")
    checker.configure("items:")
    await checker.finds(WARNING, "public.child: inherits from public.items", "put it into `tables`")
    checker.configure("items: {}\nchild: {}")
    await checker.is_gone(WARNING, "inherits")
    checker.source.execute("create table counted (id serial primary key, n int)")
    checker.configure("counted:")
    await checker.finds(INFO, "sequences are not replicated", "public.counted_id_seq")
    checker.configure("counted:", group="sequences: true")
    await checker.is_gone(INFO, "sequences are not replicated")
    checker.target.execute("create table counted (id int primary key, n int)")
    await checker.finds(INFO, "the target has no sequence for column public.counted.id")
    checker.target.execute("create sequence s as smallint owned by counted.id")
    checker.source.execute("select setval('counted_id_seq', 40000)")
    await checker.finds(WARNING, '"public.s" cannot follow: the source is at 40000')
    checker.source.execute("create sequence invoice minvalue 5 maxvalue 9 cycle")
    await checker.mends(WARNING, 'no sequence "public"."invoice"')
    await checker.is_gone(WARNING, "large objects")
    checker.source.execute("select lo_create(0)")
    await checker.finds(WARNING, "1 large objects are not replicated", "bytea")


async def test_tables_whose_updates_are_not_published(checker: Checker) -> None:
    cases = (
        ("", "has no primary key", "replica identity full"),
        ("alter table {} add unique (a)", "has no primary key", "using index"),
        ("create unique index on {} (b)", "has no primary key", "replica identity full"),
        ("alter table {} add primary key (a) deferrable", "deferrable", "replica identity full"),
        (
            "alter table {} add primary key (a), replica identity nothing",
            "has REPLICA IDENTITY NOTHING",
            "replica identity default",
        ),
        (
            (
                "create unique index i on {0} (a); alter table {0} replica identity using index i;"
                "drop index i"
            ),
            "whose index is dropped",
            "replica identity full",
        ),
        (
            (
                "alter table {0} add g int generated always as (a) stored;"
                "alter table {0} alter g set not null, add primary key (b, g), add unique (a)"
            ),
            "has a generated column in its replica identity",
            "using index",
        ),
    )
    for number, (ddl, _, _) in enumerate(cases):
        name = f"t{number}"
        checker.source.execute(f"create table {name} (a int not null, b int); {ddl.format(name)}")
    checker.configure("'t*':")
    for number, (_, reason, fix) in enumerate(cases):
        words = (f"public.t{number}:", reason, "updates and deletes are not replicated")
        assert fix in str(await checker.mends(WARNING, *words))
    checker.configure("t0: {type: append}")
    checker.source.execute("alter table t0 replica identity nothing")
    await checker.finds(WARNING, "so updates are not replicated")


async def test_generated_columns_never_make_the_applications_updates_fail(
    checker: Checker, stream: MakeStreamer
) -> None:
    """From PostgreSQL 18 on, a publication of updates refuses whole rows with generated columns."""
    both(checker, "create table t (a int not null, g int generated always as (a + 1) stored)")
    checker.source.execute("alter table t replica identity full; insert into t values (1)")
    checker.configure("t: {initial: none}")
    async with stream("t: {initial: none}") as streamer:
        await streamer.caught_up()
        checker.source.execute("update t set a = 2")
    if str(checker.source.value("show server_version_num")) >= "180000":
        await checker.finds(WARNING, "FULL and generated columns", "add a primary key")
        checker.source.execute("create unique index i on t (a)")
        await checker.mends(WARNING, "FULL and generated columns", 'using index "i"')


async def test_whole_rows_as_identity_are_slow_without_a_key(checker: Checker) -> None:
    both(checker, "create table t (a int not null, b int); alter table t replica identity full")
    checker.configure("t:")
    await checker.finds(WARNING, "has no key, so every update and delete compares whole rows")
    checker.source.execute("create unique index t_a on t (a)")
    await checker.mends(WARNING, "has no key", 'replica identity using index "t_a"')
    await checker.mends(WARNING, "no unique index on (a)")


async def test_two_sources_of_one_table_without_a_sid_column(
    checker: Checker, second: Database
) -> None:
    both(checker, ITEMS)
    second.execute(ITEMS)
    two_sources(checker, "'*':", {"eu": checker.source.url, "us": second.url})
    found = await checker.finds(ERROR, "would write the same rows of target table public.items")
    assert "shop:eu and shop:us, because it has no column sid" in str(found)
    checker.run_fix(found)
    assert await checker.findings() == []


async def test_two_sources_whose_keys_meet(checker: Checker, second: Database) -> None:
    checker.source.execute(ITEMS)
    second.execute(ITEMS)
    checker.target.execute("create table items (id int primary key, name text, sid text not null)")
    two_sources(checker, "'*':", {"eu": checker.source.url, "us": second.url})
    await checker.mends(WARNING, "has a unique key (id) without the sid")
    assert await checker.findings() == []


async def test_two_groups_with_the_same_sid(checker: Checker, second: Database) -> None:
    checker.source.execute(ITEMS)
    second.execute(ITEMS)
    checker.configure("'*':", sid="eu")
    text = checker.path.read_text()
    group = text[text.index("- database: shop") :]
    other = group.replace("database: shop", "database: store").replace(
        checker.source.url, second.url
    )
    checker.path.write_text(f"{text}\n{other}")
    found = await checker.finds(ERROR, "would write the same rows", "shop:eu and store:eu")
    assert "different sids" in str(found)
    checker.path.write_text(f"{text}\n{other.replace('sid: eu', 'sid: us')}")
    assert await checker.findings() == []
    checker.path.write_text(f"{text}\n{other.replace(', sid: eu', '')}")
    await checker.finds(ERROR, "not all sources of target table public.items have a sid")


@pytest.mark.usefixtures("without_spark")
async def test_run_refuses_the_table_of_two_tenants_that_check_refuses(
    checker: Checker, stream: MakeStreamer, second: Database
) -> None:
    """Only the rows of a single tenant could come. With the fix that `check` prints, both tenants
    stream.
    """
    create = "create table items (id int primary key, name text)"
    both(checker, create)
    second.execute(create)
    two_sources(checker, "items:", {"eu": checker.source.url, "us": second.url})
    found = await checker.finds(ERROR, "would write the same rows of target table public.items")
    async with stream("items:", sid="eu", others={"us": second}) as streamer:

        async def refused() -> list[str]:
            return [
                str(table["error"])
                for each in await streamer.statuses()
                for table in each["tables"]
                if table["state"] == "error"
            ]

        async def is_refused() -> bool:
            return bool(await refused())

        await streamer.eventually(is_refused)
        checker.source.execute("insert into items values (1, 'eu')")
        second.execute("insert into items values (1, 'us')")
        assert found.problem in (await refused())[0]
        checker.run_fix(found)
        for relation in await streamer.observer.tables():
            await make_request(streamer.observer.bookkeeping, relation.relation_id, "resync", {})
        rows = "select sid, name from items order by sid"
        await until(lambda: checker.target.execute(rows) == [("eu", "eu"), ("us", "us")])
        assert not await refused()


@pytest.mark.usefixtures("without_spark", "short_backoffs")
async def test_run_refuses_the_table_of_a_source_that_was_away_when_the_rules_were_checked(
    checker: Checker, second: Database
) -> None:
    """The url has the sid of a second group, so both would write the same rows."""
    for db in (checker.source, second):
        db.execute(f"{ITEMS}; insert into items values (1, '{db.name}')")
    checker.configure("'item*':", sid="eu")
    text = checker.path.read_text()
    group = text[text.index("- database: shop") :].replace("database: shop", "database: store")
    checker.path.write_text(f"{text}\n{group.replace(checker.source.url, second.url)}")
    may_connect = f"alter database {second.name} with allow_connections"
    checker.source.execute(f"{may_connect} false")
    streamer = Streamer(checker.path)
    streamer.start()
    try:
        ready = "select count(*) from streamer.relation where state = 'ready'"
        await until(lambda: checker.target.value(ready) == 1)
        checker.source.execute(f"{may_connect} true")
        found = await checker.finds(ERROR, "would write the same rows", "shop:eu and store:eu")

        async def refused() -> bool:
            (store,) = [s for s in await streamer.statuses() if s["database"] == "store"]
            return any(found.problem in str(table["error"]) for table in store["tables"])

        await streamer.eventually(refused)
        rows = checker.target.execute("select sid, id, name from items")
        assert rows == [("eu", 1, checker.source.name)]
    finally:
        checker.source.execute(f"{may_connect} true")
        await streamer.stop()


@pytest.mark.follows("apply.rows.make_plan:_check_guard")
async def test_keys_of_shards_that_may_meet(checker: Checker, second: Database) -> None:
    create = "create table items (id int primary key, name text)"
    fill = "; insert into items select g, '' from generate_series({0}, {0} + 9) g"
    checker.source.execute(create + fill.format(1))
    second.execute(create + fill.format(5))
    urls = {"eu": checker.source.url, "us": second.url}
    two_sources(checker, "items: {keys: disjoint}", urls)
    found = await checker.finds(WARNING, "overlap in target table public.items")
    assert "(1 to 10)" in str(found)
    second.execute("update items set id = id + 100")
    assert await checker.findings() == []
    # Steps prove that the keys differ, as long as all keys have them.
    for db, start in ((checker.source, 1), (second, 2)):
        db.execute(
            "truncate items; alter table items alter id add generated always as identity"
            f" (start {start} increment 2);"
            "insert into items (name) select '' from generate_series(1, 10)"
        )
    await checker.is_gone(WARNING, "overlap")
    second.execute("insert into items overriding system value values (9, '')")
    second.execute("delete from items where id < 9")
    await checker.finds(WARNING, "overlap in target table public.items")
    second.execute("delete from items where id = 9")
    checker.target.execute("create table items (id int not null, name text)")
    await checker.finds(ERROR, "needs a unique key (id)", "shop:eu")
    checker.target.execute("create unique index on items (id)")
    await checker.is_gone(ERROR, "needs a unique key")
