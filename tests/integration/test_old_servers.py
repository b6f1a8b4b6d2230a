"""The requests to a source before PostgreSQL 14, forced on a newer server."""

import dataclasses

import pytest

from streamer.runtime.session import open_session
from streamer.source.catalog import SourceServer, read_server
from streamer.source.connection import Connection
from streamer.source.stream.replication_stream import ReplicationStream, StreamOptions
from streamer.target.connection import TargetConnection
from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer
from tests.support.values import ROWS, TYPES, UPDATES
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("without_spark")


@pytest.mark.parametrize("version", [12_00_00, 13_00_00])
async def test_protocol_1_and_text(
    version: int,
    source: Database,
    target: Database,
    stream: MakeStreamer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[StreamOptions] = []
    start = ReplicationStream.start

    async def read_as_old(connection: Connection) -> SourceServer:
        return dataclasses.replace(await read_server(connection), version=version)

    async def start_and_note(*arguments: object, **named: object) -> ReplicationStream:
        asked.append(arguments[-1])  # type: ignore[arg-type]
        return await start(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(open_session, "read_server", read_as_old)
    monkeypatch.setattr(ReplicationStream, "start", start_and_note)
    source.execute(f"{TYPES} {ROWS}")
    source.execute("create table log (line text); insert into log values ('a'), ('a')")
    source.execute("create table big (id int primary key, v text)")
    source.execute("insert into big select g, repeat('x', 100) from generate_series(1, 3000) g")
    async with stream("every:\nlog:\nbig: {type: history}") as streamer:
        await streamer.caught_up()
        assert_same(source, target, "every")
        assert_same(source, target, "log")
        source.execute(UPDATES)
        source.execute("insert into log values ('b'); truncate big")
        with source.connect() as connection:
            connection.execute("begin")
            connection.execute("insert into big select g, 'new' from generate_series(1, 500) g")
            connection.execute("update every set i2 = 3 where id = 1")
            connection.execute("commit")
        await streamer.caught_up()
        assert_same(source, target, "every")
        assert_same(source, target, "log")
        open_versions = "select id, v from big where kvsz_end > '9000-01-01' order by 1"
        assert target.execute(open_versions) == source.execute("select id, v from big order by 1")
    assert asked
    assert all((o.protocol, o.streaming, o.origin_none) == (1, False, False) for o in asked)


@pytest.mark.since(15)
async def test_definitions_that_an_older_target_does_not_accept(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute(
        "create table people (id int primary key, mail text, name text);"
        " create unique index by_mail on people (mail) nulls not distinct;"
        " create index by_name on people (name);"
        " create table orders (id int primary key, person_id int, note text,"
        " constraint of_person foreign key (person_id) references people"
        " on delete set null (person_id))"
    )
    monkeypatch.setattr(TargetConnection, "server_version", 14_00_00)
    rules = "people: {create: all}\norders: {create: all}"
    async with stream(rules) as streamer:
        await streamer.caught_up()
        await until(lambda: definitions(target).get("by_name") == ("made", None))
        refused = ("unmade", "the clause needs PostgreSQL 15, and the target has PostgreSQL 14")
        assert definitions(target)["by_mail"] == refused
        assert definitions(target)["of_person"] == refused


def definitions(target: Database) -> dict[object, tuple[object, ...]]:
    rows = target.execute("select name, state, reason from streamer.definition")
    return {name: tuple(more) for name, *more in rows}
