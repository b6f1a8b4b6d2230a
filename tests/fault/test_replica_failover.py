"""The source fails over while one of its two processes dies."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fault.test_replicas import NAMES, Site, shared
from tests.support.postgres import Database, assert_same, running, versions
from tests.support.process import Process
from tests.support.standby import OnEither, Standby, standby
from tests.support.waiting import eventually

SECONDS = 90.0


@pytest.fixture
def pair(tmp_path: Path, server_directory: Path) -> Iterator[tuple[OnEither, Standby]]:
    own = server_directory / tmp_path.name
    settings = {"synchronized_standby_slots": "standby"}
    with running(own / "first", versions()["18"], settings) as first:
        first.execute("create database shop")
        with standby(first, own / "second") as second:
            # The new primary has no standby to wait for.
            second.execute("alter system set synchronized_standby_slots = ''")
            second.execute("select pg_reload_conf()")
            yield OnEither(first, second, "shop"), second


@pytest.mark.timeout(400)
def test_a_replica_and_the_primary_of_its_sources_die_at_once(
    pair: tuple[OnEither, Standby], target: Database, tmp_path: Path
) -> None:
    source, second = pair
    site = Site(tmp_path, source, target)
    site.group = "failover: true, "
    with ExitStack() as stack:

        def start(number: int, **environment: str) -> Process:
            config, _ = site.config(number)
            process = Process(config, spark=False, environment=environment)
            return stack.enter_context(process)

        # GIVEN two processes, and slots that the standby has
        first = start(1)
        shared(first)
        site.are_equal(first)

        def are_synchronized() -> bool:
            source.execute("select pg_log_standby_snapshot()")
            site.write()
            return all(second.has_slot(f"streamer_{name}") for name in NAMES)

        eventually(are_synchronized, SECONDS, "the standby lacks slots")
        dying = start(2)
        shared(first, dying, write=site.write)
        # WHEN a process and the primary die together
        for _ in range(20):
            site.write()
        source.server.kill()
        dying.kill()
        second.promote()
        site.source = Database(second, "shop")
        for _ in range(20):
            site.write()
        # THEN the remaining process goes on with all sources
        shared(first, write=site.write)
        site.are_equal(first)
        # AND a new process joins
        third = start(3)
        shared(first, third, write=site.write)
        site.are_equal(third)
        for name in NAMES:
            assert_same(site.source, target, name)
        assert target.value("select count(*) from streamer.conflict") == 0
