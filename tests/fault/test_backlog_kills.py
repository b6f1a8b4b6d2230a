"""Killed at every step between slot, journal and target, the program goes on as if nothing was."""

import time
from itertools import cycle
from pathlib import Path

import pytest

from streamer.failpoints import NAMES
from tests.fault.test_backlog import (
    SPOOL,
    fill,
    journal_files,
    unconfirmed_bytes,
)
from tests.support.mixed import DDL, HISTORY, TABLES, assert_equal, write
from tests.support.postgres import Database
from tests.support.process import Process, caught_up
from tests.support.proxy import Proxy
from tests.support.streamer import write_config
from tests.support.waiting import eventually

STEPS = sorted(name for name in NAMES if name.startswith("journal."))
PROGRAM = "tests.support.small_journals"


def is_read(source: Database) -> bool:
    return bool(
        source.value(
            "select count(*) from pg_replication_slots where slot_name = 'streamer_shop' and active"
        )
    )


@pytest.mark.parametrize(("name", "workers"), list(zip(STEPS, cycle([1, 8]), strict=False)))
def test_killed_at(
    name: str,
    workers: int,
    tmp_path: Path,
    source: Database,
    target: Database,
    target_proxy: Proxy,
) -> None:
    source.execute(DDL + "create table hist (id int primary key, v text)")
    source.execute("create table filler (a text)")
    target.execute(DDL + HISTORY)
    config = tmp_path / "config.yaml"
    write_config(config, source, target, TABLES, settings=f"workers: {workers}", group=SPOOL)
    armed = {"STREAMER_FAILPOINTS": f"{name}=kill"}
    with Process(config, environment=armed, program=PROGRAM) as process:
        eventually(lambda: is_read(source), 60, process.output)
        target_proxy.leave()
        first, is_healed = 0, False
        deadline = time.monotonic() + 90
        while not process.process.ends_within(0.2):
            assert time.monotonic() < deadline, f"the failpoint was not reached\n{process.output}"
            write(source, first, first + 5)
            first += 5
            if is_healed:  # the program reads the rest of the journal
                continue
            fill(source)
            if first > 100 and journal_files(tmp_path):
                target_proxy.heal()
                is_healed = True
        assert process.process.returncode == -9
    target_proxy.leave()
    write(source, first, first + 20)
    fill(source, 3)
    with Process(config, program=PROGRAM) as process:
        eventually(lambda: unconfirmed_bytes(source) < 1024 * 1024, 60, process.output)
        assert journal_files(tmp_path)
        process.kill()
    write(source, first + 20, first + 40)
    with Process(config, program=PROGRAM) as process:
        target_proxy.heal()
        eventually(lambda: not journal_files(tmp_path), 60, process.output)
        write(source, first + 40, first + 60)
        caught_up(process)
        assert process.terminate() == 0
    assert_equal(source, target)


def test_told_to_stop_while_it_spools(
    tmp_path: Path, source: Database, target: Database, target_proxy: Proxy
) -> None:
    """It ends in time although the target is away, and the next one goes on with the journal."""
    source.execute(DDL + "create table hist (id int primary key, v text)")
    source.execute("create table filler (a text)")
    target.execute(DDL + HISTORY)
    config = tmp_path / "config.yaml"
    write_config(config, source, target, TABLES, group=SPOOL)
    with Process(config, program=PROGRAM) as process:
        caught_up(process)
        target_proxy.leave()
        write(source, 0, 20)

        def is_spooling() -> bool:
            if journal_files(tmp_path) and unconfirmed_bytes(source) < 1024 * 1024:
                return True
            fill(source)  # more than that
            return False

        eventually(is_spooling, 60, process.output)
        assert process.terminate() == 0, process.output
    assert journal_files(tmp_path)
    write(source, 20, 40)
    target_proxy.heal()
    with Process(config, program=PROGRAM) as process:
        caught_up(process, 90)
        eventually(lambda: not journal_files(tmp_path), 60, process.output)
        assert process.terminate() == 0, process.output
    assert_equal(source, target)
