"""The times of commits at the target, and the settings for these times."""

import pytest

from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer

pytestmark = pytest.mark.usefixtures("without_spark")


async def test_a_stop_commits_the_changes_that_wait_for_the_least_interval(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key, v text)")
    settings = "commit_interval: 60\ncommit_interval_min: 60"
    async with stream("t: {initial: none}", settings=settings) as streamer:
        await streamer.caught_up()
        services = streamer.engine._services
        assert services is not None

        async def is_visible() -> bool:
            return target.execute("select count(*) from t") == [(1,)]

        async def wait_in_window() -> bool:
            # Changes, not transactions: consecutive transactions may arrive as a block.
            return sum(worker._filling.change_count for worker in services.workers) == 3

        source.execute("insert into t values (1, 'a')")
        await streamer.eventually(is_visible)
        for number in (2, 3, 4):
            source.execute(f"insert into t values ({number}, 'b')")
        await streamer.eventually(wait_in_window)
        assert await is_visible()
    visible = "select count(*), count(distinct xmin::text) from t"
    assert target.execute(visible) == [(4, 2)]
