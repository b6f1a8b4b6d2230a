"""A copy that waits names the session that blocks the copy, or the copies that come first."""

import asyncio
import contextlib
import json
import re

import psycopg
import pytest

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.copy import copy_context
from streamer.errors.error_classes import Retry, TargetContentionError
from streamer.postgres.blocking_sessions import (
    BACKENDS,
    MAY_END,
    blockers_of,
    blockers_sql,
    session_sql,
)
from streamer.postgres.secret import Secret
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database, assert_same
from tests.support.runbooks import run_block
from tests.support.streamer import MakeStreamer
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("without_spark")]

NAMES = ("a_held", "b_next")
TRANSACTION = """
select pid, virtualtransaction from pg_locks
where pid = pg_backend_pid() and locktype = 'virtualxid'
"""


def resync(target: Database, *names: str) -> None:
    """Request all copies at once, so that a single round copies the tables."""
    listed = ", ".join(f"'public.{name}'" for name in names)
    target.execute(
        "insert into streamer.request (relation_id, action) select id, 'resync'"
        f" from streamer.relation where source in ({listed}); notify streamer"
    )


@pytest.mark.follows("runbooks:copy-does-not-finish#1")
async def test_a_copy_names_the_session_at_the_target_and_the_copies_that_come_first(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for name in NAMES:
        source.execute(f"create table {name} (id int); insert into {name} values (1)")
        target.execute(f"create table {name} (id int)")
    tables = "\n".join(f"{name}: {{initial: none}}" for name in NAMES)
    async with stream(tables) as streamer:
        await streamer.caught_up(60)

        async def waits(name: str, pattern: str) -> bool:
            waiting_for = (await streamer.table(f"public.{name}"))["waiting_for"] or ""
            return re.match(pattern, waiting_for) is not None

        with psycopg.connect(target.url, application_name="report") as holder:
            pid = holder.info.backend_pid
            lock = (
                rf'a lock on target table "public.a_held": pid {pid} \(role "postgres", '
                r'application "report", idle in transaction for \d+ s, .*'
                r"select pg_terminate_backend\(\d+\)"
            )
            # WHEN a session at the target locks a table whose second copy is due
            holder.execute("lock table a_held in access exclusive mode")
            resync(target, "a_held")
            # THEN the copy names the session while preparing the table
            await streamer.eventually(lambda: waits("a_held", lock), 60)
            shown = await asyncio.to_thread(
                run_block, streamer.path, "copy-does-not-finish#1", {"orders": "a_held"}
            )
            (table,) = json.loads(shown)["sources"][0]["tables"]
            assert table["waiting_for"].startswith('a lock on target table "public.a_held"')
            holder.rollback()
            await streamer.caught_up(60)
            # AND while filling the table, if the session blocks that step
            target.execute("truncate a_held, b_next")
            holder.execute("lock table a_held, b_next in share mode")
            resync(target, "a_held", "b_next")
            held = f'a lock on target table "public.(a_held|b_next)": pid {pid} '
            turn = "its turn: (1 copy of other tables uses Spark|other tables are prepared)"

            async def one_waits_for_the_other() -> bool:
                pairs = (("a_held", "b_next"), ("b_next", "a_held"))
                return any([await waits(a, held) and await waits(b, turn) for a, b in pairs])

            await streamer.eventually(one_waits_for_the_other, 60)
            reasons = [r for r in streamer.engine.readiness() if r["state"] == "waiting"]
            assert [f"pid {pid} (" in reason["error"] for reason in reasons] == [True]
            holder.rollback()
        await streamer.caught_up(60)

        async def waits_for_nobody() -> bool:
            return all(t["waiting_for"] is None for t in (await streamer.status())["tables"])

        await streamer.eventually(waits_for_nobody, 60)
        for name in NAMES:
            assert_same(source, target, name)


def test_a_session_with_a_hidden_state_names_the_missing_right(target: Database) -> None:
    role = f"reader_{target.name}"
    target.execute(f"create role {role}")
    try:
        with psycopg.connect(target.url, application_name="report") as holder:
            pid = holder.info.backend_pid
            sql = f"select {session_sql()} from pg_stat_activity a where a.pid = {pid}"
            holder.execute("select 1")
            shown = (
                rf'pid {pid} \(role "postgres", application "report", '
                r"idle in transaction for \d+ s, transaction \d+ s old\)"
            )
            assert re.fullmatch(shown, str(target.value(sql)))
            assert target.value(f"set role {role}; {sql}") == (
                f'pid {pid} (role "postgres", application "report", '
                "state and age hidden: an administrator can run: "
                f"grant pg_read_all_stats to {role})"
            )
    finally:
        target.execute(f"drop role {role}")


def test_the_right_to_end_a_session_is_that_of_the_server(target: Database) -> None:
    roles = user, member, reader = [f"{name}_{target.name}" for name in ("u", "m", "r")]
    target.execute(
        f"create role {user} login; create role {reader}; create role {member} in role {user}"
    )
    try:
        for asks, ends in (
            ("postgres", {user, "postgres"}),
            ("pg_signal_backend", {user}),
            (member, {user}),
            (reader, set()),
        ):
            for owner in (user, "postgres"):
                with contextlib.closing(psycopg.connect(target.url, user=owner)) as session:
                    of_session = f"from pg_stat_activity a where a.pid = {session.info.backend_pid}"
                    may_end = target.value(f"set role {asks}; select {MAY_END} {of_session}")
                    assert may_end is (owner in ends), (asks, owner)
                    end = f"set role {asks}; select pg_terminate_backend(a.pid) {of_session}"
                    refuses = pytest.raises(psycopg.errors.InsufficientPrivilege)
                    with contextlib.nullcontext() if may_end else refuses:
                        target.execute(end)
    finally:
        target.execute(f"drop role {', '.join(roles)}")


async def test_a_session_of_streamer_is_no_session_to_end(target: Database) -> None:
    target.execute("create table t (id int)")
    columns = ("subject", "sessions", "blocking", "are_ours")
    for name, steps in (("streamer copy 4 round 1", 0), ("report", 1)):
        with psycopg.connect(target.url, application_name=name) as holder:
            holder.execute("lock table t")
            async with await psycopg.AsyncConnection.connect(target.url) as waiter:
                pid = waiter.info.backend_pid
                waiting = asyncio.create_task(waiter.execute("lock table t"))
                sql = blockers_sql(BACKENDS.format(f"array[{pid}]"))
                rows: list[tuple[object, ...]] = []

                async def is_blocked(sql: str = sql, rows: list[tuple[object, ...]] = rows) -> bool:
                    rows[:] = await asyncio.to_thread(target.execute, sql)
                    return bool(rows)

                await until(is_blocked)
                (blockers,) = blockers_of(
                    dict(zip(columns, row, strict=True)) for row in rows
                ).values()
                wait = blockers.wait_for("public.t")
                # The server hides the start of the session from a role, but not the transaction.
                as_role = f"set role pg_signal_backend; {sql}"
                ((*_, hidden, _),) = await asyncio.to_thread(target.execute, as_role)
                session = holder.execute(TRANSACTION).fetchone()
                assert json.loads(str(hidden)) == [[*(session or ()), False]]
                holder.rollback()
                await waiting
        assert name in wait.text
        assert wait.is_automatic is (steps == 0)
        assert len(wait.remedy.steps if wait.remedy else ()) == steps


async def eventually_ended(target: Database) -> None:
    sessions = "select count(*) from pg_stat_activity where application_name ~ '^streamer copy'"
    async with asyncio.timeout(30):
        while target.value(sessions):  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_task_that_outlives_its_end_is_tried_again_later(
    target: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy target is no defect of streamer, which the code `internal` would say."""
    monkeypatch.setattr(copy_context, "TERMINATE_SECONDS", 0)
    bookkeeping = Bookkeeping(TargetAddress.parse(Secret(target.url)))
    with psycopg.connect(target.url, application_name="streamer copy 1 round 2"):
        with pytest.raises(TargetContentionError, match="sessions of a former copy") as raised:
            await copy_context.end_tasks(bookkeeping, 1)
        assert raised.value.retry is Retry.TIMED
        # The wait for the connection does not count.
        await eventually_ended(target)
        await copy_context.end_tasks(bookkeeping, 1)
    await bookkeeping.close()
