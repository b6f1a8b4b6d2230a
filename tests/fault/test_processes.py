"""`processes: 2`: one command, two processes, one port."""

import asyncio
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.minutes import Minute, add_minutes, read_minutes
from streamer.commands.demo.embedded_servers import free_port
from streamer.postgres.secret import Secret
from streamer.runtime.child_processes.child_process import process_directory
from streamer.source.journal.journal_files import Journal, directory_of
from streamer.source.journal.journal_records import JournalIdentity
from streamer.source.timeline_branches import Branch
from streamer.target.connection import TargetAddress
from streamer.util.lsn import Lsn
from tests.fault.test_replicas import shares
from tests.support.postgres import Database, assert_same
from tests.support.process import Process, caught_up
from tests.support.waiting import eventually

SECONDS = 90.0
NAMES = ["a", "b", "c"]


def configure(directory: Path, source: Database, target: Database, port: int) -> Path:
    sources = "".join(
        f"- {{database: {name}, urls: [{{url: '{source.url}'}}],"
        f" tables: {{{name}: {{type: append, initial: none}}}}}}\n"
        for name in NAMES
    )
    path = directory / "config.yaml"
    path.write_text(
        f"target: {{url: '{target.url}'}}\nhttp: {{listen: '127.0.0.1:{port}'}}\n"
        f"processes: 2\nworkers: 1\nspool: {{directory: {directory / 'spool'}}}\n"
        f"sources:\n{sources}"
    )
    return path


def children(process: Process) -> list[psutil.Process]:
    """Return the two processes in order."""
    return sorted(process.children("plain_streamer"), key=lambda child: child.cmdline()[-1])


@contextmanager
def asked_all_the_time(port: int) -> Iterator[Counter[str]]:
    """Ask the port during a block; yield the numbers of answers by kind."""
    stopping, answers = threading.Event(), Counter[str]()

    def ask() -> None:
        while not stopping.wait(0.05):
            try:
                answer = httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=SECONDS)
                answers[str(answer.status_code)] += 1
            except httpx.ConnectError:
                answers["refused"] += 1
            except httpx.TransportError:
                answers["cut"] += 1  # the process behind the connection was killed

    thread = threading.Thread(target=ask, name="asks")
    thread.start()
    try:
        yield answers
    finally:
        stopping.set()
        thread.join()


def store_minutes(target: Database) -> tuple[int, float, float, float]:
    """Store a minute of each source as two processes do; return time and summary."""
    at = int(time.time()) // 60 * 60 - 600

    async def store() -> None:
        bookkeeping = Bookkeeping(TargetAddress.parse(Secret(target.url)))
        try:
            for values in ((1.0, 2.0, None), (3.0, 4.0, 5.0)):
                minutes = [Minute(at, name, values) for name in [*NAMES, "unknown"]]
                # A process whose clock was set back stores a minute twice.
                await add_minutes(bookkeeping, 2 * minutes, 86400)
            found = await read_minutes(bookkeeping, at, at + 60)
            assert {minute.source for minute in found} == set(NAMES[:2])
        finally:
            await bookkeeping.close()

    target.execute("insert into streamer.minute select now() - interval '1 day 1 minute', 1")
    asyncio.run(store())
    assert (
        target.value("select count(*) from streamer.minute where at < now() - interval '1 day'")
        == 0
    )
    return at, 3.0, 3.0, 5.0


def leave_journals(spool: Path, source: Database, target: Database) -> None:
    """Make a journal in *spool* for each source, which begins at the position of the slot."""
    rows = target.execute("select slot, system_identifier from streamer.source")
    assert len(rows) == 2
    for slot, system_identifier in rows:
        lsn = source.value(
            f"select confirmed_flush_lsn from pg_replication_slots where slot_name = '{slot}'"
        )
        identity = JournalIdentity(str(system_identifier), str(slot))
        Journal.create(
            directory_of(spool, str(slot)), identity, Lsn.parse(str(lsn)), Branch(1)
        ).close()
    for name in NAMES[:2]:
        source.execute(f"insert into {name} values (0)")


