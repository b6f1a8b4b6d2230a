"""Partitions that join and leave a source's table, in their place in the stream."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from streamer.commands import ddl_decisions
from streamer.commands.demo.embedded_servers import Server
from streamer.schema_changes.changes_during_copy import ChangedDefinitions
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database, database
from tests.support.process import command
from tests.support.streamer import MakeStreamer, Streamer, write_config

pytestmark = [pytest.mark.usefixtures("without_spark"), pytest.mark.hostile_sessions]

DDL = """
create table m (id int, at date, region text, note text, primary key (id, at, region))
    partition by range (at);
create table m_1 partition of m for values from (minvalue) to ('2024-02-01');
create table m_2 partition of m for values from ('2024-02-01') to ('2024-03-01')
    partition by list (region);
create table m_2_eu partition of m_2 for values in ('e''u', 'EU');
create table m_2_rest partition of m_2 default;
create table m_rest partition of m default;
insert into m select g, '2024-01-01'::date + g, case g % 3 when 0 then 'e''u' else 'us' end, 'x'
  from generate_series(1, 80) g;
"""
ROWS = "select id, at, region, note from m order by id"


async def test_rows_of_a_detached_partition_wait_for_a_decision_in_their_place(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(DDL)
    async with stream("m:", group="ddl: capture") as streamer:
        await streamer.caught_up()
        source.execute("insert into m values (900, '2024-05-01', 'x')")
        source.execute("alter table m detach partition m_1; delete from m where id = 900")
        await streamer.table_state("public.m", "error")
        assert target.value("select count(*) from m") == 81
        error = str((await streamer.table("public.m"))["error"])
        assert "on_ddl is stop for detach_partition" in error
        assert "streamer ddl apply public.m --database shop" in error
        await streamer.decide("apply", "m")
        await streamer.table_state("public.m", "ready")
        await streamer.caught_up()
        assert target.execute(ROWS) == source.execute(ROWS)


APPLY = "ddl: capture\ncreate: all\non_ddl: {detach_partition: apply}"
TABLES = "m:\nh: {type: history}\np: {partitioned: true, target: dw.p}"
CHANGES = [
    "alter table m detach partition m_1",
    "create table m_0 partition of m for values from (minvalue) to ('2024-02-01')",
    "create table other (like m); alter table m_2 attach partition other for values in ('z')",
    (
        "alter table m_2_eu rename to m_x; alter table m_2_rest rename to m_2_eu;"
        " alter table m_x rename to m_2_rest; alter table m_0 rename to m_y"
    ),
    "alter table m_2 detach partition m_2_rest",
    "drop table m_2",
    "alter table m detach partition m_rest",
    "alter table m detach partition m_y concurrently",  # two transactions, without a default
]
PARTITIONS = """
select relid::regclass::text, parentrelid::regclass::text, isleaf,
       pg_get_expr(relpartbound, relid), pg_get_partkeydef(relid)
  from pg_partition_tree('p') t join pg_class c on c.oid = relid order by 1
