"""Mishaps, staged on real servers: what an operator sees, and that what it says helps.

Each test stages one mishap, waits until status, readiness and page show its cause and a remedy, runs
that remedy as it was printed, and compares the rows.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from streamer.commands.embedded import Server
from tests.support.mishap import Site, eventually, make_site
from tests.support.postgres import Database, running, versions
from tests.support.proxy import Proxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

DDL = "create table t (id int primary key, v text)"
RESYNC = r"streamer resync '\*\.\*' --database shop"


@pytest.fixture
def site(tmp_path: Path, source: Database, target: Database) -> Site:
    source.execute(f"{DDL}; insert into t values (1, 'before')")
    return make_site(tmp_path, source, target)


def drop_slot(source: Database) -> None:
    source.execute(
        "select pg_terminate_backend(active_pid) from pg_replication_slots"
        " where slot_name = 'streamer_shop' and active"
    )
    gone = "select 1 from pg_replication_slots where slot_name = 'streamer_shop'"

    def is_gone() -> bool:
        try:
            source.execute("select pg_drop_replication_slot('streamer_shop')")
        except psycopg.errors.ObjectInUse:  # the program came back first
            source.execute(
                "select pg_terminate_backend(active_pid) from pg_replication_slots where active"
                " and slot_name = 'streamer_shop'"
            )
        return not source.execute(gone)

    eventually(is_gone)


def test_01_slot_dropped(site: Site) -> None:
    with site.running():
        drop_slot(site.source)
        site.source.execute("insert into t values (2, 'missed')")
        remedy = site.sees('replication slot "streamer_shop" is gone', RESYNC)
        site.run(remedy)
        site.is_mended()


@contextmanager
def pair_of_servers(directory: Path, settings: dict[str, str]) -> Iterator[tuple[Server, Server]]:
    binaries = versions()[os.environ.get("TEST_POSTGRES", "18")]
    with (
        running(directory / "source", binaries, settings) as source,
        running(directory / "target", binaries) as target,
    ):
        source.execute("create database shop")
        target.execute("create database dw")
        yield source, target


def test_02_slot_invalidated(tmp_path: Path, server_directory: Path) -> None:
    settings = {"max_slot_wal_keep_size": "32MB", "max_wal_size": "64MB"}
    with pair_of_servers(server_directory / "invalidated", settings) as (
        source_server,
        target_server,
    ):
        source, target = Database(source_server, "shop"), Database(target_server, "dw")
        source.execute(DDL)
        site = make_site(tmp_path, source, target)
        with site.running():
            pass
        lost = "select wal_status = 'lost' from pg_replication_slots"
        write = "insert into t select coalesce(max(id), 0) + 1, 'x' from t; select pg_switch_wal(); checkpoint"
        eventually(lambda: source.execute(write) is None or source.value(lost), 60)
        with site.running(until_ready=False):
            site.run(site.sees("wal_removed|invalidated|can no longer", RESYNC))
            site.is_mended()


def test_03_target_down(site: Site, target_proxy: Proxy) -> None:
    site = make_site(site.config.parent, site.source, site.target)
    with site.running():
        target_proxy.leave()
        site.source.execute("insert into t values (2, 'meanwhile')")
        site.sees("unreachable", "pg_isready -h 127.0.0.1 -p [0-9]+")
        target_proxy.heal()
        site.is_mended()


def test_09_password_rotated(site: Site, tmp_path: Path) -> None:
    server, role = site.source.server, f"app_{os.getpid()}"
    hba = server.data / "pg_hba.conf"
    before = hba.read_text()
    site.source.execute(f"create role {role} superuser login password 'first'")
    try:
        hba.write_text(f"host all,replication {role} all scram-sha-256\n{before}")
        server.reload()
        site.source.url_user = f"{role}:first"
        site = make_site(tmp_path, site.source, site.target)
        with site.running():
            site.source.execute(
                f"alter role {role} password 'second';"
                f"select pg_terminate_backend(pid) from pg_stat_activity where usename = '{role}'"
            )
            site.sees("password authentication failed", "check role, password")
            site.config.write_text(site.config.read_text().replace(":first@", ":second@"))
            site.source.execute("insert into t values (2, 'meanwhile')")
            site.process.process.send_signal(signal.SIGHUP)
            site.is_mended()
            assert "second@" not in site.process.output
    finally:
        hba.write_text(before)
        server.reload()
        site.source.execute(f"drop owned by {role}; drop role {role}")


def test_10_killed(site: Site) -> None:
    with site.running():
        site.process.kill()
        site.source.execute("insert into t values (2, 'meanwhile')")
        site.sees("stopped", "streamer run", in_views=("status",))
        assert site.get("/readyz") is None
    with site.running():
        site.is_mended()


@pytest.mark.parametrize("side", ["source", "target"])
def test_12_black_hole(site: Site, side: str) -> None:
    it = site.source if side == "source" else site.target
    with Proxy(it.server) as proxy:
        it.port, it.parameters = proxy.port, "connect_timeout=3"
        site = make_site(site.config.parent, site.source, site.target)
        with site.running():
            proxy.blackhole()
            site.source.execute("insert into t values (2, 'meanwhile')")
            site.sees("no answer|timed out|timeout", "pg_isready -h 127.0.0.1")
            proxy.heal()
            site.is_mended()


def test_14_second_instance(site: Site, tmp_path: Path) -> None:
    with site.running():
        directory = tmp_path / "second"
        directory.mkdir()
        second = make_site(directory, site.source, site.target)
        with second.running(until_ready=False):
            pid = site.process.process.pid
            second.sees(f"held by .*{pid}|another process", str(pid), in_views=("readyz", "page"))
            # The process that is named ends; the other one takes over.
            assert site.process.terminate() == 0
            second.source.execute("insert into t values (2, 'taken over')")
            second.is_mended()
