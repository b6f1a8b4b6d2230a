"""Tables that share a target without a sid: shards, and like-named tables of one database."""

from pathlib import Path

import pytest

from streamer.commands import repair
from streamer.commands.table_requests import request
from streamer.commands.tenants.purge_rows import purge
from streamer.copy.gap_reports import report_gaps
from streamer.errors.error_classes import MappingError
from streamer.runtime.session import source_checks
from streamer.target.connection import TargetAddress
from tests.support.comparing import Compare
from tests.support.postgres import Database
from tests.support.remedies import remedy_of
from tests.support.streamer import MakeStreamer, Streamer, write_config

pytestmark = pytest.mark.usefixtures("without_spark", "short_backoffs")

EVENTS = '"events_*": {target: events, keys: disjoint}'
TABLE = "create table {0} (id int primary key, v text)"
FILL = TABLE + "; insert into {0} select g, '{0} ' || g from generate_series({1}, {1} + 9) g"


def union(*tables: tuple[Database, str]) -> list[tuple[object, ...]]:
    """Return the rows of all *tables* in the order of their keys."""
    return sorted(row for db, table in tables for row in db.execute(f"table {table}"))


def rows(target: Database, table: str) -> list[tuple[object, ...]]:
    return sorted(target.execute(f"table {table}"))


async def error_of(streamer: Streamer, table: str, sid: str | None = None) -> str:
    """Return the error of *table* once the table has stopped."""
    errors: list[str] = []

    async def is_so() -> bool:
        statuses = [s for s in await streamer.statuses() if sid in (None, s["sid"])]
        errors[:] = [t["error"] for s in statuses for t in s["tables"] if t["source"] == table]
        return any(errors)

    await streamer.eventually(is_so)
    return next(filter(None, errors))


