"""The limit on the copies of all sources, whose tasks count each other at the target."""

import contextlib
import time
from types import SimpleNamespace

import psycopg
import pytest

from streamer.copy.parts import part_copier
from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer

ROWS = 3000
TASK = "streamer copy 99 round 0"


@pytest.mark.usefixtures("without_spark")
async def test_a_task_takes_its_share_of_the_total_rate(
    stream: MakeStreamer, source: Database, target: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=slept.append)
    monkeypatch.setattr(part_copier, "time", clock)
    source.execute("create table t (id int primary key)")
    source.execute(f"insert into t select generate_series(1, {ROWS}); analyze t")
    with contextlib.ExitStack() as others:
        # GIVEN two tasks of other sources, perhaps of other processes
        for _ in range(2):
            session = psycopg.connect(target.url, application_name=TASK)
            others.enter_context(contextlib.closing(session))
        settings = "sync: {rows_per_second: 30, total_rows_per_second: 30, jobs: 1}"
        async with stream("t:", settings=settings) as streamer:
            await streamer.caught_up()
    # THEN the table takes three times as long as under the limit of its source alone
    assert 2 * ROWS / 30 < max(slept) <= 3 * ROWS / 30
    assert_same(source, target, "t")
