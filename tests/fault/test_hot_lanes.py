"""Lanes that move between connections, under faults of all kinds."""

from itertools import count

import pytest

from streamer.apply.lanes import hot_lanes
from streamer.runtime.process import open_services
from tests.fault.test_in_flight import locked, waiting
from tests.support.mixed import DDL, HISTORY, TABLES, assert_equal, write
from tests.support.postgres import Database, assert_same
from tests.support.restless_lanes import unsettle
from tests.support.streamer import MakeStreamer, Streamer
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("without_spark", "short_backoffs")

PICKY = "create table picky (id int primary key, v int{check})"
END_SESSIONS = (
    "select count(pg_terminate_backend(pid)) from pg_stat_activity"
    " where application_name like 'streamer worker%' and datname = current_database()"
)
END_STREAM = "select pg_terminate_backend(active_pid) from pg_replication_slots where active"


def commits(streamer: Streamer, worker: int) -> float:
    name, labels = "streamer_commits_total", {"worker": str(worker)}
    return streamer.engine.metrics.registry.get_sample_value(name, labels) or 0.0


async def test_lanes_that_move_all_the_time_keep_their_order(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause, a resync, a TRUNCATE, a new definition, rows in quarantine, lost sessions, a lost
    stream and a large transaction meet moving lanes.
    """
    unsettle(monkeypatch.setattr)
    monkeypatch.setattr(open_services, "hot_worker_count", lambda workers: 4)
    source.execute(DDL + "create table hist (id int primary key, v text);" + PICKY.format(check=""))
    source.execute("create table again (id int primary key)")
    target.execute(DDL + HISTORY + ";" + PICKY.format(check=" check (v <> 13)"))
    tables = TABLES + "picky: {initial: none, on_error: quarantine, on_column_added: add}\nagain:\n"
    numbers = count(0, 5)

    def write_some() -> None:
        first = next(numbers)
        write(source, first, first + 5)
        source.execute(
            f"insert into picky select g, g from generate_series({first}, {first + 4}) g"
        )

    async with stream(tables, settings="workers: 1") as streamer:
        await streamer.caught_up()

        async def has_moved() -> bool:
            write_some()
            return commits(streamer, 1) > 3

        await streamer.eventually(has_moved)
        large = (
            "insert into keyless select g % 3, repeat('x', 300) from generate_series(1, 20000) g"
        )
        for db, statement in (
            (target, END_SESSIONS),
            (source, "truncate keyed, whole"),
            (source, "alter table picky add extra text default 'x'"),
            (source, large),
            (source, END_STREAM),
            (target, END_SESSIONS),
        ):
            write_some()
            db.execute(statement)
            write_some()
        await streamer.ask("pause", "public.keyed")
        write_some()
        await streamer.ask("resume", "public.keyed")
        await streamer.ask("resync", "public.again")
        write_some()
        await streamer.caught_up()
        assert commits(streamer, 1) > 3
        assert target.execute("select count(*) from streamer.quarantine") == [(1,)]
        assert_equal(source, target)
        assert_same(source, target, "again")

        # WHEN lanes stay with their workers, and a lane waits for a lock
        monkeypatch.setattr(hot_lanes, "ASIDE_SECONDS", 600)
        pipeline = streamer.engine.supervisors[0].pipeline
        services = streamer.engine._services
        assert services is not None
        assert pipeline is not None
        assert pipeline.session is not None
        relations = pipeline.session.relations

        def served() -> set[str]:
            lanes = {str(m.mapping.source): relations.lane(m) for m in relations}
            return {name for name, lane in lanes.items() if lane.queue in services.hot_workers}

        async def has_hot_worker() -> bool:
            write_some()
            return "public.whole" in served()

        await streamer.eventually(has_hot_worker)
        await streamer.caught_up()  # else the lock and this task could wait for the engine
        with locked(target, "whole"):
            write_some()
            await waiting(streamer, target, "streamer worker")
            # THEN the remaining lanes pass
            for table in ("keyed", "keyless"):
                rows = f"select count(*), max({'id' if table == 'keyed' else 'a'}) from {table}"
                wanted = source.execute(rows)
                await until(lambda sql=rows, rows=wanted: target.execute(sql) == rows)  # type: ignore[misc]
        await streamer.caught_up()
        assert_equal(source, target)
