"""``make fleet SOURCES=60 REPLICAS=3``: the life of a fleet.

It comes up in stages, and survives the death of each replica and a restart of each cluster. The run
shows a problem tenant on a screen of a browser, purges a tenant, and ends equal. With
``ARGS=--processes`` the replicas are processes of one `streamer run`. With ``ARGS=--spark`` Spark
makes the copies, and every twentieth tenant has a table of 200,000 rows.
"""

import argparse
import contextlib
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import psycopg
from playwright.sync_api import expect, sync_playwright

from streamer.commands.demo.embedded_servers import Server, free_port
from tests.support.chromium import launch
from tests.support.postgres import SETTINGS, Database, running, versions
from tests.support.process import Process, caught_up, command, report
from tests.support.streamer import write_config
from tests.support.waiting import eventually, polls

SECONDS: Final = 900.0
"""The deadline of each step; the machine may be slow."""
_BIG: Final = {"max_replication_slots": "150", "max_wal_senders": "150", "max_connections": "600"}
_DDL: Final = """
create table items (id int primary key, v text, n int);
create table log (id bigserial primary key, n bigint);
insert into items select g, 'first', 0 from generate_series(1, 200) g;
"""
_LARGE: Final = "insert into log (n) select g from generate_series(1, 200000) g"


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)  # noqa: T201


class Fleet:
    """The servers, the tenants and the replicas."""

    def __init__(
        self, directory: Path, clusters: list[Server], target: Server, given: argparse.Namespace
    ) -> None:
        sources: int = given.sources
        spark: bool = given.spark
        self.count: int = given.replicas
        self.is_one_command: bool = given.processes
        """Whether the replicas are processes of one `streamer run`."""
        self.directory = directory
        self.clusters = clusters
        self.spark = spark
        target.execute("create database dw")
        self.target = Database(target, "dw")
        self.tenants: dict[str, Database] = {}
        for number in range(1, sources + 1):
            sid, server = f"t{number:02}", clusters[number % len(clusters)]
            server.execute(f"create database {sid}")
            self.tenants[sid] = Database(server, sid)
            self.tenants[sid].execute(_DDL)
            if spark and number % 20 == 1:
                self.tenants[sid].execute(_LARGE)
        self.replicas: dict[int, Process] = {}
        self.ports: dict[int, int] = {}

    # ---- replicas ------------------------------------------------------------------------------

    def configure(self, number: int) -> Path:
        """Write the configuration of a replica: the same sources, its own port and spool."""
        directory = self.directory / f"replica-{number}"
        directory.mkdir(exist_ok=True)
        port = self.ports.setdefault(number, free_port())
        (sid, first), *others = self.tenants.items()
        path = directory / "config.yaml"
        processes = self.count if self.is_one_command else 1
        settings = f"processes: {processes}\nworkers: 2\nsync: {{sources_at_once: 2, jobs: 2}}"
        tables = "items:\nlog: {type: append}"
        write_config(
            *(path, first, self.target, tables), settings=settings, sid=sid, others=dict(others),
            port=port,
        )  # fmt: skip
        return path

    def start(self, number: int) -> None:
        self.replicas[number] = Process(self.configure(number), spark=self.spark)

    def end(self) -> None:
        for process in self.replicas.values():
            process.__exit__()

    def pids(self) -> list[int]:
        """Return the replicas that live."""
        if not self.is_one_command:
            return [each.process.pid for each in self.replicas.values()]
        return [each.pid for each in self.any.children("--process ")]

    @property
    def any(self) -> Process:
        return next(iter(self.replicas.values()))

    def report(self) -> dict[str, Any]:
        return report(self.any.config)

    def are_shared(self) -> bool:
        """Whether all sources stream, with an even share for each replica."""
        sources = self.report()["sources"]
        if any(each["state"] != "streaming" for each in sources):
            return False
        loads = Counter(each["process"] for each in sources)
        counts = [
            sum(n for name, n in loads.items() if str(name).endswith(f":{pid}"))
            for pid in self.pids()
        ]
        return sum(counts) == len(sources) and max(counts) - min(counts) <= 1

    def wait_until_shared(self, what: str) -> None:
        began = time.monotonic()
        eventually(self.are_shared, SECONDS, what)
        _say(f"{what}: all stream, evenly shared, after {time.monotonic() - began:.1f} s")


