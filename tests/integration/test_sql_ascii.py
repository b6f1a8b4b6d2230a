"""A source in SQL_ASCII may hold text that is not valid UTF-8, which a target in UTF8 refuses."""

import asyncio
import os
from collections.abc import Iterator

import pytest

from streamer.commands.demo.embedded_servers import Server
from tests.support.postgres import Database, drop_database
from tests.support.runbooks import block, run_block
from tests.support.streamer import MakeStreamer

pytestmark = pytest.mark.usefixtures("without_spark")

BAD = r"E'caf\xe9'"
"""LATIN1, which is no UTF-8."""
GOOD = r"E'caf\xc3\xa9'"
STREAMED = ("bad", "good", "kept")
COPIED = ("copied", "fine")
GOOD_ROWS = [(1, "62"), (7, "636166c3a9"), (8, "64")]


@pytest.fixture
def source(shared_server: Server) -> Iterator[Database]:
    name = f"source_ascii_{os.getpid()}"
    shared_server.execute(
        f"create database {name} encoding 'SQL_ASCII' lc_collate 'C' lc_ctype 'C'"
        " template template0"
    )
    try:
        yield Database(shared_server, name)
    finally:
        drop_database(shared_server, name)


def fill(source: Database, *tables: str) -> None:
    for table in tables:
        value = GOOD if table in ("good", "fine") else BAD
        source.execute(
            f"insert into {table} values (1, 'a', 'b'), (7, 'a', {value}), (8, 'c', 'd')"
        )


def rows(target: Database, table: str) -> list[tuple[object, ...]]:
    text = "encode(convert_to(v, 'UTF8'), 'hex')"
    return target.execute(f"select id, {text} from {table} order by id")


@pytest.mark.parametrize("transport", ["text", "binary"])
@pytest.mark.follows("runbooks:invalid-utf8#1")
@pytest.mark.follows("runbooks:invalid-utf8#2")
@pytest.mark.follows("runbooks:invalid-utf8#4")
async def test_a_byte_that_is_not_utf8_stops_its_table_only(
    source: Database, target: Database, stream: MakeStreamer, transport: str
) -> None:
    for table in (*STREAMED, *COPIED):
        source.execute(f"create table {table} (id int primary key, w text, v text)")
        # Where the types differ, the copy is in text.
        kind = "text" if transport == "binary" else "varchar"
        target.execute(f"create table {table} (id int primary key, w {kind}, v {kind})")
    fill(source, *COPIED)
    rules = """
        bad:
        good:
        kept: {on_error: quarantine}
        copied:
        fine:
    """
    async with stream(rules, group=f"transport: {transport}") as streamer:
        await streamer.table_state("public.copied", "error", 60)
        error = (await streamer.table("public.copied"))["error"]
        assert 'invalid byte sequence for encoding "UTF8"' in error
        assert 'column "v" of the row with ctid (0,2) is not valid UTF-8' in error
        assert "caf" not in error, "an error shows no values"
        await streamer.table_state("public.fine", "ready", 60)
        assert rows(target, "fine") == GOOD_ROWS

        for table in STREAMED:
            await streamer.table_state(f"public.{table}", "ready", 60)
        fill(source, *STREAMED)
        await streamer.table_state("public.bad", "error", 60)
        error = (await streamer.table("public.bad"))["error"]
        assert 'invalid byte sequence for encoding "UTF8"' in error
        assert 'in column "v"' in error
        assert transport == "binary" or "Key (id)=(7)" in error
        assert "run: streamer resync public.bad --database shop" in error
        assert "on_error: quarantine" in error

        async def others_go_on() -> bool:
            count = target.value("select count(*) from streamer.quarantine")
            without = [GOOD_ROWS[0], GOOD_ROWS[2]]
            there = rows(target, "good"), rows(target, "kept")
            return there == (GOOD_ROWS, without) and count == 1

        await streamer.eventually(others_go_on, 60)

        for table in ("bad", "copied", "kept"):
            of_column = {"customer": table, "name": "v"}
            assert source.execute(block("invalid-utf8#1", of_column)) == [(7, b"caf\xe9")]
            source.execute(block("invalid-utf8#2", of_column))
            await asyncio.to_thread(run_block, streamer.path, "invalid-utf8#4", {"customer": table})
        await streamer.caught_up(60)
        for table in (*STREAMED, *COPIED):
            assert rows(target, table) == GOOD_ROWS
