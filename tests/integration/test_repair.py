"""A resync that is limited to some rows brings these rows, and loses no change of the rest."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from streamer.commands import repair, request_outcomes
from streamer.control.resync_options import KeySet, Resync, RowScope
from streamer.errors.error_classes import ComparisonError
from streamer.target.connection import TargetAddress
from tests.integration.test_sync_resync import stages
from tests.support.comparing import Compare
from tests.support.postgres import Database, assert_same
from tests.support.process import command
from tests.support.runbooks import run_block
from tests.support.streamer import MakeStreamer, Streamer
from tests.support.waiting import until

pytestmark = [
    pytest.mark.usefixtures("without_spark", "short_backoffs"),
    pytest.mark.timeout(180),
]

DDL = """
create table keyed (id int primary key, region text, v text);
create table bag (a int, region text);
create table hist (id int primary key, region text, v text);
create table log (id int primary key, region text, v text);
create table loose (id int primary key, region text, v text);
insert into keyed select g, case when g % 2 = 0 then 'EU' else 'US' end, 'v' from generate_series(1, 200) g;
insert into hist select * from keyed;
insert into log select * from keyed;
insert into loose select * from keyed;
insert into bag select g % 5, case when g % 2 = 0 then 'EU' else 'US' end from generate_series(1, 50) g;
alter table bag replica identity full;
"""
TABLES = """
keyed: {target: items, columns: {id: item, region: area, v: v}}
bag:
hist: {type: history}
log: {type: append}
loose:
"""
EU = RowScope(("region = 'EU'",))
KEYED = "select item, area, v from items where sid = 'eu' order by item"


def limited(scope: RowScope) -> dict[str, Any]:
    return Resync(scope=scope).to_json()


async def bring(streamer: Streamer, table: str, scope: RowScope) -> None:
    """Request the rows of *scope*, and wait for their copy."""
    await streamer.ask("resync", f"public.{table}", **limited(scope))
    await streamer.caught_up()


@contextmanager
def writing(source: Database) -> Iterator[None]:
    """Change rows all the while: hot rows, keys, and moves between regions."""
    ended = threading.Event()

    def write() -> None:
        with source.connect() as connection:
            n = 0
            while not ended.wait(0.05):  # the drainer of the table without a key keeps up
                n += 1
                for table in ("keyed", "hist", "log", "loose"):
                    connection.execute(
                        f"""
                        begin;
                        insert into {table} values ({1000 + n}, 'EU', 'new');
                        update {table} set v = v || '.' where id in (3, 4);
                        update {table} set id = id + 100000 where id = {1000 + n} - 5;
                        update {table} set region = case region when 'EU' then 'US' else 'EU' end
                          where id = {n % 50} + 20;
                        delete from {table} where id = 101000 + {n} - 8;
                        commit
                        """.encode()
                    )
                connection.execute(
                    f"""
                    begin;
                    insert into bag values ({n % 5}, 'EU');
                    update bag set region = 'US'
                      where ctid = (select min(ctid) from bag where region = 'EU');
                    commit
                    """.encode()
                )

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


async def test_rows_of_a_condition_are_copied_while_all_rows_change(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(DDL)
    async with stream(TABLES, sid="eu") as streamer:
        await streamer.caught_up()
        target.execute(
            """
            insert into items values ('other', 2, 'EU', 'theirs'), ('eu', 5000, 'EU', 'extra'),
                                     ('eu', 5001, 'US', 'stays');
            update items set v = 'wrong' where sid = 'eu' and item in (100, 101);
            update items set area = 'EU' where sid = 'eu' and item = 103;
            update items set area = 'US', v = 'x' where sid = 'eu' and item = 104;
            delete from items where sid = 'eu' and item = 106;
            insert into bag values ('eu', 7, 'EU'), ('eu', 7, 'US'), ('other', 7, 'EU');
            update hist set v = 'wrong' where id in (100, 101);
            delete from hist where id = 106;
            update log set v = 'wrong' where id in (100, 101);
            delete from log where id in (106, 107);
            insert into log values ('eu', 5000, 'EU', 'extra');
            alter table loose drop constraint loose_pkey;
            update loose set v = 'wrong', region = 'US' where id in (100, 102);
            insert into loose values ('eu', 110, 'EU', 'doubled');
            """
        )
        with writing(source):
            for table in ("keyed", "bag", "hist", "log", "loose"):
                await bring(streamer, table, EU)
        await streamer.caught_up()
        states = {t["source"]: t["state"] for t in (await streamer.status())["tables"]}
    rows = {row[0]: row for row in source.execute("select * from keyed")}
    found = {row[0]: row for row in target.execute(KEYED)}
    assert found.pop(5001) == (5001, "US", "stays"), "it is not in the scope"
    assert found.pop(101) == (101, "US", "wrong"), "it is not in the scope"
    assert rows.pop(101) == (101, "US", "v")
    assert found == rows
    assert target.value("select count(*) from items where sid = 'other'") == 1
    own = "select a, region, count(*) from bag {} group by 1, 2 order by 1, 2"
    assert target.execute(own.format("where sid = 'eu' and (a, region) <> (7, 'US')")) == (
        source.execute(own.format(""))
    )
    assert target.value("select count(*) from bag where sid = 'other'") == 1
    wrong = {(101, "US", "v")}
    open_now = set(target.execute("select id, region, v from hist where kvsz_end > '9000-01-01'"))
    assert open_now ^ set(source.execute("select * from hist")) == wrong | {(101, "US", "wrong")}
    logged = {row[0]: row for row in target.execute("select id, region, v from log")}
    assert logged[100] == (100, "EU", "v")
    assert logged[106] == (106, "EU", "v")
    assert logged[5000] == (5000, "EU", "extra")
    assert 107 not in logged
    assert logged[101] == (101, "US", "wrong")
    assert target.execute("select id, region, v from loose order by id") == (
        source.execute("select * from loose order by id")
    )
    assert set(states.values()) == {"ready"}
    assert stages(target) == []


async def test_keys_are_copied_and_a_truncate_meanwhile_counts(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(DDL)
    keys = RowScope(keys=(KeySet(("item",), ("integer",), (("7",), ("8",), ("9",), ("5000",))),))
    async with stream(TABLES, sid="eu") as streamer:
        await streamer.caught_up()
        target.execute(
            """
            update items set v = 'wrong' where item in (7, 8, 10); delete from items where item = 9;
            insert into items values ('eu', 5000, 'EU', 'extra')
            """
        )
        await bring(streamer, "keyed", keys)
        assert target.execute("select item from items where v <> 'v'") == [(10,)]
        assert target.value("select count(*) from items") == 200
        audit = (
            "select options -> 'scope' ->> 'keys' from streamer.request order by id desc limit 1"
        )
        assert target.value(audit) == "4", "the audit has no values of rows"
        target.execute("update items set v = 'wrong' where item = 7")
        await streamer.ask("resync", "public.keyed", **limited(keys))
        source.execute("truncate keyed; insert into keyed values (7, 'EU', 'after')")
        await streamer.caught_up()
        assert target.execute(KEYED) == [(7, "EU", "after")]
        # streamer applies held changes before the swap of the rows, and later changes after it.
        target.execute("update items set v = 'wrong'")
        for n in range(30):
            source.execute(f"insert into keyed values ({n + 100}, 'EU', 'n')")
        await bring(streamer, "keyed", RowScope(EU.conditions, keys.keys))
        assert target.execute(KEYED) == source.execute("select * from keyed order by id")


async def test_an_impossible_limited_resync_leaves_the_table_unchanged(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(DDL)
    target.execute(
        "create table keyed (id int primary key, region text, v text check (v <> 'bad'), h text)"
    )
    tables = "keyed: {set: {h: md5(region)}, exclude: [region], on_error: quarantine}\nhist:"
    async with stream(tables) as streamer:
        await streamer.caught_up()

        async def refused(table: str, scope: RowScope, reason: str) -> None:
            await streamer.ask("resync", f"public.{table}", **limited(scope))

            async def is_refused() -> bool:
                found = await streamer.table(f"public.{table}")
                return reason in str(found["error"]) and found["state"] == "ready"

            await streamer.eventually(is_refused)
            source.execute(f"update {table} set v = v || '+' where id = 1")
            await streamer.caught_up()

        await refused("keyed", EU, "does not store the source's values")
        await refused("hist", RowScope(("nothing = 1",)), "nothing")
        source.execute("update keyed set v = 'bad' where id = 5")
        await streamer.caught_up()
        await refused("keyed", RowScope(("id = 5",)), "in quarantine")
        assert target.value("select v from keyed where id = 1") == "v++"
        assert stages(target) == []


WIDE = """
create table wide (a int, b date, v text, n numeric, d double precision, t timestamptz, i interval,
                   y bytea, c char(4), primary key (b, a));
