"""Copies in chunks: the keys of tables, reasons to begin again, and the status."""

import asyncio
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from streamer.control.chunked_copy import ChunkedCopy, in_bytes
from streamer.copy.copy_in_chunks import ChunkSize, TableChunk, find_chunk
from streamer.copy.copy_round import Round
from streamer.copy.prepare_copy import TableCopy
from streamer.postgres.quoting import quote_literal
from streamer.source.tables.bytewise_columns import read_bytewise
from tests.support.chunk_case import CHUNKS, ChunkCase, request
from tests.support.key_values import ASCENDING
from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer, Streamer, write_config

pytestmark = pytest.mark.usefixtures("without_spark", "deferred_indexes")

SETTINGS = "sync: {resumable_above: 400kB, rows_per_second: 3000}"
"""A table of 1200 rows has four chunks, which take a while."""


def create(name: str, key: str, *, more: str = "") -> str:
    return f"""
    create table {name} (g int, u uuid, t text, large text, v int default 0, primary key ({key}));
    alter table {name} alter large set storage external; {more};
    insert into {name} select g, md5(g::text)::uuid, 'k' || g,
        case when g % 5 = 0 then repeat('large', 420) end from generate_series(1, 1200) g;
    """


async def until_it_has(streamer: Streamer, table: str, count: int) -> None:
    """Wait until the target has *count* chunks of *table*, but not all chunks."""

    async def is_there() -> bool:
        tables = [each for source in await streamer.statuses() for each in source["tables"]]
        return any(t["source"] == table and (t["chunks_copied"] or 0) >= count for t in tables)

    await streamer.eventually(is_there)


DATED = r"""
create table dated (at timestamptz, n numeric(12,2), t text, v int default 0,
    pad text default repeat('x', 400), primary key (at, n, t));
insert into dated select * from (values
    ('-infinity'::timestamptz, 1.5), ('infinity', 'NaN'), ('infinity', 1), ('4713-01-01 BC', 'NaN'),
    ('0001-12-31 23:59:59.999999 BC', -1), ('10000-01-01 00:00:00.1', 0)) s (at, n),
    (values (''), (' '), (e'\n''"'), ('É')) t (t);
insert into dated select '2024-02-29'::timestamptz + g * interval '1 hour', g % 3, 'x'
from generate_series(1, 1200) g;
create table numbered (n numeric, k bytea, v int default 0, pad text default repeat('x', 400),
    primary key (n, k));
insert into numbered values
    ('NaN', ''), ('NaN', '\x00'), ('-1e100', '\x5c27'), (1e-300, '\x'), (0, '\x');
insert into numbered select g / 7.0, decode(md5(g::text), 'hex') from generate_series(1, 1200) g;
create table worded (t varchar(3000) collate "C", n name, v int default 0,
    pad text default repeat('x', 400), primary key (t, n));
insert into worded select t, n from
    (values (''), (' '), ('%s'), ('%'), (e'\n\t\\'), ($$'"$$), ('é'), ('😀'), (U&'\FFFD'),
    ((select string_agg(md5(g::text), '') from generate_series(1, 60) g))) t (t),
    (values (''), ('%(a)s'), (e'\\N'), ('Z'), ('a')) n (n);
insert into worded select chr(32 + g % 90) || case when g % 2 = 0 then 'Ä' else 'z' end || g, g::text
from generate_series(1, 1200) g;
"""
"""Each is above the limit."""
DATED_CHANGES = (
    "update dated set v = v + 1 where n <> 1",
    "update dated set at = 'infinity', v = 2, t = at where v = 1 and at between '2024-03-01' and '2025-01-01'",
    "update dated set at = '4000-01-01 BC', t = '😀' || t where n = 'NaN' and at > '2000-01-01'",
    "delete from dated where at = '-infinity' and t = ''",
    "update numbered set v = v + 1 where n > 100 or n < 10",
    "update numbered set n = 'NaN', v = 3 where n between 1 and 2",
    "update numbered set n = -n where n between 150 and 160",
    "delete from numbered where n = 'NaN' and k = '\\x00'",
    "update worded set v = v + 1 where n < '5'",
    "update worded set t = '😀' || t || n, v = 2 where t ~ '^[%!]'",
    "update worded set t = ' ' || t || n, v = 3 where t ~ '^[z😀]' and v <> 2",
    "delete from worded where t = '' and n <> ''",
)