"""


async def test_partitions_come_and_go_in_a_plain_table_a_history_and_a_partitioned_one(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    tables = ("m", "h", "p")
    for table in tables:
        source.execute(DDL.replace(" m", f" {table}").replace("of m", f"of {table}"))
        source.execute(f"create index on {table} (note, at)")
    async with stream(TABLES, group=APPLY) as streamer:
        await streamer.caught_up()
        path = "set search_path = dw, public;"
        assert target.execute(path + PARTITIONS) == source.execute(PARTITIONS)
        made = "select count(*) from streamer.definition where kind = 'index' and state = 'made'"
        assert target.value(made) == len(tables)
        for number, change in enumerate(CHANGES):
            for table in tables:
                own = change.replace(" m", f" {table}").replace("other", f"other_{table}")
                source.execute(
                    f"update {table} set note = 'n{number}' where id % 5 = {number};"
                    f"insert into {table} values (-{number + 1}, '2024-02-03', 'e''u');"
                    f"{own};"
                    f"insert into {table} values ({1000 + number}, '2024-01-01', 'q')"
                    if number in (1, 2)
                    else own
                )
            if "rename" in change:
                await streamer.caught_up()
                assert target.execute(path + PARTITIONS) == source.execute(PARTITIONS)
        await streamer.caught_up()
        for table, read in (("m", "m"), ("h", "h"), ("p", "dw.p")):
            still = "where kvsz_end > now()" if table == "h" else ""
            rows = "select id, at, region, note from {} {} order by id"
            expected = source.execute(rows.format(table, ""))
            assert target.execute(rows.format(read, still)) == expected, table
        assert target.execute(path + PARTITIONS) == source.execute(PARTITIONS)
        assert target.value("select count(*) from h where kvsz_deleted") == 84
        target.execute(
            "update dw.p set note = 'wrong' where id = 1000; delete from dw.p where id = 1001"
        )
        copied = await asyncio.to_thread(command, streamer.path, "resync", "p")
        assert copied.returncode == 0, copied.stderr
        source.execute("update p set at = '2024-01-05' where id = 1000")

        async def is_repaired() -> bool:
            return target.execute(rows.format("dw.p", "")) == source.execute(rows.format("p", ""))

        await streamer.eventually(is_repaired)
        assert target.value("select count(*) from dw.p_1") == source.value(
            "select count(*) from p_1"
        )


P = "create table p (id int primary key, v text) partition by range (id);"
PART = "create table {} partition of p for values from ({}) to ({});"


def part(name: str, begin: int, end: int) -> str:
    row = (begin + end) // 2
    return f"{PART.format(name, begin, end)} insert into p values ({row}, '{name}');"


async def test_tenants_share_a_partitioned_target(
    shared_server: Server,
    source: Database,
    target: Database,
    tmp_path: Path,
    short_backoffs: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each has partitions that the other lacks, at the start, as a joiner, and in the stream.

    At the start the first source makes the table after the second has looked for it.
    """
    prepare_targets = ChangedDefinitions.prepare_targets

    async def settle_early(self: ChangedDefinitions, *given: Any) -> Any:
        found = await prepare_targets(self, *given)
        if self._source.sid == "b":
            await streamer.eventually(is_made)
        return found

    async def is_made() -> bool:
        return bool(target.value("select to_regclass('p') is not null"))

    monkeypatch.setattr(ChangedDefinitions, "prepare_targets", settle_early)
    path = tmp_path / "config.yaml"
    group = "ddl: capture\non_ddl: {detach_partition: apply}"
    mine = f'{{url: "{source.url}", sid: a}}'
    rows = "select id, v from p {} order by id"
    with database(shared_server, "second") as second, database(shared_server, "third") as third:
        sources = {"a": source, "b": second}
        source.execute(P + part("p0", 0, 10) + part("p1", 10, 20))
        second.execute(P + part("p0", 0, 10) + part("p2", 20, 30))
        third.execute(P + part("p0", 0, 10) + part("other", 20, 30) + part("p3", 30, 40))
        tables = "p: {partitioned: true}"
        write_config(path, source, target, tables, sid="a", others={"b": second}, group=group)
        both = path.read_text()
        streamer = Streamer(path)
        streamer.start()
        try:

            async def are_equal() -> bool:
                return all(
                    target.execute(rows.format(f"where sid = '{sid}'"))
                    == db.execute(rows.format(""))
                    for sid, db in sources.items()
                )

            async def assert_rows() -> None:
                await streamer.caught_up(60)
                await streamer.eventually(are_equal)  # rows of an attached partition come later

            await assert_rows()
            sources["c"] = third  # its "other" has the bounds of p2
            path.write_text(both.replace(mine, f'{mine}, {{url: "{third.url}", sid: c}}'))
            await streamer.apply()
            await assert_rows()
            partitions = "select relid::regclass::text from pg_partition_tree('p') where isleaf"
            there = [("p0",), ("p1",), ("p2",), ("p3",)]
            assert sorted(target.execute(partitions)) == there

            source.execute(part("mine", 30, 40) + part("p4", 40, 50))
            second.execute(
                "create table p4 (like p including all); insert into p4 values (41, 'before');"
                "alter table p attach partition p4 for values from (40) to (50)"
            )
            await assert_rows()
            # The target's partition also has rows of other tenants; only this tenant's rows are
            # deleted.
            source.execute("alter table p detach partition p0")
            third.execute("drop table p0; update p set v = 'changed'")
            await assert_rows()
            assert sorted(target.execute(partitions)) == [*there, ("p4",)]
            assert target.execute("select sid, v from p0") == [("b", "p0")]
            source.execute(part("p0_new", 0, 10))
            await assert_rows()

            # A partition overlaps a peer's partition: the operator skips it, and existing
            # partitions take its rows.
            source.execute(part("p5", 50, 60))
            await assert_rows()
            third.execute(part("p5_half", 50, 55))

            async def one_stands() -> bool:
                states = {s["sid"]: s["tables"][0]["state"] for s in await streamer.statuses()}
                return states == {"a": "ready", "b": "ready", "c": "error"}

            await streamer.eventually(one_stands)
            (shown,) = [s for s in await streamer.statuses() if s["sid"] == "c"]
            assert "would overlap partition" in str(shown["tables"][0]["error"])
            address = TargetAddress.parse(streamer.settings.target.url)
            await ddl_decisions.store_decision(address, "skip", "p", "shop", "c")
            await assert_rows()
        finally:
            await streamer.stop()


@pytest.mark.parametrize("rule", ["", "{keys: disjoint}"])
async def test_a_detachment_that_waits_for_a_reader_counts_as_a_detachment(
    source: Database, target: Database, stream: MakeStreamer, rule: str
) -> None:
    source.execute(
        "create table t (id int primary key) partition by range (id);"
        " create table p partition of t for values from (0) to (10);"
        " create table q partition of t for values from (10) to (20); insert into t values (1), (11)"
    )
    error = "select error from streamer.relation"

    async def has_one_leaf() -> bool:
        return target.value("select cardinality(leaves) from streamer.relation") == 1

    async with stream(f"t: {rule}") as streamer:
        await streamer.caught_up()
        with source.connect() as reader:
            # GIVEN a reader for which DETACH PARTITION CONCURRENTLY waits
            reader.execute("begin")
            reader.execute("select from t")
            detach = "alter table t detach partition q concurrently"
            waiting = asyncio.create_task(asyncio.to_thread(source.execute, detach))
            try:
                # WHEN streamer searches for gaps
                await streamer.eventually(has_one_leaf)
            finally:
                reader.execute("rollback")
                await waiting

        # THEN the table has no gap
        source.execute("insert into t values (2)")
        await streamer.caught_up()
        assert target.execute("select id from t order by 1") == [(1,), (2,), (11,)]
        assert target.value(error) is None

        # AND the attachment of the partition is a gap
        source.execute("alter table t attach partition q for values from (10) to (20)")

        async def is_told() -> bool:
            return '"public.q" was attached as a partition with rows' in str(target.value(error))

        await streamer.eventually(is_told)