insert into wide select g, date '2026-01-01' + g % 7, 'v' || g, g / 4.0, g / 3.0,
  timestamptz '2026-01-01 12:00+00' + g * interval '1 minute', g * interval '1 hour',
  decode(lpad(to_hex(g), 4, '0'), 'hex'), 'ab' from generate_series(1, 1000) g;
create table named (name text, n int, v text, primary key (name, n));
insert into named select 'name ' || g / 2, g % 2, 'v' from generate_series(1, 300) g;
create table mixed (t text, kind text, v jsonb, c char(3));
alter table mixed replica identity full;
insert into mixed select 'x' || g % 100, 'kind', '{"n": 1.0}', 'a' from generate_series(1, 300) g;
create table hist (id int primary key, region text, v text);
insert into hist select g, 'EU', 'v' from generate_series(1, 300) g;
"""


async def test_a_resync_by_difference_copies_only_the_ranges_and_buckets_that_differ(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamer.compare.cut_ranges.RANGE_ROWS", 100)
    monkeypatch.setattr("streamer.compare.cut_ranges.FETCH_ROWS", 10)
    monkeypatch.setattr("streamer.compare.cut_ranges.BUCKET_ROWS", 5)
    source.execute(WIDE)
    tables = (
        "wide: {target: broad, columns: {a: aa, b: bb, v: v, n: n, d: d, t: t, i: i, y: y, c: c}}"
    )
    copied = """
        select coalesce(sum(rows_copied), 0) from streamer.sync_partition
        where relation_id = (select id from streamer.relation where source = 'public.{}')
    """
    computed = 'mixed: {set: {kind: "upper(kind) || t"}, filter: "t <> \'x13\'"}'
    async with stream(
        f"{tables}\nnamed:\n{computed}\nhist: {{type: history}}", sid="eu"
    ) as streamer:
        await streamer.caught_up()
        source.execute("analyze")
        for table in ("wide", "named", "mixed"):
            await streamer.ask("resync", f"public.{table}", mode="diff")
        await streamer.caught_up()
        for table in ("wide", "named", "mixed"):
            assert target.value(copied.format(table)) == 0, "they are equal"
        target.execute(
            """
            update broad set n = 1.0 where aa = 4; update broad set c = null where aa = 500;
            delete from broad where aa = 900;
            insert into broad (sid, aa, bb) values ('eu', 5000, '2030-01-01'), ('eu', 5000, '2020-01-01');
            insert into broad (sid, aa, bb) values ('other', 1, '2026-01-01');
            update named set v = 'wrong' where name = 'name 7'; delete from named where name = 'name 9';
            insert into named values ('other', 'name 1', 1, 'theirs'), ('eu', 'extra', 1, 'v');
            update named set sid = 'us' where sid = 'eu' and name = 'name 20' and n = 1;
            insert into mixed (sid, t, kind, v, c) values ('eu', 'x1', 'KINDx1', '{"n": 1.0}', 'a'),
              ('us', 'x1', 'KINDx1', '{"n": 1.0}', 'a'), ('eu', 'x13', 'KINDx13', '{"n": 1.0}', 'a');
            update mixed set v = '{"n": 1.00}'
              where ctid = (select min(ctid) from mixed where t = 'x5');
            delete from mixed where ctid = (select min(ctid) from mixed where t = 'x8');
            update hist set v = 'wrong' where id = 200; delete from hist where id = 201
            """
        )
        source.execute("update wide set v = 'w' where a = 800")
        await streamer.ask("resync", "public.wide", mode="diff")
        for table in ("named", "mixed", "hist"):
            await streamer.ask("resync", f"public.{table}", mode="diff")
        source.execute(
            "update wide set v = 'held' where a in (4, 5); update hist set v = 'w' where id = 3;"
            "update named set v = 'held' where name in ('name 7', 'name 11');"
            "delete from mixed where ctid = (select min(ctid) from mixed where t = 'x5')"
        )
        await streamer.caught_up()
        assert 4 <= int(str(target.value(copied.format("named")))) <= 60
        assert 6 <= int(str(target.value(copied.format("mixed")))) <= 60
        assert 3 <= int(str(target.value(copied.format("wide")))) <= 100
        assert 2 <= int(str(target.value(copied.format("hist")))) <= 20
        assert stages(target) == []
    own = "select aa, bb, v, n, d, t, i, y, c from broad where sid = 'eu' order by 2, 1"
    assert target.execute(own) == source.execute("select * from wide order by b, a")
    assert target.value("select count(*) from broad where sid = 'other'") == 1
    named = "select name, n, v from named {} order by 1, 2"
    assert target.execute(named.format("where sid = 'eu'")) == source.execute(named.format(""))
    assert target.value("select count(*) from named where sid <> 'eu'") == 2
    mixed = "select t, {} as kind, v::text, c, count(*) from mixed where {} group by 1, 2, 3, 4 order by 1"
    assert target.execute(mixed.format("kind", "sid = 'eu'")) == (
        source.execute(mixed.format("upper(kind) || t", "t <> 'x13'"))
    )
    assert target.value("select count(*) from mixed where sid = 'us'") == 1
    open_now = "select id, region, v from hist where kvsz_end > '9000-01-01' order by id"
    assert target.execute(open_now) == source.execute("select * from hist order by id")


KILLS = (
    "requests.taken",
    "sync.prepared",
    "sync.job_started",
    "sync.at_point",
    "sync.exchanged",
    "sync.catching_up",
)


async def test_killed_meanwhile_it_begins_again_and_no_change_is_lost(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute(DDL)
    armed = ""
    killed = asyncio.Event()

    def fail(at: str) -> None:
        if at == armed:
            killed.set()
            raise asyncio.CancelledError

    modules = ("copy.finish_copies", "copy.plan_copies", "copy.copy_round")
    for module in (*modules, "runtime.session.operator_requests"):
        monkeypatch.setattr(f"streamer.{module}.failpoint", fail, raising=False)
    async with stream("keyed:\nhist: {type: history}") as streamer:
        await streamer.caught_up()
        for name in KILLS:
            for table in ("keyed", "hist", "log", "loose"):  # the writer makes the rows again
                source.execute(f"delete from {table} where id > 1000")
            target.execute("update keyed set v = 'wrong' where id in (4, 5)")
            if name == KILLS[1]:  # a different table has been repaired before
                await streamer.ask("resync", "public.hist", **limited(EU))
                await streamer.caught_up()
            armed = name
            killed.clear()
            with writing(source):
                await streamer.ask("resync", "public.keyed", **limited(EU))
                await asyncio.wait_for(killed.wait(), 60)
                await streamer.kill()
                wrong = target.value("select count(*) from keyed where v = 'wrong'")
                assert wrong in (1, 2), name
                armed = ""
                streamer.start()
            await streamer.caught_up()
            left = target.execute("update keyed set v = 'v' where v = 'wrong' returning id")
            assert left == [(5,)], f"{name}: it is not in the scope"
            for table in ("keyed", "hist"):
                now = "where kvsz_end > '9000-01-01'" if table == "hist" else ""
                assert target.execute(f"select id, region, v from {table} {now} order by id") == (
                    source.execute(f"select * from {table} order by id")
                ), name
            assert stages(target) == [], name


@pytest.mark.follows("runbooks:tables-differ#1")
@pytest.mark.follows("runbooks:tables-differ#2")
@pytest.mark.follows("runbooks:tables-differ#3")
async def test_commands_show_and_repair_rows_that_differ(
    stream: MakeStreamer, source: Database, target: Database
) -> None:
    names = {"orders": "t"}
    source.execute("create table t (id int primary key, v text); insert into t values (1, 'right')")
    async with stream("t:") as streamer:
        await streamer.caught_up()

        async def run(place: str, code: int = 0) -> str:
            return await asyncio.to_thread(run_block, streamer.path, place, names, code=code)

        # GIVEN a row that a foreign program changed
        target.execute("update t set v = 'wrong'")
        shown = await run("tables-differ#1", code=1)
        for word in ("different", "right", "wrong"):
            assert word in shown
        await run("tables-differ#2")
        assert_same(source, target, "t")
        # GIVEN a comparison that a paused table leaves undecided
        await streamer.ask("pause")
        source.execute("update t set v = 'late'")
        early = await asyncio.to_thread(command, streamer.path, "compare", "t", "--timeout", "1")
        assert (early.returncode, "undecided" in early.stdout) == (1, True)
        await streamer.ask("resume")
        assert "equal" in await run("tables-differ#3")


async def test_a_repair_says_that_no_process_runs_and_the_next_start_makes_it(
    stream: MakeStreamer,
    compare: Compare,
    source: Database,
    target: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_outcomes, "ABSENT_SECONDS", 0.2)
    source.execute("create table t (id int primary key, v text); insert into t values (1, 'v')")
    async with stream("t:") as streamer:
        await streamer.caught_up()
        target.execute("update t set v = 'w'")
        compared = [*(await compare(streamer)).values()]
        await streamer.stop()
        address = TargetAddress.parse(streamer.settings.target.url)
        with pytest.raises(ComparisonError) as refused:
            await repair._repair_tables(address, compared, None, "alice")
        assert 'no process runs source "shop"' in str(refused.value)
        assert "start `streamer run`" in str(refused.value)
        streamer.start()
        await until(lambda: target.value("select v from t") == "v", "the repair is made")
        assert (await compare(streamer))["t"].is_equal
