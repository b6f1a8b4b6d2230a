"""Killed at every step from dispatch to acknowledgement, the program goes on as if nothing was."""

import time
from itertools import cycle
from pathlib import Path

import pytest

from streamer.failpoints import NAMES
from tests.support.postgres import Database, assert_same
from tests.support.process import Process, caught_up, eventually, status
from tests.support.streamer import write_config

pytestmark = pytest.mark.timeout(120)

TABLES = """
keyed: {initial: none}
keyless: {initial: none}
whole: {initial: none}
hist: {initial: none, type: history}
"""
DDL = """
create table keyed (id int primary key, v text);
create table keyless (a int, b text);
create table whole (a int, b text); alter table whole replica identity full;
"""
HISTORY = """
create table hist (id int, v text, kvsz_start timestamptz not null, kvsz_end timestamptz not null,
                   kvsz_deleted boolean not null)
"""
STREAMING = sorted(name for name in NAMES if not name.startswith(("sync.", "indexes.", "journal.")))


def write(source: Database, first: int, last: int) -> None:
    with source.connect() as connection:
        for n in range(first, last):
            connection.execute(
                f"""
                begin;
                insert into keyed values ({n}, 'new'); update keyed set v = v || '.' where id % 5 = {n % 5};
                delete from keyed where id = {n - 7};
                insert into keyless values ({n % 3}, 'row'), ({n % 3}, 'row');
                insert into whole values ({n % 4}, 'x');
                update whole set b = b || 'y' where ctid = (select min(ctid) from whole where a = {n % 4});
                insert into hist values ({n}, 'first'); update hist set v = 'next' where id in ({n}, {n - 2});
                delete from hist where id = {n - 5};
                commit
                """.encode()
            )


def write_large(source: Database) -> None:
    """What a drainer applies in pieces."""
    source.execute(
        "insert into keyless select g % 3, repeat('x', 300) from generate_series(1, 40000) g"
    )


def assert_history(source: Database, target: Database) -> None:
    open_rows = (
        "select id, v from hist where kvsz_end = '9999-01-01' and not kvsz_deleted order by 1"
    )
    assert target.execute(open_rows) == source.execute("select id, v from hist order by 1")
    overlapping = """
        select count(*) from hist a join hist b on a.id = b.id and a.ctid <> b.ctid
        where (a.kvsz_start, a.kvsz_end) overlaps (b.kvsz_start, b.kvsz_end)
    """
    assert target.value(overlapping) == 0


@pytest.mark.parametrize(("name", "workers"), list(zip(STREAMING, cycle([1, 8]), strict=False)))
def test_killed_at(
    name: str, workers: int, tmp_path: Path, source: Database, target: Database
) -> None:
    source.execute(DDL + "create table hist (id int primary key, v text)")
    target.execute(DDL + HISTORY)
    config = tmp_path / "config.yaml"
    write_config(config, source, target, TABLES, settings=f"workers: {workers}")
    with Process(config) as process:
        caught_up(process)
        process.kill()
    write(source, 0, 40)
    with Process(config, environment={"STREAMER_FAILPOINTS": f"{name}=kill@2"}) as process:
        first = 40
        while process.process.poll() is None:
            assert first < 1000, "the failpoint was not reached"
            write(source, first, first + 5)
            if name == "drain.piece_written" and first == 40:
                write_large(source)
            time.sleep(0.1)
            first += 5
        assert process.process.returncode == -9
    write(source, first, first + 20)
    with Process(config) as process:
        eventually(lambda: status(config)[0]["state"] == "streaming")
        caught_up(process)
        assert process.terminate() == 0
    for table in ("keyed", "keyless", "whole"):
        assert_same(source, target, table)
    assert_history(source, target)
