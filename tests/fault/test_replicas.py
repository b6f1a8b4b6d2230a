"""Several processes with the same configuration share the sources; any may die or freeze."""

import html
import signal
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from streamer.commands.demo.embedded_servers import free_port
from streamer.runtime.replicas.replica import CHECK_SECONDS, STABLE_SECONDS
from tests.support.postgres import Database, assert_same
from tests.support.process import Process, caught_up, command, is_frozen, report, status
from tests.support.runbooks import run_block
from tests.support.versions import NEXT, VARIABLE, next_tree, released_tree, version_of
from tests.support.waiting import eventually

SECONDS = 90.0
NAMES = ["a", "b", "c", "d", "e", "f"]


ALSO = ", joins: {type: append, initial: none}"


class Site:
    """Six sources with a table each, which has no key: a change that is applied twice is seen."""

    def __init__(self, directory: Path, source: Database, target: Database) -> None:
        self.directory = directory
        self.source = source
        self.target = target
        self.rows = 0
        for name in NAMES:
            source.execute(f"create table {name} (n int)")
            target.execute(f"create table {name} (n int)")
        self.url = source.url
        self.ports: dict[int, int] = {}
        self.also = ""
        self.group = ""

    def config(self, number: int) -> tuple[Path, int]:
        """Write the configuration of a process; return path and port."""
        (self.directory / str(number)).mkdir()
        self.ports[number] = free_port()
        return self._write_config(number), self.ports[number]

    def map_another_table(self) -> None:
        """Let the files of all processes map a further table of the last source."""
        for database in (self.source, self.target):
            database.execute("create table joins (n int)")
        self.also = ALSO
        for number in self.ports:
            self._write_config(number)

    def config_again(self, number: int) -> None:
        self._write_config(number)

    def _write_config(self, number: int) -> Path:
        directory = self.directory / str(number)
        sources = "".join(
            f"- {{database: {name}, urls: [{{url: '{self.url}'}}], {self.group}"
            f"tables: {{{name}: {{type: append, initial: none}}"
            f"{self.also if name == NAMES[-1] else ''}}}}}\n"
            for name in NAMES
        )
        path = directory / "config.yaml"
        path.write_text(
            f"target: {{url: '{self.target.url}'}}\nhttp: {{listen: '127.0.0.1:{self.ports[number]}'}}\n"
            f"workers: 2\nspool: {{directory: {directory / 'spool'}}}\nsources:\n{sources}"
        )
        return path

    def write(self) -> None:
        """Insert a row into each table."""
        self.rows += 1
        for name in NAMES:
            self.source.execute(f"insert into {name} values ({self.rows})")

    def are_equal(self, process: Process) -> None:
        """Every change arrives, once."""
        self.write()
        caught_up(process)
        for name in NAMES:
            assert_same(self.source, self.target, name)


def shares(process: Process) -> Counter[int]:
    """Return how many sources each process streams, by pid; a moving source does not count."""
    found = [each for each in status(process.config) if each["state"] == "streaming"]
    names = [str(each["process"]) for each in found if each["process"] is not None]
    return Counter(int(name.rpartition(":")[2]) for name in names)


def has_share(seen_by: Process, process: Process) -> None:
    pid = process.process.pid
    eventually(lambda: shares(seen_by)[pid], SECONDS, "no share")


def shared(
    *processes: Process,
    write: Callable[[], None] = lambda: None,
    limited: Process | None = None,
) -> None:
    """Wait until *processes* stream an even share each, and *limited* streams one source."""
    count = len(NAMES) - (limited is not None)
    wanted = [(count + each) // len(processes) for each in range(len(processes))]

    def are_even() -> bool:
        write()
        found = shares(processes[0])
        is_limited = limited is None or found.pop(limited.process.pid, 0) == 1
        pids = {process.process.pid for process in processes}
        return is_limited and found.keys() == pids and sorted(found.values()) == wanted

    output = processes[0].config.parent
    eventually(are_even, SECONDS, f"shared by {wanted}: see {output}")


@pytest.mark.timeout(600)
def test_replicas_share_sources_and_survive_the_death_and_the_freezing_of_one(
    tmp_path: Path, source: Database, target: Database
) -> None:
    site = Site(tmp_path, source, target)
    with ExitStack() as stack:

        def start(number: int, *options: str, **environment: str) -> tuple[Process, int]:
            config, port = site.config(number)
            process = Process(config, *options, spark=False, environment=environment)
            return stack.enter_context(process), port

        # GIVEN a process with all sources WHEN two more join THEN each has a share
        first, _ = start(1)
        shared(first)
        second, _ = start(2)
        third, port = start(3)
        shared(first, second, third, write=site.write)
        site.are_equal(first)
        # AND each process shows the whole fleet
        sees_fleet(third, port, [first, second, third])
        # WHEN a process is killed THEN the remaining processes take over its sources
        first.kill()
        shared(second, third, write=site.write)
        site.are_equal(second)
        # WHEN a process freezes with uncommitted rows in the target
        options = ("--max-sources", "1")
        frozen, _ = start(4, *options, STREAMER_FAILPOINTS="apply.before_commit=stop")
        has_share(second, frozen)
        site.write()
        eventually(lambda: is_frozen(frozen), SECONDS, "not frozen")
        # THEN the remaining processes take over, although the frozen process still has locks and
        # slots
        shared(second, third, write=site.write)
        site.are_equal(second)
        # AND its later commits do not count
        frozen.process.send_signal(signal.SIGCONT)
        shared(second, third, limited=frozen, write=site.write)
        site.are_equal(second)
        # WHEN all lose their locks at once THEN each goes on, and no change is lost or doubled
        target.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name like 'streamer lock %'"
        )
        shared(second, third, limited=frozen, write=site.write)
        site.are_equal(third)
        # WHEN a process shuts down cleanly THEN the remaining processes run its sources
        assert second.terminate() == 0
        shared(third, limited=frozen)
        site.are_equal(third)
        # WHEN a process reads the configuration again THEN its peer follows without a signal
        site.map_another_table()
        before = {each["mapping"] for each in report(third.config)["replicas"]}
        frozen.process.send_signal(signal.SIGHUP)
        eventually(lambda: have_another_mapping(third, before), SECONDS, "the same mapping")
        source.execute("insert into joins values (1)")
        site.are_equal(third)
        assert target.execute("select n from joins") == [(1,)]


