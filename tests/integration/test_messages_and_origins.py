"""Further contents of a slot: logical messages, empty transactions, changes with an origin."""

import time
from typing import Any

import pytest

from streamer.bookkeeping.positions import AcknowledgedPositions
from tests.support.postgres import Database, assert_same
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer
from tests.support.waiting import until

DDL = "create table t (id int primary key, v text); create table unpublished (id int)"


@pytest.mark.parametrize("streamed", [False, True])
async def test_messages_and_empty_transactions(
    source: Database, target: Database, stream: MakeStreamer, streamed: bool
) -> None:
    for db in (source, target):
        db.execute(DDL)
    if streamed and int(str(source.value("show server_version_num"))) >= 160000:
        source.parameters = "options=-c%20debug_logical_replication_streaming%3Dimmediate"
    async with stream("t: {initial: none}") as streamer:
        await streamer.caught_up()
        source.execute("select pg_logical_emit_message(false, 'outside', repeat('x', 3000000))")
        source.execute(
            """
            begin; insert into t values (1, 'a');
            select pg_logical_emit_message(true, 'inside', repeat('y', 2000000));
            select pg_logical_emit_message(false, 'inside, at once', 'z');
            insert into t values (2, 'b'); commit
            """
        )
        source.execute("begin; select pg_logical_emit_message(true, '', ''); commit")
        source.execute("begin; insert into unpublished values (1); commit")
        source.execute("begin; insert into t values (3, 'c'); rollback")
        source.execute("begin; insert into t values (4, 'd'); delete from t where id = 4; commit")
        await streamer.caught_up()
        assert_same(source, target, "t")


@streams("t: {initial: none}", both=DDL)
async def test_a_quiet_publication_does_not_hold_wal(shared: Shared) -> None:
    source = shared.source
    await shared.caught_up()
    source.execute("insert into unpublished select generate_series(1, 100000)")
    end = source.value("select pg_current_wal_flush_lsn()")

    async def is_acknowledged() -> bool:
        return bool(
            source.value(
                f"select confirmed_flush_lsn >= '{end}' from pg_replication_slots"
                f" where database = '{source.name}'"
            )
        )

    await shared.eventually(is_acknowledged)


async def test_source_and_target_on_one_server_do_not_keep_each_other_busy(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storing a position writes WAL, which moves the position."""
    for db in (source, target):
        db.execute(DDL)
    stored: list[float] = []
    acknowledge = AcknowledgedPositions.acknowledge

    async def counted(self: AcknowledgedPositions, *arguments: Any) -> None:
        stored.append(time.monotonic())
        await acknowledge(self, *arguments)

    async with stream("t: {initial: none}") as streamer:
        await streamer.caught_up()
        pipeline = streamer.engine.supervisors[0].pipeline
        assert pipeline is not None
        assert pipeline.session is not None
        asked = pipeline.session.position
        await until(lambda: not asked.is_due_soon, "nobody waits for a position any more")
        monkeypatch.setattr(AcknowledgedPositions, "acknowledge", counted)
        (now,) = source.execute("select clock_timestamp()")
        heard = (
            f"select bool_or(reply_time > '{now[0]}'::timestamptz + '3s') from pg_stat_replication"
            " join pg_replication_slots on pid = active_pid where database = current_database()"
        )
        await until(lambda: source.value(heard), "three seconds of the stream have passed")
        assert len(stored) <= 4


@pytest.mark.parametrize("group", [None, "forward_origins: true"])
@streams("t: {initial: none}", both=DDL, group="<group>")
async def test_changes_that_carry_an_origin(shared: Shared, group: str | None) -> None:
    source, target = shared.source, shared.target
    origin = f"from_elsewhere_{source.name}"
    source.execute(f"select pg_replication_origin_create('{origin}')")
    try:
        await shared.caught_up()
        source.execute("insert into t values (1, 'from here')")
        source.execute(
            f"select pg_replication_origin_session_setup('{origin}');"
            "begin; insert into t values (2, 'from there'); commit"
        )
        source.execute("insert into t values (3, 'from here')")
        await shared.caught_up()
        expected = [(1,), (3,)] if group is None else [(1,), (2,), (3,)]
        assert target.execute("select id from t order by 1") == expected
    finally:
        source.execute(f"select pg_replication_origin_drop('{origin}')")
