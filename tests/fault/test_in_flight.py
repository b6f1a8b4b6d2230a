"""Changes in flight during a hand-over of the lane count once."""

import contextlib
from collections.abc import Iterator

import pytest

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.relation_records import read_relation_records
from streamer.bookkeeping.requests import make_request
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer, Streamer
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("without_spark")


@contextlib.contextmanager
def locked(db: Database, table: str) -> Iterator[None]:
    """A user keeps writers out of a table during a block."""
    with db.connect() as connection:
        connection.execute(f"begin; lock table {table} in share mode".encode())
        yield


async def waiting(streamer: Streamer, db: Database, name: str) -> None:
    """Wait until a session of ours waits for a lock."""
    sql = (
        "select exists (select from pg_stat_activity where datname = current_database()"
        f" and wait_event_type = 'Lock' and application_name like '{name}%')"
    )

    async def is_so() -> bool:
        return bool(db.value(sql))

    await streamer.eventually(is_so)


async def test_the_source_is_lost_while_a_worker_waits_for_a_lock(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute("create table t (v int)")
    async with stream("{t: {initial: none}}") as streamer:
        await streamer.caught_up()
        with locked(target, "t"):
            source.execute("insert into t values (1)")
            await waiting(streamer, target, "streamer worker")
            first = streamer.engine.supervisors[0].pipeline
            source.execute(
                "select pg_terminate_backend(active_pid) from pg_replication_slots where active"
            )

            async def is_new() -> bool:
                supervisor = streamer.engine.supervisors[0]
                return supervisor.pipeline is not first and supervisor.health.state == "streaming"

            await streamer.eventually(is_new)
            await waiting(streamer, target, "streamer worker")
        source.execute("insert into t values (2)")
        await streamer.caught_up()
        fenced = {"database": "shop", "sid": "", "code": "fenced"}
        registry = streamer.engine.metrics.registry
        assert registry.get_sample_value("streamer_errors_total", fenced) is None
    assert_same(source, target, "t")


@pytest.mark.parametrize("consistency", ["table", "transaction"])
async def test_a_resync_while_a_drainer_is_at_work(
    source: Database, target: Database, stream: MakeStreamer, consistency: str
) -> None:
    """A late commit of the drainer must not come on top of the copy."""
    source.execute("create table t (v int); insert into t values (1)")
    # With a sid, rows are deleted, which does not wait for inserting sessions.
    async with stream("t:", sid="eu", settings=f"consistency: {consistency}") as streamer:
        await streamer.caught_up()
        with locked(target, "t"):
            source.execute("insert into t values (2)")
            await waiting(streamer, target, "streamer drainer")
            bookkeeping = Bookkeeping(TargetAddress.parse(streamer.settings.target.url))
            (relation,) = await read_relation_records(bookkeeping)
            await make_request(bookkeeping, relation.relation_id, "resync")
            await bookkeeping.close()
            pending = "select exists (select from streamer.request where state = 'queued')"
            await until(lambda: not target.value(pending), "the request is taken")
        await streamer.caught_up()
    assert target.execute("select v, count(*) from t group by v order by v") == [(1, 1), (2, 1)]