@contextlib.contextmanager
def workload(fleet: Fleet, left_out: set[str]) -> Iterator[Counter[str]]:
    """Change rows of random tenants during a block; yield the number of commits."""
    stopping, done, chance = threading.Event(), Counter[str](), random.Random(1)

    def work() -> None:
        while not stopping.wait(0.02):
            sid = chance.choice([each for each in fleet.tenants if each not in left_out])
            number = chance.randrange(1, 400)
            try:
                fleet.tenants[sid].execute(
                    f"begin; insert into items values ({number}, 'x', 1) on conflict (id)"
                    f" do update set n = items.n + 1; delete from items where id = {number // 7};"
                    f" insert into log (n) values ({number}); commit"
                )
                done[sid] += 1
            except psycopg.OperationalError:
                continue  # its cluster restarts

    thread = threading.Thread(target=work, name="workload")
    thread.start()
    try:
        yield done
    finally:
        stopping.set()
        thread.join()


# ---- the steps ---------------------------------------------------------------------------------


def come_up(fleet: Fleet, count: int) -> None:
    """All copies end, with no more at a time than the replicas may make together."""
    for number in range(1, 2 if fleet.is_one_command else count + 1):
        fleet.start(number)
    most = 0
    for _ in polls(SECONDS, every=0.5):
        sources = fleet.report()["sources"]
        copying = {
            each["sid"]
            for each in sources
            for table in each["tables"]
            if table["state"] in ("copying", "catching_up")
        }
        most = max(most, len(copying))
        if all(
            each["state"] == "streaming"
            and each["tables"]
            and all(table["state"] == "ready" for table in each["tables"])
            for each in sources
        ):
            break
    else:
        raise AssertionError(fleet.any.output)
    assert most <= 2 * count, f"{most} sources copied at a time"
    _say(f"all copied; at most {most} sources at a time")


def is_replaced(fleet: Fleet, pid: int) -> bool:
    pids = fleet.pids()
    return pid not in pids and len(pids) == fleet.count


def kill_each(fleet: Fleet) -> None:
    if fleet.is_one_command:
        for number, pid in enumerate(fleet.pids(), 1):
            psutil.Process(pid).kill()
            eventually(partial(is_replaced, fleet, pid), SECONDS, "a process is missing")
            fleet.wait_until_shared(f"process {number} was killed and started again")
        return
    for number in list(fleet.replicas):
        process = fleet.replicas.pop(number)
        process.kill()
        fleet.wait_until_shared(f"replica {number} was killed")
        fleet.start(number)
        fleet.wait_until_shared(f"replica {number} is back")


def restart_each(fleet: Fleet) -> None:
    for server in [*fleet.clusters, fleet.target.server]:
        server.stop("fast")
        server.start()
        fleet.wait_until_shared(f"the server on port {server.port} was restarted")


def show_a_problem(fleet: Fleet, sid: str) -> None:
    """The target refuses a row of a tenant: a line of the status and a problem."""
    fleet.target.execute(f"alter table items add check (sid <> '{sid}' or v <> 'refused')")
    fleet.tenants[sid].execute("insert into items values (1000, 'refused', 0)")

    def lines() -> list[str]:
        return command(fleet.any.config, "status", "--problems").stdout.splitlines()

    count = len(fleet.tenants)
    wanted = f"{count - 1} of {count} sources are fine; 1 needs attention: shop:{sid}"
    eventually(lambda: any(line.endswith(wanted) for line in lines()), SECONDS, wanted)
    _say(wanted)
    for number, port in fleet.ports.items():
        address = f"http://127.0.0.1:{port}/readyz"

        def names_it(address: str = address) -> bool:
            """Sources may still begin again after the restart of the target."""
            reasons = httpx.get(address, timeout=60).json()["reasons"]
            return {reason.get("source") for reason in reasons} == {f"shop:{sid}"}

        eventually(names_it, SECONDS, f"replica {number} names {sid} alone")
        look_at_page(f"http://127.0.0.1:{port}/", f"shop:{sid}", count)
    fleet.target.execute("alter table items drop constraint items_check")
    healed = command(fleet.any.config, "resume", "items", "--database", "shop", "--sid", sid)
    assert healed.returncode == 0, healed.stderr
    fleet.wait_until_shared(f"{sid} was healed")


