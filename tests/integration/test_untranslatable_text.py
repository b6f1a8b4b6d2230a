"""Sources in encodings other than UTF8: a character that UTF-8 lacks stops only its table."""

import os
from collections.abc import Iterator

import pytest

from streamer.commands import quarantined_rows
from streamer.commands.demo.embedded_servers import Server
from streamer.commands.table_requests import request
from streamer.source.server.database_encoding import conversion_sql, read_characters
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database, drop_database
from tests.support.remedies import Operator, remedy_of
from tests.support.runbooks import block
from tests.support.streamer import MakeStreamer

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("without_spark")]

ENCODINGS = ("WIN1252", "EUC_JP", "EUC_KR", "KOI8R", "EUC_TW", "EUC_JIS_2004", "LATIN2")
TEXT = {"WIN1252": "na\u00efve \u20ac", "EUC_KR": "\ud55c\uae00 abc"}
BYTES = {"WIN1252": r"\x81", "EUC_KR": r"\xc9\xa1"}
SHOWN = {"WIN1252": "0x81", "EUC_KR": "0xc9 0xa1"}
STREAMED = ("bad", "good", "kept")
NAMED = '"größe"'


@pytest.fixture(params=["WIN1252", "EUC_KR"])
def encoding(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def source(shared_server: Server, encoding: str) -> Iterator[Database]:
    name = f"source_{encoding.lower()}_{os.getpid()}"
    shared_server.execute(
        f"create database {name} encoding '{encoding}' lc_collate 'C' lc_ctype 'C'"
        " template template0"
    )
    shared_server.execute(f"alter database {name} set client_encoding to 'UTF8'")
    try:
        yield Database(shared_server, name)
    finally:
        drop_database(shared_server, name)


def fill(source: Database, table: str, good: str, bad: str) -> None:
    value = "'d'" if table in ("good", "fine") else bad
    source.execute(
        f"insert into {table} values (1, '{good}', 'b'), (7, 'a', {value}), (8, 'c', 'd')"
    )


def rows(target: Database, table: str) -> list[tuple[object, ...]]:
    return target.execute(f"select id, w, v from {table} order by id")


@pytest.mark.parametrize("transport", ["text", "binary"])
@pytest.mark.follows("apply.write.rejection_advice:_ways")
@pytest.mark.follows("runbooks:invalid-utf8#3")
async def test_a_character_that_utf8_lacks_stops_its_table_only(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    encoding: str,
    transport: str,
) -> None:
    good, bad = TEXT[encoding], f"E'a{BYTES[encoding]}'"
    for table in (*STREAMED, "copied", "fine"):
        source.execute(f"create table {table} (id int primary key, w text, v text)")
    if encoding == "WIN1252":
        source.execute(f"alter table good add {NAMED} text")
    fill(source, "copied", good, bad)
    fill(source, "fine", good, bad)
    rules = """
        bad:
        good:
        kept: {on_error: quarantine}
        copied:
        fine:
    """
    whole = [(1, good, "b"), (7, "a", "d"), (8, "c", "d")]
    async with stream(rules, group=f"transport: {transport}") as streamer:
        await streamer.table_state("public.copied", "error", 60)
        error = (await streamer.table("public.copied"))["error"]
        assert f'character with byte sequence {SHOWN[encoding]} in encoding "{encoding}"' in error
        assert 'column "v" of the row with ctid (0,2)' in error
        await streamer.table_state("public.fine", "ready", 60)
        assert rows(target, "fine") == whole

        for table in STREAMED:
            await streamer.table_state(f"public.{table}", "ready", 60)
            fill(source, table, good, bad)
        await streamer.table_state("public.bad", "error", 60)
        error = (await streamer.table("public.bad"))["error"]
        assert f'byte sequence {SHOWN[encoding]} in encoding "{encoding}"' in error
        assert 'in column "v"' in error
        assert "Key (id)=(7)" in error
        assert "replace the character at the source" in error
        assert "run: streamer resync public.bad --database shop" in error

        async def others_go_on() -> bool:
            count = target.value("select count(*) from streamer.quarantine")
            there = rows(target, "good"), rows(target, "kept")
            return there == (whole, [whole[0], whole[2]]) and count == 1

        await streamer.eventually(others_go_on, 60)
        source.execute(f"update good set w = '{good}!' where id = 8")
        address = TargetAddress.parse(streamer.settings.target.url)
        await quarantined_rows.request_action(address, "retry", quarantined_rows.Choice())

        async def is_retried() -> bool:
            asked = target.value("select count(*) from streamer.request where state = 'queued'")
            return asked == 0 and rows(target, "good")[2][1] == f"{good}!"

        await streamer.eventually(is_retried, 60)
        assert target.value("select count(*) from streamer.quarantine") == 1, "and refused again"
        outcomes = target.execute(
            "select state, error from streamer.request where action = 'quarantine_retry' order by 2"
        )
        stays = "changes that the target rejects again stay in quarantine: 1"
        assert outcomes == [("done", stays)]
        for table in ("bad", "copied", "kept"):
            names = {"customer": table, "name": "v", r"\x81": BYTES[encoding]}
            source.execute(block("invalid-utf8#3", names))
        remedy = await remedy_of(streamer, "public.bad", "replace the character at the source")
        await Operator(streamer.path, source, target).follow(remedy)
        for table in ("copied", "kept"):
            await request(address, "resync", f"public.{table}", database="shop", sid=None)
        await streamer.caught_up(60)
        mended = [whole[0], (7, "a", "a?"), whole[2]]
        for table in ("bad", "kept", "copied"):
            assert rows(target, table) == mended
        assert rows(target, "fine") == whole


def test_every_character_is_converted_as_postgresql_does(target: Database) -> None:
    for encoding in ENCODINGS:
        with target.connect() as connection:
            connection.execute(conversion_sql(encoding).encode())
            row = connection.execute("select current_setting('streamer.characters')").fetchone()
            assert row is not None
            found = read_characters(str(row[0]))
            assert len(found) > 90, encoding
            joined = b" ".join(found)
            there = connection.execute(
                f"select pg_catalog.convert(%s, '{encoding}', 'UTF8')", [joined]
            ).fetchone()
            assert there is not None
            assert there[0] == b" ".join(found.values()), encoding
