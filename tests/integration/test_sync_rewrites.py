"""A table that the application rewrites faster than a copy can end is copied all the same."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from streamer.copy import copy_queue
from streamer.copy.copy_under_lock import APPLICATION_NAME, LockedTable
from streamer.copy.spark.launcher import SparkLauncher
from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer
from tests.support.waiting import eventually, until

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("without_spark", "deferred_indexes"),
]

PERIOD_SECONDS = 0.5


class Application:
    """Truncates and refills a table again and again."""

    def __init__(self, source: Database, table: str) -> None:
        self._source, self._table = source, table
        self.count = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with psycopg.connect(self._source.url) as connection:
            while not self._stop.wait(PERIOD_SECONDS):
                self.count += 1
                connection.execute(f"truncate {self._table}".encode())
                connection.execute(
                    f"insert into {self._table} select g, {self.count}"
                    " from generate_series(1, 50) g".encode()
                )
                connection.commit()

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self.end()

    def end(self) -> None:
        """Stop the writes, and wait for the commit of the last transaction."""
        self._stop.set()
        self._thread.join()


async def test_a_table_that_is_truncated_all_the_time_is_copied_under_a_lock(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute("create table t (id int primary key, v int)")
    source.execute("create table other (id int primary key); insert into other values (1)")
    application = Application(source, "t")
    submit, copy = SparkLauncher.submit, LockedTable.copy
    rounds: list[str] = []

    async def submit_late(self: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
        """Let the application truncate the table before a part is read, on any machine."""
        if any(part["description"].startswith("only public.t ") for part in parts_of(job)):
            rounds.append("ordinary")
            # The transaction that runs now may have begun before.
            again = application.count + 2
            await until(lambda: application.count >= again)
        return await submit(self, job)

    async def copy_late(self: LockedTable, *arguments: Any) -> list[dict[str, Any]]:
        """Begin to read when the application's TRUNCATE waits for the copy."""
        rounds.append("locked")
        await asyncio.to_thread(wait_for_truncate, source)
        return await copy(self, *arguments)

    monkeypatch.setattr(SparkLauncher, "submit", submit_late)
    monkeypatch.setattr(LockedTable, "copy", copy_late)
    with application.running():
        async with stream("t:\nother:") as streamer:
            # WHEN a table is truncated and filled again during the copy
            await streamer.table_state("public.t", "ready", 120)
            # THEN the copy ended under a lock, and so did the lock
            assert rounds[-1] == "locked"
            assert application.count > 3
            again = application.count + 2
            await until(lambda: application.count >= again)
            await asyncio.to_thread(application.end)
            await streamer.caught_up(60)
            assert_same(source, target, "t")
            assert_same(source, target, "other")
            sessions = f"select count(*) from pg_stat_activity where application_name = '{APPLICATION_NAME}'"
            assert source.value(sessions) == 0


def parts_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for task in job["tasks"] for part in task]


def wait_for_truncate(source: Database) -> None:
    waits = (
        "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
        " and query like 'truncate%' and datname = current_database()"
    )
    eventually(lambda: source.value(waits) == 1, 60, "the application waits")


async def test_a_copy_under_a_lock_ends_with_its_process_and_lets_the_table_go(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_queue, "LOCK_AFTER_ROUNDS", 0)
    source.execute("create table t (id int primary key); insert into t values (1)")
    target.execute("create table t (id int primary key)")
    waiting = (
        "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
        " and application_name like 'streamer copy%' and datname = current_database()"
    )
    held = (
        "select count(*) from pg_locks l join pg_stat_activity a using (pid)"
        f" where a.application_name = '{APPLICATION_NAME}' and l.relation = 't'::regclass"
    )
    with psycopg.connect(target.url) as holder:
        async with stream("t:") as streamer:
            # GIVEN a copy that holds the lock at the source and waits for a lock at the target
            copy = LockedTable.copy
            monkeypatch.setattr(LockedTable, "copy", held_up(copy, holder))
            await asyncio.to_thread(lambda: eventually(lambda: target.value(waiting) == 1, 60))
            assert source.value(held) == 1
            # WHEN the process ends THEN no wait delays the end, and the lock ends, too
            async with asyncio.timeout(30):
                await streamer.kill()
            await asyncio.to_thread(lambda: eventually(lambda: source.value(held) == 0, 60))
            holder.rollback()
            monkeypatch.setattr(LockedTable, "copy", copy)
            streamer.start()
            await streamer.caught_up(60)
            assert_same(source, target, "t")


def held_up(copy: Any, holder: "psycopg.Connection[Any]") -> Any:
    """Lock the target table before the parts are copied."""

    async def copy_late(self: LockedTable, *arguments: Any) -> list[dict[str, Any]]:
        holder.execute("lock table t in share mode")
        return list(await copy(self, *arguments))

    return copy_late


ROTATION = """
    begin; alter table {0}_now rename to {0}_0;
    create table {0}_now partition of {0} for values from (100) to (200); commit;
    insert into {0} values (100, 'behind')
"""


async def test_a_partition_that_gives_its_name_to_another_is_copied_all_the_same(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An application uses a fixed name for the partition of the present month."""
    for table in ("once", "chunked"):
        source.execute(
            f"create table {table} (id int primary key, v text) partition by range (id);"
            f"create table {table}_now partition of {table} for values from (0) to (100);"
            f"alter table {table}_now alter v set storage external;"
            f"insert into {table} select g, repeat('x', 3000) from generate_series(0, 99) g"
        )
    submit = SparkLauncher.submit
    rotated: list[str] = []

    async def submit_late(self: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
        """Let the application rename the partition before a part is read."""
        for part in parts_of(job):
            table = part["description"].removeprefix("only public.").partition("_")[0]
            if table not in rotated:
                rotated.append(table)
                await asyncio.to_thread(source.execute, ROTATION.format(table))
        return await submit(self, job)

    monkeypatch.setattr(SparkLauncher, "submit", submit_late)
    async with stream("once:\nchunked:", settings="sync: {resumable_above: 100kB}") as streamer:
        await streamer.caught_up()
        assert set(rotated) == {"once", "chunked"}
        for table in rotated:
            assert_same(source, target, table)