def change(source: Database) -> None:
    for sql in DATED_CHANGES:
        source.execute(sql)
    for sql in (
        # Neither this row nor the large value is in the copied range, and the update omits the
        # value.
        "update moved set g = -5 where g = 1200",
        # streamer would ignore a DELETE of the old key, and leave a second row.
        "update appended set g = g + 2000 where g = 3",
        "alter table altered add added int default 7",
        "update narrowed set large = 'before' where g % 2 = 0",
        "alter table narrowed drop column v",
        "alter table retyped alter g type text using 'k' || g; insert into retyped (g) values ('x')",
        "truncate emptied; insert into emptied (g, u, t) select 1, u, 'a' from pairs limit 1",
        # The old row of an update has all columns.
        "update pairs set u = '00000000-0000-0000-0000-000000000001', v = 1 where g % 100 = 0",
        "update hist set v = g; delete from hist where g % 3 = 0",
    ):
        source.execute(sql)


def test_the_server_has_the_order_and_the_formats_of_keys(source: Database) -> None:
    send = {
        "integer": "int4send",
        "boolean": "boolsend",
        "double precision": "float8send",
        "timestamp with time zone": "timestamptz_send",
        "timestamp(3) without time zone": "timestamp_send",
    }
    for kind, values in ASCENDING.items():
        function = send.get(kind, f"{kind}{'_' if kind in ('date', 'numeric') else ''}send")
        constants = ", ".join(quote_literal(text) for text, _ in reversed(values))
        ordered = in_bytes("v.k", kind)
        found = source.execute(
            "set timezone = 'UTC';"
            f" select k::text, encode({function}(k), 'hex') from"
            f" (select t::{kind} as k from unnest(array[{constants}]) t) v order by {ordered}"
        )
        assert found == values, kind


async def test_only_text_of_a_collation_that_orders_bytes_is_found(source: Database) -> None:
    source.execute(
        "create collation of_a_library (provider = libc, locale = 'C.UTF-8');"
        'create table t (a text collate "C", b varchar(9) collate "POSIX", c name, d text, e int,'
        " f text collate of_a_library)"
    )
    expected = {"a", "b", "c"}
    if source.value("select datcollate from pg_database where datname = current_database()") == "C":
        expected.add("d")
    if source.value("select exists (select from pg_collation where collname = 'pg_c_utf8')"):
        source.execute("alter table t add g text collate pg_c_utf8")
        expected.add("g")
    oid = int(str(source.value("select 't'::regclass::oid::int")))
    async with await psycopg.AsyncConnection.connect(source.url, row_factory=dict_row) as plain:
        found = await read_bytewise(plain, [oid])
    assert found == {oid: expected}


