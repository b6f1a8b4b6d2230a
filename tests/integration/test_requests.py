"""Requests of operators, as `streamer resync`, `pause` and `resume` make them."""

from streamer.commands import requests
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer


async def test_a_pattern_asks_for_all_of_its_tables_in_one_transaction(
    stream: MakeStreamer, source: Database, target: Database
) -> None:
    for name in ("a", "b", "c"):
        source.execute(f"create table {name} (id int primary key)")
        target.execute(f"create table {name} (id int primary key)")
    async with stream('"*": {initial: none}') as streamer:
        await streamer.caught_up(60)
    address = TargetAddress.parse(streamer.settings.target.url)
    asked = await requests.request(address, "resync", "*.*", database="shop", sid=None)
    assert len(asked.names) == 3
    found = target.execute("select count(*), count(distinct xmin::text) from streamer.request")
    assert found == [(3, 1)]
