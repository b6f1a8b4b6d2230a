"""A user's lock on one target table, for longer than any time-out, under steady load.

``TEST_LOCK_SECONDS=120`` holds the lock for two minutes.
"""

import os
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.support.postgres import Database, assert_same
from tests.support.process import Process, caught_up
from tests.support.streamer import write_config
from tests.support.waiting import eventually

LOCK_SECONDS = float(os.environ.get("TEST_LOCK_SECONDS", "6"))
WORKERS = [1, 8] if os.environ.get("TEST_COMBINATIONS") == "all" else [1]
"""With one worker, all tables share the worker of the locked table."""
GROWTH_BYTES_MAX = 48 * 1024 * 1024

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LOCK_SECONDS + 180)]

DDL = """
create table locked (id int primary key, v text);
create table other (id int primary key, v text);
create table third (a int, b text)
"""
TABLES = "locked: {initial: none}\nother: {initial: none}\nthird: {initial: none}"
SLOT = "select {} from pg_replication_slots where slot_name = 'streamer_shop'"


def load(source: Database, n: int) -> None:
    """Write about half a megabyte, most to the locked table."""
    first = n * 1000
    source.execute(
        f"""
        begin;
        insert into locked select g, repeat(md5(g::text), 15)
          from generate_series({first}, {first + 999}) g;
        update locked set v = 'changed' where id % 10 = {n % 10} and id >= {first - 1000};
        insert into other values ({n}, 'x'); insert into third values ({n % 3}, 'y');
        commit
        """
    )


@pytest.mark.parametrize("workers", WORKERS)
def test_a_locked_table_delays_no_other_table_and_holds_the_acknowledged_position(
    workers: int, tmp_path: Path, source: Database, target: Database
) -> None:
    for db in (source, target):
        db.execute(DDL)
    source.execute(f"alter database \"{source.name}\" set wal_sender_timeout = '5s'")
    config = tmp_path / "config.yaml"
    write_config(config, source, target, TABLES, settings=f"workers: {workers}")
    with Process(config) as process, target.connect() as user:
        caught_up(process)
        for n in range(20):  # buffers have grown, statements are prepared
            load(source, n)
        caught_up(process)
        walsender = source.value(SLOT.format("active_pid"))
        user.execute("begin; lock table locked in access exclusive mode")
        load(source, 20)
        first_change_end = source.value("select pg_current_wal_insert_lsn()")
        began = time.monotonic()
        memory = psutil.Process(process.process.pid)
        sizes: list[int] = []
        n = 20
        while time.monotonic() - began < LOCK_SECONDS:
            n += 1
            load(source, n)
            arrived = partial(target.value, f"select exists (select from other where id = {n})")
            eventually(arrived, 30, "another table waits")
            sizes.append(memory.memory_info().rss)
            assert source.value(SLOT.format("active_pid")) == walsender, process.output
            confirmed = SLOT.format(f"confirmed_flush_lsn < '{first_change_end}'")
            assert source.value(confirmed), "acknowledged what is not durable"
        assert n > 21
        steady = sizes[len(sizes) // 4]
        assert max(sizes) - steady < GROWTH_BYTES_MAX, "what is held belongs on disk"
        process.kill()
        user.execute("rollback")
    with Process(config) as process:
        caught_up(process, 120)
        for table in ("locked", "other", "third"):
            assert_same(source, target, table)
        assert process.terminate() == 0
