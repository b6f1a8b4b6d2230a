"""Servers that restart and backends that are killed in every state of a table sync.

SIGSTOP halts the program at a step of a sync, and a fault hits a server. Then the program
continues, detects the fault, and brings the tables to the same end without help.
"""

import asyncio
import signal
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import psutil
import psycopg
import pytest

from streamer.commands.demo.embedded_servers import Server
from tests.support.postgres import Connection, Database, database, running, versions
from tests.support.process import Process, caught_up
from tests.support.sync_case import ONLY_AT_FIRST, ONLY_LATER, STEPS, WRITES_MAX, Case
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("without_spark", "deferred_indexes")


@pytest.fixture(scope="module")
def own_servers(server_directory: Path) -> Iterator[tuple[Server, Server]]:
    """Two servers to be restarted."""
    binaries = versions()["18"]
    # A fast stop waits for walsenders, and so for a program that is halted.
    settings = {"wal_sender_timeout": "5s"}
    with (
        running(server_directory / "sync-source", binaries, settings) as source,
        running(server_directory / "sync-target", binaries) as target,
    ):
        yield source, target


@pytest.fixture
def case(own_servers: tuple[Server, Server], tmp_path: Path) -> Iterator[Case]:
    source, target = own_servers
    with database(source, "source") as first, database(target, "target") as second:
        yield Case(tmp_path, first, second, None)


def restart(mode: str) -> Callable[[Database], None]:
    def act(db: Database) -> None:
        db.server.stop(mode)
        db.server.start()

    return act


def kill_backends(db: Database) -> None:
    """Kill -9 the backend: the postmaster then ends all backends and recovers."""
    pids = db.execute(
        "select pid from pg_stat_activity where datname = current_database()"
        " and application_name like 'streamer%' and pid <> pg_backend_pid()"
    )
    with db.connect() as witness:
        for (pid,) in pids[:1]:
            psutil.Process(int(str(pid))).kill()
        if pids:
            eventually(lambda: is_lost(witness), what="the postmaster ends all sessions")
    eventually(lambda: answers(db))


def end_backends(db: Database) -> None:
    db.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where application_name like 'streamer%' and pid <> pg_backend_pid()"
    )


def is_lost(session: Connection) -> bool:
    try:
        session.execute("select 1")
    except psycopg.OperationalError:
        return True
    return False


def answers(db: Database) -> bool:
    try:
        return db.value("select 1") == 1
    except psycopg.OperationalError:  # the server recovers
        return False


FAULTS: dict[str, Callable[[Database], None]] = {
    "fast": restart("fast"),
    "ended": end_backends,
    "immediate": restart("immediate"),
    "killed": kill_backends,
}


def hit(case: Case, faults: list[tuple[str, str, str]]) -> None:
    """Run, writing; let a fault happen at each failpoint, a side's at a time; go on to the end."""
    armed = ",".join(f"{name}=stop" for name, _, _ in faults)
    with Process(case.config, environment={"STREAMER_FAILPOINTS": armed}, spark=False) as process:
        halted = psutil.Process(process.process.pid)
        for name, side, fault in faults:
            before = case.written
            while halted.status() != psutil.STATUS_STOPPED:
                assert not process.process.ends_within(0.1), process.output
                assert case.written < before + WRITES_MAX, f"{name} not reached\n{process.output}"
                case.write(1)
            FAULTS[fault](case.source if side == "source" else case.target)
            process.process.send_signal(signal.SIGCONT)
            case.write(5)
        caught_up(process, 90)
        case.assert_equal()
        case.assert_nothing_left()
        assert process.terminate() == 0, process.output


FIRST = [name for name in STEPS if name not in ONLY_LATER | {"sync.part_copied"}]
LATER = [name for name in STEPS if name not in ONLY_AT_FIRST | {"sync.part_copied"}]
SIDES = [(side, fault) for fault in FAULTS for side in ("source", "target")]
IN_FIRST = [(name, *how) for name, how in zip(FIRST, cycle(SIDES), strict=False)]
IN_LATER = [(name, *how) for name, how in zip(LATER, cycle(reversed(SIDES)), strict=False)]


@pytest.mark.parametrize("first", [0, 1])
async def test_in_a_first_copy_and_then_in_a_resync(case: Case, first: int) -> None:
    """The copy after a fault goes on for two steps, to the next fault."""
    await asyncio.to_thread(hit, case, IN_FIRST[first::2])
    case.ask_for_resync()
    await asyncio.to_thread(hit, case, IN_LATER[first::2])
