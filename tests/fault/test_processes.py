"""`processes: 2`: one command, two processes, one port."""

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from streamer.commands.embedded import free_port
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
    """Return the two processes, the first one first."""
    return sorted(process.children("plain_streamer"), key=lambda child: child.cmdline()[-1])


@contextmanager
def asked_all_the_time(port: int) -> Iterator[Counter[str]]:
    """Ask the port for the length of a block; yield the numbers of answers by kind."""
    stopping, answers = threading.Event(), Counter[str]()

    def ask() -> None:
        while not stopping.wait(0.02):
            try:
                answer = httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=SECONDS)
                answers[str(answer.status_code)] += 1
            except httpx.ConnectError:
                answers["refused"] += 1
            except httpx.TransportError:
                answers["cut"] += 1  # the process that had accepted it was killed

    thread = threading.Thread(target=ask, name="asks")
    thread.start()
    try:
        yield answers
    finally:
        stopping.set()
        thread.join()


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
            # WHEN the one that serves the port dies
            children(process)[0].kill()
            # THEN another one starts in its place, and nothing is lost or doubled
            eventually(are_shared, SECONDS, "not shared again")
            are_equal()
            # AND one scrape has the metrics of both
            metrics = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=SECONDS).text
            for number in (1, 2):
                assert f'streamer_queue_bytes{{replica="{number}",worker="0"}}' in metrics
            # WHEN the configuration loses a source THEN both processes let it go
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
    with Process(process.config, spark=False) as process:
        eventually(lambda: shares(process).total() == 2, SECONDS, "not streaming")
        # WHEN all are asked to stop THEN they end in order
        both = children(process)
        assert process.terminate() == 0
        assert not any(child.is_running() for child in both)
        assert process.output.count("process ended") == 0
