"""An operator requests a resync while streamer writes a large transaction."""

from typing import Any

import pytest

from streamer.copy.spark.launcher import SparkLauncher
from streamer.drain import lane_turn
from streamer.runtime.session import open_session
from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer, copy_in_threads

ROWS = 3000
RESYNC = """
insert into streamer.request (relation_id, action)
select id, 'resync' from streamer.relation where source = 'public.t'; notify streamer
"""


@pytest.mark.parametrize("consistency", ["table", "transaction"])
async def test_no_reader_sees_a_part_of_it(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    monkeypatch: pytest.MonkeyPatch,
    consistency: str,
) -> None:
    monkeypatch.setattr(open_session, "PIECE_BYTES_MAX", 20_000)
    monkeypatch.setattr(lane_turn, "READ_BYTES", 20_000)
    seen: list[object] = []

    async def copy(self: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
        seen.append(target.value("select count(*) from t"))
        return await copy_in_threads(self, job)

    for db in (source, target):
        db.execute("create table t (id int primary key, v text)")
        db.execute("create table other (id int primary key, v text)")
    monkeypatch.setattr(SparkLauncher, "submit", copy)
    rules = "t:\nother:"
    async with stream(rules, settings=f"consistency: {consistency}") as streamer:
        await streamer.caught_up()
        seen.clear()
        with target.connect() as blocker:
            # The writer meets this row in the middle.
            blocker.execute(f"begin; insert into t values ({ROWS // 2}, 'in the way')")
            source.execute(
                f"begin; insert into t select g, repeat('x', 50) from generate_series(1, {ROWS}) g;"
                f"insert into other select g, 'y' from generate_series(1, {ROWS}) g; commit"
            )

            async def writer_waits() -> bool:
                return bool(target.execute("select 1 from pg_locks where not granted"))

            await streamer.eventually(writer_waits, 40)
            target.execute(RESYNC)

            async def request_is_taken() -> bool:
                return bool(
                    target.execute(
                        "select 1 from streamer.relation where source = 'public.t' and state = 'init'"
                    )
                )

            await streamer.eventually(request_is_taken, 40)
            blocker.execute("rollback")
        await streamer.caught_up(60)
        assert seen
        assert set(seen) <= {0, ROWS}
        assert_same(source, target, "t")
        assert_same(source, target, "other")