async def test_a_key_that_gets_another_type_as_its_chunk_begins_begins_the_copy_again(
    stream: MakeStreamer, source: Database, target: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remaining tables of the round go on."""
    source.execute(create("retyped", "g") + create("other", "g"))
    altered: list[str] = []

    async def found(
        plain: Any, copy: TableCopy, before: ChunkedCopy, size: ChunkSize
    ) -> TableChunk:
        if copy.mapped.mapping.source.name == "retyped" and before.count and not altered:
            altered.append("alter table retyped alter g type text using 'k' || g")
            await asyncio.to_thread(source.execute, altered[0])
        return await find_chunk(plain, copy, before, size)

    monkeypatch.setattr("streamer.copy.plan_copies.find_chunk", found)
    async with stream("retyped: {create: columns}\nother:", settings=SETTINGS) as streamer:
        await until_it_has(streamer, "public.retyped", 1)
        await asyncio.to_thread(target.execute, "alter table retyped alter g type text")
        await streamer.caught_up()
        assert altered
        for name in ("retyped", "other"):
            assert_same(source, target, name)


async def test_changes_that_do_not_fit_chunks_begin_the_copy_again(
    stream: MakeStreamer, source: Database, target: Database
) -> None:
    source.execute(
        create("pairs", "u, g", more="alter table pairs replica identity full")
        + create("hist", "g")
        + create("moved", "g")
        + create("appended", "g")
        + create("altered", "g")
        + create("emptied", "g")
        + create("narrowed", "u")
        + create("retyped", "g")
        + create("named", "t")
        + DATED
    )
    tables = """
        pairs:
        hist: {type: history}
        moved:
        appended: {type: append}
        altered: {on_column_added: add}
        emptied:
        narrowed:
        retyped:
        named:
        dated:
        numbered:
        worded:
    """
    async with stream(tables, settings=SETTINGS) as streamer:
        for table in ("dated", "numbered", "worded", "narrowed", "moved", "appended", "retyped"):
            await until_it_has(streamer, f"public.{table}", 1)
        shown = await streamer.table("public.moved")
        assert shown["state"] == "copying"
        assert shown["chunks_copied"] < shown["chunks_total"]
        assert 0 < shown["bytes_copied"] < shown["bytes_total"]
        await asyncio.to_thread(target.execute, "alter table retyped alter g type text")
        await asyncio.to_thread(change, source)
        await streamer.caught_up()
        assert (await streamer.table("public.moved"))["chunks_copied"] is None
    for table in ("pairs", "moved", "appended", "altered", "emptied", "retyped", "named"):
        rows = f"select * from {table} order by g"
        assert source.execute(rows) == target.execute(rows), table
    for table in ("dated", "numbered", "worded"):
        rows = f"select {table}::text as row from {table} order by 1"
        assert source.execute(rows) == target.execute(rows), table
    rows = "select g, u, t, large from narrowed order by g"
    assert source.execute(rows) == target.execute(rows)
    rows = "select g, v, large from hist {} order by g"
    now = "where kvsz_end = '9999-01-01' and not kvsz_deleted"
    assert source.execute(rows.format("")) == target.execute(rows.format(now))
    assert target.execute("select * from streamer.conflict") == []


async def test_a_lost_source_and_a_pause_continue_at_the_next_chunk(
    tmp_path: Path, source: Database, target: Database
) -> None:
    case = ChunkCase(tmp_path, source, target)
    case.config.write_text(case.config.read_text().replace("400kB", "400kB, rows_per_second: 600"))
    streamer = Streamer(case.config)
    streamer.start()
    try:
        await until_it_has(streamer, "public.big", 1)
        before = case.unchanged
        case.write()
        # The stream, the snapshot and the session of the copy end, as at a restart of the server.
        source.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        await until_it_has(streamer, "public.big", 2)
        request(target, "pause")
        await streamer.table_state("public.big", "paused")
        case.write()
        request(target, "resume")
        await streamer.caught_up()
        assert case.unchanged == before
        case.assert_equal()

        request(target, "resync")
        await streamer.caught_up()
    finally:
        await streamer.stop()
    case.assert_equal()


async def test_a_copy_that_begins_again_has_the_rows_of_changes_in_quarantine(
    tmp_path: Path, source: Database, target: Database
) -> None:
    case = ChunkCase(tmp_path, source, target)
    target.execute("alter table big add check (region < 9)")
    settings = SETTINGS.replace("3000", "600")
    write_config(case.config, source, target, "big: {on_error: quarantine}", settings=settings)
    streamer = Streamer(case.config)
    streamer.start()

    async def is_refused() -> bool:
        return bool(target.value("select count(*) from streamer.quarantine"))

    try:
        await until_it_has(streamer, "public.big", 1)
        source.execute("insert into big values (-1, 'new', null, 9)")
        await streamer.eventually(is_refused)
        request(target, "pause")
        await streamer.table_state("public.big", "paused")
        source.execute("delete from big where id = -1")
        request(target, "resync")
        await streamer.caught_up()
        assert not await is_refused()
        source.execute("insert into big values (-1, 'new', null, 0)")
        await streamer.caught_up()
    finally:
        await streamer.stop()
    assert_same(source, target, "big")


async def test_a_table_that_grows_by_more_than_a_chunk_while_one_is_copied_is_copied(
    stream: MakeStreamer, source: Database, target: Database
) -> None:
    source.execute("create table grown as select generate_series(1, 400) as id, repeat('x', 90) v")
    source.execute("alter table grown add primary key (id)")
    added = "insert into grown select (select max(id) from grown) + g, 'new' from generate_series(1, 90) g"
    count = 0

    def is_copied() -> bool:
        nonlocal count
        before, count = count, int(str(target.value(CHUNKS)))
        for _ in range(before, count):
            source.execute(added)  # a chunk has 64 rows
        return target.execute("select from streamer.relation where state = 'ready'") != []

    async with stream("grown:", settings="sync: {resumable_above: 8kB}") as streamer:
        await streamer.eventually(lambda: asyncio.to_thread(is_copied))
        await streamer.caught_up()
        assert_same(source, target, "grown")


async def test_a_renamed_table_continues_and_another_mapping_begins_again(
    tmp_path: Path, source: Database, target: Database
) -> None:
    source.execute(create("big", "g"))
    config = tmp_path / "config.yaml"
    settings = SETTINGS.replace("3000", "600")

    async def run(columns: str, table: str, count: int) -> Streamer:
        tables = f"'*': {{columns: {{{columns}}}}}"
        write_config(config, source, target, tables, settings=settings, group="ddl: capture")
        streamer = Streamer(config)
        streamer.start()
        await until_it_has(streamer, table, count)
        return streamer

    streamer = await run("g: g, u: u, v: v, t: large, large: t", "public.big", 1)
    try:
        source.execute(
            "update big set v = 1; alter table big rename to huge;"
            " update huge set v = v + 1 where g % 2 = 0;"
            " update huge set g = -g where g > 1195 and g < 1200"
        )
        await until_it_has(streamer, "public.huge", 2)
        assert target.execute("select large, v from huge where g = -1197") == [("k1197", 1)]
    finally:
        await streamer.stop()

    streamer = await run("g: g, u: u, v: v, t: t, large: large", "public.huge", 1)
    try:
        await streamer.caught_up()
    finally:
        await streamer.stop()
    rows = "select g, u, t, large, v from huge order by g"
    assert source.execute(rows) == target.execute(rows)
    assert target.execute("select * from streamer.conflict") == []


async def test_a_target_that_is_renamed_between_two_chunks_costs_no_row(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(create("big", "g"))
    async with stream("big:", settings=SETTINGS.replace("3000", "600")) as streamer:
        await until_it_has(streamer, "public.big", 1)
        await asyncio.to_thread(target.execute, "alter table big rename to former")
        await streamer.caught_up()
        assert_same(source, target, "big")


@pytest.mark.parametrize("is_resync", [False, True])
async def test_a_target_that_is_renamed_during_its_copy_costs_no_row(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    monkeypatch: pytest.MonkeyPatch,
    is_resync: bool,
) -> None:
    """Parts reach a table by its name."""
    source.execute("create table t (id int primary key); insert into t values (1), (2)")
    copy_parts = Round._copy_parts
    renamed = asyncio.Event()

    async def rename_after(self: Round, *arguments: Any) -> Any:
        failures = await copy_parts(self, *arguments)
        if not renamed.is_set():
            renamed.set()
            target.execute("alter table t rename to former; create table t (like former)")
        return failures

    async with stream("t:") as streamer:
        if is_resync:
            await streamer.caught_up()
        monkeypatch.setattr(Round, "_copy_parts", rename_after)
        if is_resync:
            await streamer.ask("resync")
        await asyncio.wait_for(renamed.wait(), 60)
        await streamer.caught_up()
        assert_same(source, target, "t")
