"""A target in an encoding other than UTF8 accepts the bookkeeping, and all its text."""

import os
from collections.abc import Iterator

import pytest

from streamer.commands.demo.embedded_servers import Server
from tests.support.checking import ERROR, ITEMS, Checker, matching
from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer

pytestmark = pytest.mark.usefixtures("without_spark")


@pytest.fixture
def target(target_server: Server) -> Iterator[Database]:
    name = f"target_latin1_{os.getpid()}"
    target_server.execute(
        f"create database {name} encoding 'LATIN1' lc_collate 'C' lc_ctype 'C' template template0"
    )
    made = Database(target_server, name)
    try:
        yield made
    finally:
        made.close()
        target_server.execute(f"drop database {name} with (force)")


async def test_a_target_in_latin1(checker: Checker, stream: MakeStreamer) -> None:
    source, target = checker.source, checker.target
    source.execute(ITEMS)
    checker.configure("items:")
    assert not matching(await checker.findings(), ERROR)
    async with stream("items:") as streamer:
        await streamer.caught_up()
        source.execute("insert into items values (1, 'caf\u00e9')")
        await streamer.caught_up()
    assert target.execute("select * from items") == [(1, "caf\u00e9")]