def look_at_page(address: str, label: str, count: int) -> None:
    """The problem stands on the first screen of the page, before the tenants that are fine."""
    with sync_playwright() as playwright:
        browser = launch(playwright.chromium)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(f"{address}?view=wall")
        row = page.locator("#wall-rows tr[id^=line]").first
        expect(row).to_have_attribute("id", f"line/{label}", timeout=60_000)
        expect(row.locator(".problem.bad")).to_be_in_viewport()
        expect(row.get_by_role("link", name="Runbook")).to_be_in_viewport()
        expect(page.get_by_role("link", name="in trouble 1")).to_be_in_viewport()
        expect(page.get_by_role("link", name=f"fine {count - 1}")).to_be_in_viewport()
        browser.close()
    _say(f"the page at {address} shows {label} first")


def show_histories(fleet: Fleet) -> None:
    """The page of each replica has the history of every source, whichever replicas ran it."""
    for port in fleet.ports.values():
        address = f"http://127.0.0.1:{port}/api/sources/history?database=shop&sid="
        with httpx.Client(timeout=60) as client:

            def have_all(client: httpx.Client = client, address: str = address) -> bool:
                answers = [client.get(f"{address}{sid}").json() for sid in fleet.tenants]
                assert all(each["times"] == sorted(set(each["times"])) for each in answers)
                return all(set(each["changes_per_second"]) - {None} for each in answers)

            eventually(have_all, SECONDS, f"history at {address}")
    _say(f"each page has the history of {len(fleet.tenants)} sources")


def purge(fleet: Fleet, sid: str) -> None:
    database = fleet.tenants.pop(sid)
    for number, process in fleet.replicas.items():
        fleet.configure(number)
        process.process.send_signal(signal.SIGHUP)
    rows = f"select count(*) from streamer.source where sid = '{sid}'"
    eventually(lambda: fleet.target.value(rows) == 0, SECONDS, f"{sid} is forgotten")
    purged = command(fleet.any.config, "tenants", "purge", "shop", "--sid", sid, "--yes")
    assert purged.returncode == 0, purged.stderr
    left = fleet.target.value(f"select count(*) from items where sid = '{sid}'")
    slots = f"select count(*) from pg_replication_slots where database = '{database.name}'"
    assert (left, database.value(slots)) == (0, 0)
    _say(f"{sid} was purged")


def are_equal(fleet: Fleet) -> None:
    caught_up(fleet.any, SECONDS)
    compared = command(fleet.any.config, "compare", seconds=SECONDS)
    assert compared.returncode == 0, f"{compared.stdout[-3000:]}{compared.stderr}"
    _say("streamer compare: equal")


def run(given: argparse.Namespace, directory: Path) -> None:
    with contextlib.ExitStack() as stack:

        def server(name: str, version: str) -> Server:
            return stack.enter_context(
                running(directory / name, versions()[version], SETTINGS | _BIG)
            )

        clusters = [server("one", "18"), server("two", "16")]
        target = server("target", "18")
        fleet = Fleet(directory, clusters, target, given)
        stack.callback(fleet.end)
        _say(f"{given.sources} sources on two clusters, {given.replicas} replicas")
        come_up(fleet, given.replicas)
        fleet.wait_until_shared("after the copies")
        problem, leaving = min(fleet.tenants), max(fleet.tenants)
        steps: list[Callable[[], None]] = [
            lambda: kill_each(fleet),
            lambda: restart_each(fleet),
        ]
        with workload(fleet, {leaving}) as done:
            for step in steps:
                step()
            show_a_problem(fleet, problem)
            show_histories(fleet)
            purge(fleet, leaving)
        _say(f"{done.total()} transactions of {len(done)} tenants meanwhile")
        are_equal(fleet)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fleet", description=__doc__)
    parser.add_argument("--sources", type=int, default=60)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--spark", action="store_true", help="copy with Spark, not with threads")
    parser.add_argument(
        "--processes", action="store_true", help="replicas under one `streamer run`"
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stop the servers on the way out
    directory = Path(tempfile.mkdtemp(prefix="streamer-fleet-"))
    directory.chmod(0o755)
    began = time.monotonic()
    run(given, directory)
    shutil.rmtree(directory, ignore_errors=True)  # kept for the search for the cause of a failure
    _say(f"done in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
