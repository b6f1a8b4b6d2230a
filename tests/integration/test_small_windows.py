"""Small windows go to the target in a single message, or in parts for a better error."""

import pytest

from streamer.apply.write import worker
from streamer.target.whole_message import WholeMessage
from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer

pytestmark = pytest.mark.usefixtures("without_spark")

DDL = """
create table items (id int primary key, v text);
create table others (id int primary key, v text);
"""
TABLES = "items: {initial: none}\nothers: {initial: none}"


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements of transactions in a single message."""
    sent: list[str] = []
    send = WholeMessage.send

    def record(self: WholeMessage, sql: str, rows: list[bytes]) -> None:
        sent.append(sql)
        send(self, sql, rows)

    monkeypatch.setattr(WholeMessage, "send", record)
    monkeypatch.setattr(worker, "SLOW_SECONDS_MIN", 1000.0)
    return sent


@pytest.mark.parametrize("transport", ["text", "binary"])
async def test_a_small_window_is_one_message_and_a_large_one_is_not(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    messages: list[str],
    transport: str,
) -> None:
    for db in (source, target):
        db.execute(DDL)
    async with stream(TABLES, settings="workers: 1", group=f"transport: {transport}") as streamer:
        await streamer.caught_up()
        for statement in (
            "insert into items select g, 'a\tb\\c' from generate_series(1, 20) g",
            "update items set v = 'changed' where id < 9; insert into others values (2, null)",
            "update items set id = id + 100 where id < 4; delete from items where id > 10",
        ):
            messages.clear()
            source.execute(statement)
            await streamer.caught_up()
            assert messages
            assert all(m.startswith("begin; ") and m.endswith("commit") for m in messages)
        messages.clear()
        source.execute(
            "insert into items select g, repeat('x', 3000) from generate_series(1000, 1100) g"
        )
        await streamer.caught_up()
        assert messages == []
        for table in ("items", "others"):
            assert_same(source, target, table)


async def test_missing_rows_are_found_in_parts_and_noted_once(
    source: Database, target: Database, stream: MakeStreamer, messages: list[str]
) -> None:
    for db in (source, target):
        db.execute(DDL)
        db.execute("insert into items select g, 'old' from generate_series(1, 5) g")
    target.execute("delete from items where id in (2, 3)")
    async with stream(TABLES, settings="workers: 1") as streamer:
        await streamer.caught_up()
        source.execute("update items set v = 'new'; delete from items where id = 3")
        source.execute("insert into others values (1, 'beside')")
        await streamer.caught_up()
        for table in ("items", "others"):
            assert_same(source, target, table)
        noted = target.execute("select kind, key->>'id' from streamer.conflict order by 2")
        assert ("update_missing", "2") in noted
        assert len(noted) == len(set(noted))
        messages.clear()
        source.execute("insert into items values (50, 'after')")
        await streamer.caught_up()
        assert messages == []  # the next windows search for missing rows


async def test_the_answer_names_the_lane_that_the_target_refuses(
    source: Database, target: Database, stream: MakeStreamer, messages: list[str]
) -> None:
    for db in (source, target):
        db.execute(DDL)
    target.execute("insert into others values (7, 'of the target')")
    async with stream(TABLES, settings="workers: 1\ncommit_interval_min: 0.2") as streamer:
        await streamer.caught_up()
        source.execute("insert into items values (1, 'a')")  # the next window waits for both tables
        source.execute("insert into items values (2, 'b'); insert into others values (7, 'theirs')")

        async def stops() -> bool:
            states = target.execute("select source, state from streamer.relation order by 1")
            return states == [("public.items", "ready"), ("public.others", "error")]

        await streamer.eventually(stops)
        source.execute("insert into items values (3, 'c')")

        async def goes_on() -> bool:
            return target.execute("select id from items order by 1") == [(1,), (2,), (3,)]

        await streamer.eventually(goes_on)
        assert target.execute("select v from others") == [("of the target",)]
        assert messages
