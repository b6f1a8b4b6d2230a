"""`column_list`: excluded columns stay at the source, and no change of the remaining columns is
lost.
"""

import asyncio
from pathlib import Path

import psycopg
import pytest

from streamer.commands.check.check import check
from streamer.config import static_mapping
from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer, write_config

LISTED = (
    "select unnest(attnames)::text from pg_publication_tables"
    " where pubname like 'streamer_shop%' and tablename = 't'"
)
RULE = "t: {{column_list: true, exclude: [{0}]}}\n" + "".join(
    f"{table}: {{{{column_list: true, exclude: [secret]}}}}\n" for table in ("f", "p", "k")
)


def listed(source: Database) -> list[str]:
    return [str(name) for (name,) in source.execute(LISTED)]


async def works(source: Database, sql: str) -> bool:
    """Whether the application's statement succeeds by now."""
    try:
        await asyncio.to_thread(source.execute, sql)
    except psycopg.errors.InvalidColumnReference:
        return False
    return True


async def findings(path: Path, table: str) -> list[str]:
    settings, mapping = static_mapping.load(path)
    report = await check(settings, mapping)
    return [str(f) for f in report.findings if f"public.{table}" in str(f.place)]


@pytest.mark.since(15)  # lists of columns
@pytest.mark.usefixtures("without_spark")
async def test_a_list_follows_the_rule_and_the_table_without_a_loss(
    source: Database, target: Database, stream: MakeStreamer, tmp_path: Path
) -> None:
    is_able = source.value("select current_setting('server_version_num')::int >= 150000")
    assert is_able, "the tests need PostgreSQL 15"
    source.execute(
        """
        create table t (id int primary key, name text, secret text,
                        twice int generated always as (id * 2) stored);
        insert into t values (1, 'a', 's1');
        create table f (id int primary key, secret text); alter table f replica identity full;
        create table k (name text, secret text); insert into k values ('a', 's');
        create table p (id int primary key, name text, secret text) partition by range (id);
        create table p1 partition of p for values from (0) to (10);
        create table p2 (secret text, name text, id int not null);
        alter table p attach partition p2 for values from (10) to (20);
        insert into p values (1, 'a', 's'), (11, 'b', 's')
        """
    )
    write_config(tmp_path / "check.yaml", source, target, RULE.format("secret"))
    assert any(
        "secret does not leave" in line for line in await findings(tmp_path / "check.yaml", "t")
    )
    assert any("is FULL" in line for line in await findings(tmp_path / "check.yaml", "f"))

    def rows(columns: str, table: str = "t") -> tuple[object, object]:
        sql = f"select {columns} from {table} order by 1"
        return source.execute(sql), target.execute(sql)

    async with stream(RULE.format("secret")) as streamer:
        await streamer.table_state("public.t", "ready", 60)
        # An UPDATE of the table works, and excluded columns stay at the source.
        await streamer.table_state("public.f", "error", 60)
        source.execute("insert into f values (1, 'x'); update f set secret = 'y'")
        assert "is FULL" in (await streamer.table("public.f"))["error"]
        assert listed(source) == ["id", "name"]
        source.execute("insert into t values (2, 'b', 's2'); update t set secret = 'n', name = 'z'")

        async def change(tables: str) -> None:
            write_config(streamer.path, source, target, tables)
            await streamer.apply()

        async def is_same(columns: str, table: str = "t") -> bool:
            here, there = rows(columns, table)
            return here == there

        await streamer.eventually(lambda: is_same("id, name"), 60)
        # Partitions with columns in a different order, and a table that publishes only inserts.
        source.execute("update p set name = 'z', secret = 'n'; update p set id = 12 where id = 1")
        source.execute("insert into k values ('b', 'n')")
        await streamer.eventually(lambda: is_same("id, name", "p"), 60)
        await streamer.eventually(lambda: is_same("name", "k"), 60)
        # The target has the column first, so no missing column stops the table.
        target.execute("alter table t add note text")
        await asyncio.to_thread(
            source.execute,
            "alter table t add note text; insert into t values (3, 'c', 's3', default, 'new')",
        )
        await streamer.eventually(lambda: is_same("id, name, note"), 60)
        assert listed(source) == ["id", "name", "note"]
        await streamer.table_state("public.t", "ready", 60)

        # The list shrinks in place, and grows with a copy.
        attempt = target.value("select attempt from streamer.relation where source = 'public.t'")
        await change(RULE.format("secret, note"))

        async def is_shorter() -> bool:
            return listed(source) == ["id", "name"]

        await streamer.eventually(is_shorter, 60)
        source.execute("update t set note = 'hidden', name = 'y' where id = 3")
        await streamer.eventually(lambda: is_same("id, name"), 60)
        assert target.value("select note from t where id = 3") == "new"
        now = target.value("select attempt from streamer.relation where source = 'public.t'")
        assert now == attempt
        await change(RULE.format("secret"))
        await streamer.eventually(lambda: is_same("id, name, note"), 60)

        # The table stops, and then an UPDATE that the list makes fail works again.
        source.execute("alter table t replica identity full")
        await streamer.table_state("public.t", "error", 60)
        await streamer.eventually(lambda: works(source, "update t set name = 'x'"), 60)
        assert "secret" not in listed(source)