@pytest.mark.timeout(300)
@pytest.mark.follows("runbooks:no-replica#1")
def test_sources_without_a_replica_are_named_and_another_process_takes_them(
    tmp_path: Path, source: Database, target: Database
) -> None:
    site = Site(tmp_path, source, target)
    config, port = site.config(1)
    with Process(config, "--max-sources", "1", spark=False) as limited:
        has_share(limited, limited)
        base = f"http://127.0.0.1:{port}"

        def waiting_sources() -> list[dict[str, str]]:
            reasons = httpx.get(f"{base}/readyz", timeout=30).json()["reasons"]
            waiting = [reason for reason in reasons if reason["state"] == "waiting"]
            return waiting if waiting == reasons else []  # the second source starts first

        waiting = eventually(waiting_sources, SECONDS, "ready but for sources without a replica")
        assert {reason["error_code"] for reason in waiting} == {"no_replica"}
        names = {reason["source"] for reason in waiting}
        assert len(names) == len(NAMES) - 1
        text = "no replica runs this source: each may have reached its --max-sources"
        assert {reason["error"].partition(";")[0] for reason in waiting} == {text}
        # Each screen says the same of these sources.
        for found in (httpx.get(f"{base}/api/status", timeout=30).json(), report(config)):
            rows = [row for row in found["sources"] if row["error_code"] == "no_replica"]
            assert {row["database"] for row in rows} == names
            shown = f"{text}; start another process with the same configuration, or raise"
            assert {row["state"] for row in rows} == {"waiting"}
            assert all(row["error"].startswith(shown) for row in rows)
        for screen in (
            httpx.get(f"{base}/", timeout=30).text,
            command(config, "status", "--problems").stdout,
            command(config, "doctor").stdout,
            command(config, "wait", "--timeout", "1").stderr,
            command(config, "tenants", "list").stdout,
        ):
            assert text in " ".join(html.unescape(screen).split())
            assert "stopped" not in screen
            assert "not started" not in screen
        shown = run_block(config, "no-replica#1")
        assert f":{limited.process.pid} runs 1 (--max-sources 1)" in shown
        with Process(site.config(2)[0], spark=False) as other:
            shared(other, limited=limited)
            site.are_equal(other)


@pytest.mark.timeout(300)
def test_a_replica_with_an_older_file_takes_no_source_until_an_operator_decides(
    tmp_path: Path, source: Database, target: Database
) -> None:
    """The old file lacks a table that the fleet streams, and would take the table out of the
    publication.
    """
    site = Site(tmp_path, source, target)
    with ExitStack() as stack:

        def start(number: int) -> Process:
            return stack.enter_context(Process(site.config(number)[0], spark=False))

        first = start(1)
        shared(first)
        site.map_another_table()
        first.process.send_signal(signal.SIGHUP)
        caught_up(first)
        # WHEN a process starts with the file of before
        site.also = ""
        late = start(2)
        pid = late.process.pid
        eventually(lambda: not newest(first).get(pid, True), SECONDS, "seen as outdated")
        # THEN the status names that process, and its peer streams all sources with all tables
        site.are_equal(first)
        assert newest(first) == {first.process.pid: True, pid: False}
        eventually(lambda: has_looked(target, pid), SECONDS, "the fleet has settled")
        assert shares(first) == {first.process.pid: len(NAMES)}
        source.execute("insert into joins values (1)")
        caught_up(first)
        assert target.execute("select n from joins") == [(1,)]
        # WHEN the file is corrected THEN the process gets a share without a signal
        site.also = ALSO
        site.config_again(2)
        shared(first, late, write=site.write)
        # WHEN an operator confirms a different mapping THEN all follow
        before = {each["mapping"] for each in report(first.config)["replicas"]}
        site.also = ""
        site.config_again(1)
        site.config_again(2)
        late.process.send_signal(signal.SIGHUP)
        eventually(lambda: have_another_mapping(first, before), SECONDS, "the same mapping")
        site.are_equal(late)