async def test_like_named_tables_of_a_database_share_a_table(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    compare: Compare,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source.execute(FILL.format("events_1", 10) + ";" + FILL.format("events_2", 20))
    both = (source, "events_1"), (source, "events_2")
    async with stream(EVENTS, settings="discovery_interval: 0.5") as streamer:
        await streamer.caught_up()
        assert rows(target, "events") == union(*both)
        # A source transaction changes rows of both tables, and moves keys.
        source.execute(
            "begin; update events_1 set v = 'x', id = 100 where id = 10;"
            "delete from events_2 where id = 20; insert into events_2 values (200, 'new');"
            "insert into events_2 values (20, 'again'); update events_1 set v = 'y' where id = 11;"
            "insert into events_1 values (10, 'short'); delete from events_1 where id = 10; commit"
        )
        await streamer.caught_up()
        assert rows(target, "events") == union(*both)
        # A third table joins by itself, and leaves the rows of the others as they are.
        versions = "select id, xmin::text from events where id not between 30 and 39 order by 1"
        before = target.execute(versions)
        source.execute(FILL.format("events_3", 30))
        await streamer.table_state("public.events_3", "ready")
        all_three = (*both, (source, "events_3"))
        await streamer.caught_up()
        assert rows(target, "events") == union(*all_three)
        assert target.execute(versions) == before
        # A comparison finds rows that the target lacks, and does not judge rows of other tables.
        results = await compare(streamer)
        assert all(result.is_equal for result in results.values())
        target.execute("delete from events where id = 12; update events set v = '' where id = 22")
        target.execute("insert into events values (999, 'of no source')")
        results = await compare(streamer)
        counts = {name: (r.missing, r.different, r.extra) for name, r in results.items()}
        assert sorted(counts.values()) == [(0, 0, 0), (0, 1, 0), (1, 0, 0)]
        # A repair inserts and updates rows of each table, and leaves rows of no source.
        results = await compare(streamer, repairs=True)
        assert all(result.is_equal for result in results.values())
        assert rows(target, "events") == sorted([*union(*all_three), (999, "of no source")])
        # With many differences, a repair compares the whole table, and so does `--mode diff`.
        address = TargetAddress.parse(streamer.settings.target.url)
        expected = sorted([*union(*all_three), (999, "of no source")])
        harm = "delete from events where id in (12, 23); update events set v = '' where id = 33"
        target.execute(harm)
        with monkeypatch.context() as patch:
            patch.setattr(repair, "KEYS_MAX", 0)
            results = await compare(streamer, repairs=True)
        assert all(result.is_equal for result in results.values())
        assert rows(target, "events") == expected
        where = {"where": ["id between 10 and 23"]}
        limited: list[dict[str, object]] = [{"mode": "diff"}, {"scope": where}]
        for options in limited:
            target.execute(harm)
            requested = await request(
                address, "resync", "events_1", database=None, sid=None, options=options
            )
            assert requested.names == ["shop public.events_1"]
            await streamer.caught_up()
            mended = {row[0]: row for row in rows(target, "events")}
            assert mended[12] == (12, "events_1 12")
            assert 23 not in mended, "a copy of one table changed a row of a second table"
            target.execute("insert into events values (23, 'events_2 23')")
            target.execute("update events set v = 'events_3 33' where id = 33")
        # A resync of one table copies all of them, and removes rows that no source has.
        requested = await request(address, "resync", "events_1", database=None, sid=None)
        assert sorted(requested.names) == [f"shop public.events_{n}" for n in (1, 2, 3)]
        await streamer.caught_up()
        assert rows(target, "events") == union(*all_three)


@pytest.mark.follows("bookkeeping.taken_requests:find_mixed_rows")
@pytest.mark.follows("copy.gap_reports:_describe")
async def test_a_copy_of_differing_rows_refuses_rows_that_came_without_an_insert(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of an attached partition may have the key of a row of a second table."""
    monkeypatch.setattr(source_checks, "CHECK_SECONDS", 0.5)
    monkeypatch.setattr(source_checks, "report_gaps", _report_no_gaps)
    source.execute(FILL.format("events_1", 10))
    source.execute(
        "create table events_2 (id int primary key, v text) partition by range (id);"
        "create table twenties partition of events_2 for values from (20) to (30);"
        "insert into events_2 select g, 'events_2 ' || g from generate_series(20, 29) g"
    )
    source.execute(TABLE.format("strays") + "; insert into strays values (10, 'stray')")
    async with stream(EVENTS, settings="discovery_interval: 0.5") as streamer:
        await streamer.caught_up()
        before = rows(target, "events")
        address = TargetAddress.parse(streamer.settings.target.url)
        resync = "streamer resync public.events_2 --database shop"

        async def ask(options: dict[str, object]) -> None:
            await request(address, "resync", "events_2", database=None, sid=None, options=options)

        # A copy finds a gap that no check has reported yet.
        source.execute("alter table events_2 attach partition strays for values from (0) to (20)")
        await ask({"mode": "diff"})
        late = await remedy_of(streamer, "public.events_2", "came without an INSERT")
        assert [step.line for step in late.commands] == [resync]
        assert rows(target, "events") == before
        await request(address, "resume", "events_2", database=None, sid=None)
        await streamer.table_state("public.events_2", "ready")
        monkeypatch.setattr(source_checks, "report_gaps", report_gaps)
        gap = await remedy_of(streamer, "public.events_2", "attached as a partition")
        assert [step.line for step in gap.commands] == [resync]
        limited: list[dict[str, object]] = [{"mode": "diff"}, {"scope": {"where": ["id < 15"]}}]
        for options in limited:
            with pytest.raises(MappingError, match="came without an INSERT") as refused:
                await ask(options)
            assert refused.value.remedy is not None
            assert [step.line for step in refused.value.remedy.commands] == [resync]
        assert rows(target, "events") == before
        source.execute("alter table events_2 detach partition strays")
        await ask({})
        await streamer.caught_up()
        assert rows(target, "events") == union((source, "events_1"), (source, "events_2"))


async def _report_no_gaps(*_: object, **__: object) -> None:
    pass


@pytest.mark.follows("copy.gap_reports:_describe")
async def test_rows_that_came_without_an_insert_stop_their_table(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update of such a row would change the row of a second table with an equal key."""
    monkeypatch.setattr(source_checks, "CHECK_SECONDS", 0.5)
    source.execute(FILL.format("events_1", 10))
    source.execute(
        "create table events_2 (id int primary key, v text) partition by range (id);"
        "create table twenties partition of events_2 for values from (20) to (30);"
        "insert into events_2 select g, 'events_2 ' || g from generate_series(20, 29) g"
    )
    source.execute(FILL.format("others", 30) + ";" + FILL.format("strays", 10))
    both = (source, "events_1"), (source, "events_2")
    async with stream(EVENTS) as streamer:
        await streamer.caught_up()
        # GIVEN a partition whose keys are new WHEN it is attached THEN a resync continues
        source.execute("alter table events_2 attach partition others for values from (30) to (40)")
        gap = await remedy_of(streamer, "public.events_2", "attached as a partition")
        assert (await streamer.table("public.events_2"))["state"] == "error"
        (again,) = gap.commands
        assert again.line == "streamer resync public.events_2 --database shop"
        await streamer.ask("resync", "public.events_2")
        await streamer.caught_up()
        assert rows(target, "events") == union(*both)
        # GIVEN a partition with keys of a second table WHEN its rows change THEN no row changes
        source.execute("alter table events_2 attach partition strays for values from (0) to (20)")
        await remedy_of(streamer, "public.events_2", "first detach the partition")
        before = rows(target, "events")
        source.execute("update events_2 set v = 'harm' where id = 12")
        source.execute(
            "delete from events_2 where id = 13; update events_1 set v = 'x' where id = 14"
        )
        await streamer.eventually(lambda: _has(target, (14, "x")))
        changed = [row for row in rows(target, "events") if row not in before]
        assert changed == [(14, "x")]
        assert len(rows(target, "events")) == len(before)
        # A copy fails as long as the partition is attached.
        await streamer.ask("resync", "public.events_2")
        await streamer.eventually(lambda: _one_has_error(streamer, "already"))
        source.execute("alter table events_2 detach partition strays")
        await streamer.ask("resync", "public.events_2")
        await streamer.caught_up()
        assert rows(target, "events") == union(*both)
        source.execute("update events_2 set v = 'again' where id = 20")
        await streamer.caught_up()
        assert rows(target, "events") == union(*both)


async def _has(target: Database, row: tuple[object, ...]) -> bool:
    return row in rows(target, "events")


async def _one_has_error(streamer: Streamer, words: str) -> bool:
    return any(words in (t["error"] or "") for s in await streamer.statuses() for t in s["tables"])


@pytest.mark.follows("copy.shared_copies:advise_resync")
async def test_a_truncate_stops_its_table_until_all_are_copied_again(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(FILL.format("events_1", 10) + ";" + FILL.format("events_2", 20))
    both = (source, "events_1"), (source, "events_2")
    async with stream(EVENTS) as streamer:
        await streamer.caught_up()
        before = rows(target, "events")
        source.execute("truncate events_1; insert into events_1 values (15, 'after')")
        error = await error_of(streamer, "public.events_1")
        assert "was truncated" in error
        assert error.count("streamer resync public.events_1 --database shop") == 1
        assert rows(target, "events") == before
        await streamer.ask("resync", "public.events_1")
        await streamer.caught_up()
        assert rows(target, "events") == union(*both)
    async with stream(EVENTS.replace("}", ", skip_truncate: true}")) as streamer:
        await streamer.caught_up()
        source.execute("truncate events_1; insert into events_1 values (16, 'other key')")
        await streamer.caught_up()
        assert rows(target, "events") == sorted([*union(*both), (15, "after")])
        # A row that stays keeps its key.
        source.execute("insert into events_1 values (15, 'again')")
        assert "already exists" in await error_of(streamer, "public.events_1")


@pytest.mark.follows("copy.shared_copies:advise_copy")
@pytest.mark.follows("commands.tenants.purge_rows:_advise_copies")
async def test_shards_share_a_table_and_a_collision_stops_the_second(
    source: Database, second: Database, target: Database, tmp_path: Path
) -> None:
    """The sid of a url names the shard, and no row has it."""
    source.execute(FILL.format("t", 10))
    second.execute(FILL.format("t", 15))
    path = tmp_path / "config.yaml"
    write_config(path, source, target, "t: {keys: disjoint}", sid="a", others={"b": second})
    streamer = Streamer(path)
    streamer.start()
    try:
        await streamer.eventually(lambda: _one_is_ready(streamer))
        errors = [t for s in await streamer.statuses() for t in s["tables"] if t["error"]]
        (stopped,) = [s for s in await streamer.statuses() if s["tables"][0]["error"]]
        assert 'source "shop:a"' in errors[0]["error"]
        assert 'source "shop:b"' in errors[0]["error"]
        first, late = (source, second) if stopped["sid"] == "b" else (second, source)
        assert rows(target, "t") == union((first, "t"))
        late.execute("update t set id = id + 100")
        address = TargetAddress.parse(streamer.settings.target.url)
        await request(address, "resume", "t", database="shop", sid=stopped["sid"])
        await streamer.caught_up()
        both = (source, "t"), (second, "t")
        assert rows(target, "t") == union(*both)
        # An insert or an update that takes a key of the other shard stops its table.
        before = rows(target, "t")
        first.execute("update t set id = 115 where id = 15")
        other = "a" if stopped["sid"] == "b" else "b"
        error = await error_of(streamer, "public.t", other)
        assert "already exists" in error
        assert 'source "shop:a"' in error
        assert 'source "shop:b"' in error
        assert rows(target, "t") == before
        late.execute("delete from t where id = 115")
        await streamer.caught_up()
        assert rows(target, "t") == union(*both)
        # A resync of one shard copies both.
        target.execute("update t set v = 'wrong'; insert into t values (0, 'of no source')")
        await streamer.ask("resync")
        await streamer.caught_up()
        assert rows(target, "t") == union(*both)
        # A purge cannot find the rows of a removed shard. The next copy of the others deletes them.
        write_config(path, source, target, "t: {keys: disjoint}", sid="a")
        await streamer.apply()
        with pytest.raises(MappingError, match="look like rows of other sources") as refused:
            await purge(address, streamer.mapping, "shop", "b", actor="test")
        assert refused.value.remedy is not None
        (again,) = refused.value.remedy.commands
        assert again.line == "streamer resync public.t --database shop --sid a"
        await streamer.ask("resync")
        await streamer.caught_up()
        assert rows(target, "t") == union((source, "t"))
    finally:
        await streamer.stop()


async def _one_is_ready(streamer: Streamer) -> bool:
    states = [table["state"] for s in await streamer.statuses() for table in s["tables"]]
    return sorted(states) in (["error", "ready"], ["catching_up", "error"])


@pytest.mark.follows("copy.shared_copies:advise_copy")
@pytest.mark.follows("runtime.guards.reconcile:_stop_missing_disjoint")
async def test_a_renamed_table_is_copied_with_all_tables_once_its_former_name_is_left_out(
    source: Database, target: Database, tmp_path: Path
) -> None:
    source.execute(FILL.format("events_1", 10) + ";" + FILL.format("events_2", 20))
    path = tmp_path / "config.yaml"
    write_config(path, source, target, EVENTS, settings="discovery_interval: 0.5")
    streamer = Streamer(path)
    streamer.start()
    try:
        await streamer.caught_up()
        source.execute(
            "alter table events_1 rename to events_9; delete from events_9 where id = 19"
        )
        for table, words in (("events_1", "renamed it to"), ("events_9", "already exists")):
            remedy = await remedy_of(streamer, f"public.{table}", words)
            again = [step for step in remedy.commands if step.action == "resync"]
            assert [step.table for step in again] == ["public.events_9"]
        assert 'add "public.events_1" to `exclude_tables`' in str(
            await remedy_of(streamer, "public.events_1", "renamed it to")
        )
        group = "exclude_tables: [events_1]"
        write_config(path, source, target, EVENTS, settings="discovery_interval: 0.5", group=group)
        await streamer.apply()
        await streamer.ask("resync", "public.events_9")
        await streamer.caught_up()
        assert rows(target, "events") == union((source, "events_9"), (source, "events_2"))
    finally:
        await streamer.stop()


async def test_a_new_column_waits_for_its_sql_and_a_resync_of_the_column_fills_it(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(FILL.format("events_1", 10) + ";" + FILL.format("events_2", 20))
    async with stream(EVENTS) as streamer:
        await streamer.caught_up()
        for number in (1, 2):
            source.execute(
                f"alter table events_{number} add column w int default 7;"
                f"insert into events_{number} values ({number}, 'new')"
            )
        remedies = [await remedy_of(streamer, f"public.events_{n}", '"w"') for n in (1, 2)]
        assert remedies[0].sql == remedies[1].sql
        target.execute("; ".join(remedies[0].sql[0].statements))
        target.execute("update events set w = null")
        for number in (1, 2):
            await streamer.ask("resume", f"public.events_{number}")
        await streamer.caught_up()
        for number in (1, 2):
            await streamer.ask("resync", f"public.events_{number}", columns=["w"])
        await streamer.caught_up()
        assert rows(target, "events") == union((source, "events_1"), (source, "events_2"))
