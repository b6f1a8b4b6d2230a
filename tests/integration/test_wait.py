"""`streamer wait` while a process streams."""

import time

from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer


async def test_a_waiter_has_the_position_stored_without_the_quiet_interval(
    stream: MakeStreamer, source: Database, target: Database, without_spark: None, monkeypatch
):
    source.execute("create table items (id integer primary key)")
    # GIVEN a process that stores positions without changes once a minute
    monkeypatch.setattr("streamer.runtime.pipeline.QUIET_SECONDS", 60.0)
    async with stream("items: {}") as streamer:
        await streamer.caught_up()
        began = time.monotonic()
        for number in range(5):
            source.execute(f"insert into items values ({number})")
            # WHEN an operator waits THEN that is no matter of the interval
            await streamer.caught_up()
        assert time.monotonic() - began < 60
    assert target.value("select count(*) from items") == 5