@pytest.mark.timeout(300)
def test_a_replica_leaves_sources_that_it_cannot_reach_to_another_one(
    tmp_path: Path, source: Database, target: Database
) -> None:
    site = Site(tmp_path, source, target)
    with ExitStack() as stack:

        def start(number: int, **environment: str) -> Process:
            config, _ = site.config(number)
            return stack.enter_context(Process(config, spark=False, environment=environment))

        # GIVEN a machine that reaches no source: libpq connects to a wrong address
        cut_off = start(1, PGHOSTADDR="127.0.0.99")
        eventually(lambda: is_held_by(cut_off, cut_off), SECONDS, "no source is taken")
        # WHEN a replica starts on a second machine THEN that replica streams all sources
        other = start(2)
        eventually(lambda: shares(other) == {other.process.pid: len(NAMES)}, SECONDS, "no share")
        site.are_equal(other)


@pytest.mark.timeout(300)
def test_replicas_of_two_versions_share_the_sources_during_an_upgrade(
    tmp_path: Path, source: Database, target: Database
) -> None:
    site = Site(tmp_path, source, target)
    released, following = released_tree(tmp_path / "released"), next_tree(tmp_path / "next")
    with ExitStack() as stack:

        def start(number: int, tree: Path) -> Process:
            config, _ = site.config(number)
            environment = {VARIABLE: str(tree)}
            process = Process(config, program="tests.support.versions", environment=environment)
            return stack.enter_context(process)

        # GIVEN a process of the released version
        old = start(1, released)
        shared(old)
        # WHEN a process of the next version migrates the bookkeeping, with changes in flight, THEN
        # each has a share
        new = start(2, following)
        shared(old, new, write=site.write)
        assert versions(new) == {old.process.pid: version_of(released), new.process.pid: NEXT}
        assert target.execute("select distinct taste from streamer.relation") == [("sweet",)]
        site.are_equal(new)
        # WHEN the process dies, and the released version starts on the bookkeeping of the next
        old.kill()
        shared(new, write=site.write)
        again = start(3, released)
        # THEN each has a share
        shared(again, new, write=site.write)
        site.are_equal(again)
        # WHEN the last process of the released version ends THEN the next version has all sources
        assert again.terminate() == 0
        shared(new, write=site.write)
        site.are_equal(new)


def versions(process: Process) -> dict[int, str]:
    """Return the version of each replica, by pid."""
    found = report(process.config)["replicas"]
    return {int(each["process"].rpartition(":")[2]): each["version"] for each in found}


def is_held_by(seen_by: Process, process: Process) -> bool:
    holders = {each["process"] for each in status(seen_by.config)}
    return holders == {f"{socket.gethostname()}:{process.process.pid}"}


def has_looked(target: Database, pid: int) -> bool:
    """Whether a replica has been in the fleet for longer than the time without moves."""
    name = f"{socket.gethostname()}:{pid}"
    looks = 3 * STABLE_SECONDS / CHECK_SECONDS
    return bool(
        target.execute(f"select from streamer.replica where name = '{name}' and beat > {looks}")
    )


def newest(process: Process) -> dict[int, bool]:
    """Return whether each replica has the newest mapping, by pid."""
    return {
        int(each["process"].rpartition(":")[2]): each["has_newest_mapping"]
        for each in report(process.config)["replicas"]
    }


def have_another_mapping(process: Process, before: set[str]) -> bool:
    """Whether both replicas run the same mapping, and not the mapping *before*."""
    found = report(process.config)["replicas"]
    now = {each["mapping"] for each in found}
    return len(now) == 1 and now != before and all(each["has_newest_mapping"] for each in found)


def sees_fleet(process: Process, port: int, all_of_them: list[Process]) -> None:
    """Status, readiness and metrics of *process* show the sources of all."""
    pids = sorted(str(each.process.pid) for each in all_of_them)
    replicas: list[dict[str, Any]] = report(process.config)["replicas"]
    assert sorted(each["process"].rpartition(":")[2] for each in replicas) == pids
    assert [each["sources"] for each in replicas] == [len(NAMES) // len(pids)] * len(pids)

    def is_ready() -> bool:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=30).status_code == 200

    eventually(is_ready, SECONDS, "readyz")

    def tells_all() -> bool:  # a process looks at the fleet every second
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
        return (
            f'streamer_fleet_sources{{state="streaming"}} {len(NAMES)}.0' in metrics
            and metrics.count("\nstreamer_replica_sources{") == len(pids)
            and metrics.count("\nstreamer_source_process{") == len(NAMES)
            # The details of a source come from the process that runs the source.
            and metrics.count("\nstreamer_source_state{") == 5 * len(NAMES) // len(pids)
        )

    eventually(tells_all, SECONDS, "metrics of the fleet")
    page = httpx.get(f"http://127.0.0.1:{port}/", timeout=30).text
    assert all(f":{pid}" in page for pid in pids)
