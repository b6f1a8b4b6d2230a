"""Killed at every step between slot, journal and target, the program goes on without loss."""

from itertools import cycle
from pathlib import Path

import pytest

from streamer.util.failpoints import NAMES
from tests.fault.test_backlog import SPOOL, fill, journal_files, unconfirmed_bytes
from tests.support.kills import Kills
from tests.support.mixed import DDL, HISTORY, TABLES, assert_equal, write
from tests.support.postgres import Database
from tests.support.process import caught_up
from tests.support.proxy import Proxy
from tests.support.waiting import eventually

STEPS = sorted(name for name in NAMES if name.startswith("journal."))
PROGRAM = "tests.support.small_journals"


def is_read(source: Database) -> bool:
    return bool(
        source.value(
            "select count(*) from pg_replication_slots where slot_name = 'streamer_shop' and active"
        )
    )


def spooling(directory: Path, source: Database, target: Database, **options: str) -> Kills:
    """Make tables of every kind, and a source that spools."""
    source.execute(DDL + "create table hist (id int primary key, v text)")
    source.execute("create table filler (a text)")
    target.execute(DDL + HISTORY)
    return Kills(directory, source, target, TABLES, program=PROGRAM, group=SPOOL, **options)


@pytest.mark.parametrize(("name", "workers"), list(zip(STEPS, cycle([1, 8]), strict=False)))
def test_killed_at(
    name: str,
    workers: int,
    tmp_path: Path,
    source: Database,
    target: Database,
    target_proxy: Proxy,
) -> None:
    kills = spooling(tmp_path, source, target, settings=f"workers: {workers}")
    is_healed = False

    def write_and_fill() -> None:
        nonlocal is_healed
        if kills.acts == 0:
            eventually(lambda: is_read(source), what="the stream begins")
            target_proxy.leave()
        write(source, kills.acts * 5, kills.acts * 5 + 5)
        if is_healed:  # the program reads the rest of the journal
            return
        fill(source)
        if kills.acts > 20 and journal_files(tmp_path):
            target_proxy.heal()
            is_healed = True

    kills.die(name, write_and_fill)
    target_proxy.leave()
    first = kills.acts * 5
    write(source, first, first + 20)
    fill(source, 3)
    kills.begin(lambda: unconfirmed_bytes(source) < 1024 * 1024)
    assert journal_files(tmp_path)
    write(source, first + 20, first + 40)
    with kills.process() as process:
        target_proxy.heal()
        eventually(lambda: not journal_files(tmp_path), 60, process.output)
        write(source, first + 40, first + 60)
        caught_up(process)
        assert process.terminate() == 0
    assert_equal(source, target)


def test_a_process_that_spools_stops_on_sigterm(
    tmp_path: Path, source: Database, target: Database, target_proxy: Proxy
) -> None:
    """The process ends in time during an outage of the target, and the next process goes on with
    the journal.
    """
    kills = spooling(tmp_path, source, target)
    with kills.process() as process:
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
    kills.end(lambda: not journal_files(tmp_path))
    assert_equal(source, target)