def history(port: int, name: str) -> tuple[float, ...] | None:
    """Return the first known moment of a source, as shown by the process that answers."""
    answer = httpx.get(
        f"http://127.0.0.1:{port}/api/sources/history?database={name}", timeout=SECONDS
    ).json()
    fields = ("times", "lag_seconds", "changes_per_second", "retained_wal_bytes")
    return next(zip(*(answer[field] for field in fields), strict=True), None)


@pytest.mark.timeout(400)
def test_two_processes_share_the_sources_and_one_port_survives_the_death_of_its_process(
    tmp_path: Path, source: Database, target: Database
) -> None:
    for name in NAMES:
        for each in (source, target):
            each.execute(f"create table {name} (n int)")
    port = free_port()
    rows = 0

    def are_shared() -> bool:
        loads = shares(process)
        alive = {child.pid for child in children(process)}
        return len(alive) == 2 and loads.keys() == alive and loads.total() == len(NAMES)

    def are_equal() -> None:
        nonlocal rows
        rows += 1
        for name in NAMES:
            source.execute(f"insert into {name} values ({rows})")
        caught_up(process)
        for name in NAMES:
            assert_same(source, target, name)

    with Process(configure(tmp_path, source, target, port), spark=False) as process:
        # GIVEN two processes that share three sources
        eventually(are_shared, SECONDS, "not shared")
        are_equal()
        with asked_all_the_time(port) as answers:
            # WHEN the process that serves the port dies
            children(process)[0].kill()
            # THEN a new process starts in its place, and no change is lost or doubled
            eventually(are_shared, SECONDS, "not shared again")
            are_equal()

            # AND a scrape has the metrics of both
            def scrape_has_both() -> bool:
                metrics = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=SECONDS).text
                return all(
                    f'streamer_queue_bytes{{replica="{number}",worker="0"}}' in metrics
                    for number in (1, 2)
                )

            eventually(scrape_has_both, SECONDS, "no scrape has the metrics of both")
            # WHEN the configuration loses a source THEN both processes release the source
            path = process.config
            path.write_text(path.read_text().rpartition("- {database: c")[0])
            process.process.send_signal(signal.SIGHUP)
            left = "select count(*) from streamer.source"
            eventually(lambda: target.value(left) == 2, SECONDS, "c is still there")
        # AND the port took every connection
        assert answers["refused"] == 0
        assert answers["200"] > 0
        assert answers["cut"] <= 1
        # WHEN the parent is killed THEN the processes end
        orphans = children(process)
        process.kill()
        assert psutil.wait_procs(orphans, SECONDS)[1] == []
    # GIVEN minutes that earlier processes have stored, a minute by two processes
    stored = store_minutes(target)
    # AND journals of a process that no longer starts
    spool = tmp_path / "spool"
    leave_journals(process_directory(spool, 3), source, target)
    with Process(process.config, spark=False) as process:
        eventually(lambda: shares(process).total() == 2, SECONDS, "not streaming")
        # THEN the process that answers shows the history of the sources of both processes
        wanted = [stored, stored]
        eventually(
            lambda: [history(port, name) for name in NAMES[:2]] == wanted, SECONDS, "no history"
        )
        # AND a process reads the journals to the end, and removes the journals
        caught_up(process)
        eventually(lambda: not [*spool.rglob("*.journal")], SECONDS, "the journals are still there")
        assert not process_directory(spool, 3).exists()
        eventually(lambda: shares(process).total() == 2, SECONDS, "not streaming again")
        for name in NAMES[:2]:
            assert_same(source, target, name)
        # WHEN all have to stop THEN all shut down cleanly
        both = children(process)
        assert process.terminate() == 0
        assert not any(child.is_running() for child in both)
        assert process.output.count("process ended") == 0
