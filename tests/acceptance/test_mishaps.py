"""Mishaps, staged on real servers: an operator's views of each, and proof that their
remedies work.

Each test stages a mishap, and waits until status, doctor, readiness and page show the cause and a
remedy in the same words. It then runs that remedy literally, and compares the rows.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tests.support.clusters import CopiedServer
from tests.support.forks import ForkedProcess
from tests.support.mishap import BY_READER, Site, eventually, make_admin_site, make_site
from tests.support.postgres import Database, ordinary_role, running, versions
from tests.support.process import caught_up, command
from tests.support.proxy import Proxy
from tests.support.runbooks import block, run_block

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

DDL = "create table t (id int primary key, v text)"
SAVE = "streamer export > backup.yaml"
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


WITHOUT_SID = {"--sid eu": ""}


@pytest.mark.follows("runtime.guards.slot_check:SlotCheck._resync_hint")
@pytest.mark.follows("runbooks:slot-lost#1")
@pytest.mark.follows("runbooks:slot-lost#2")
def test_01_slot_dropped(site: Site) -> None:
    with site.running():
        drop_slot(site.source)
        site.source.execute("insert into t values (2, 'missed')")
        gone = 'replication slot "streamer_shop" is gone'
        remedy = site.sees(gone, RESYNC, runbook="slot-lost")
        assert remedy == block("slot-lost#1", WITHOUT_SID).strip()
        run_block(site.config, "slot-lost#1", WITHOUT_SID)
        shows(site, block("slot-lost#2", WITHOUT_SID), "shop: streaming")
        site.is_mended()
        site.source.execute("insert into t values (3, 'after')")
        site.is_mended()


def shows(site: Site, line: str, pattern: str) -> None:
    """Run a command that an operator has to interrupt, until its output shows *pattern*."""
    _, *arguments = shlex.split(line)
    out = site.config.with_name("shown")
    out.touch()
    process = ForkedProcess(
        "streamer",
        ["--config", str(site.config), *arguments],
        environment=dict(os.environ),
        stdout=out,
        stderr=out,
    )
    try:
        eventually(lambda: re.search(pattern, out.read_text()), 60)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()


@contextmanager
def own_server(
    directory: Path, settings: dict[str, str]
) -> Iterator[tuple[CopiedServer, Database]]:
    """Make a database on a server that a test maltreats."""
    binaries = versions()[os.environ.get("TEST_POSTGRES", "18")]
    with running(directory, binaries, settings) as server:
        server.execute("create database shop")
        yield server, Database(server, "shop")


@pytest.mark.follows("runtime.guards.slot_check:SlotCheck._resync_hint")
def test_02_slot_invalidated(tmp_path: Path, target: Database, server_directory: Path) -> None:
    settings = {"max_slot_wal_keep_size": "32MB", "max_wal_size": "64MB"}
    with own_server(server_directory / tmp_path.name, settings) as (_, source):
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


@pytest.mark.follows("runbooks:target-away#1")
def test_03_target_down(site: Site, target_proxy: Proxy) -> None:
    site = make_site(site.config.parent, site.source, site.target)
    with site.running():
        target_proxy.leave()
        site.source.execute("insert into t values (2, 'meanwhile')")
        probe = "pg_isready -h 127.0.0.1 -p [0-9]+"
        site.sees("server closed the connection", probe, runbook="target-away")
        assert "unreachable" in run_block(site.config, "target-away#1", code=3)
        target_proxy.heal()
        site.is_mended()


@pytest.mark.follows("apply.write.rejection_advice:_run_at_target")
@pytest.mark.follows("runbooks:table-in-error#1")
@pytest.mark.follows("runbooks:table-in-error#2")
def test_04_refused_row(site: Site) -> None:
    site.target.execute("create table t (id int primary key, v varchar(6))")
    with site.running():
        site.source.execute("insert into t values (2, 'far too long')")
        alter = r"alter table [^;\n]* alter column \"v\" type [^;\n]*"
        remedy = site.sees("value too long", alter, runbook="table-in-error")
        diagnosis = run_block(site.config, "table-in-error#1", code=1)
        assert remedy in diagnosis
        assert f"Read: {site.base}/help/runbooks/table-in-error" in diagnosis
        stored = site.target.execute("select state, error_code from streamer.relation")
        assert stored == [("error", "value")]
        site.target.execute(remedy)
        run_block(site.config, "table-in-error#2", {"orders": "t"})
        site.is_mended()


@pytest.mark.follows("postgres.blocking_sessions:Blockers.wait_for")
@pytest.mark.follows("runbooks:source-lags#1")
def test_05_locked_table(site: Site) -> None:
    url = site.target.server.url(site.target.name)
    with site.running(), contextlib.closing(psycopg.connect(url)) as other:
        other.execute("lock table t in access exclusive mode")
        site.source.execute("insert into t values (2, 'waits')")
        pid = other.info.backend_pid
        remedy = site.sees(f"pid {pid}", rf"select pg_terminate_backend\({pid}\)")
        assert f"pid {pid}" in run_block(site.config, "source-lags#1")
        row = re.search(r'<tr [^>]*id="table/shop/public\.t".*?</tr>', site.view("page"), re.DOTALL)
        assert row is not None
        assert '<span class="state warning">waiting</span>' in row[0]
        site.target.execute(remedy)
        site.is_mended()
        # The button on the page does the same.
        with contextlib.closing(psycopg.connect(url)) as other:
            other.execute("lock table t in access exclusive mode")
            site.source.execute("insert into t values (3, 'waits')")
            site.sees(f"pid {other.info.backend_pid}", "", in_views=("readyz", "page"))
            site.press(f"End session {other.info.backend_pid}")
            site.is_mended()


def test_06_ddl_first_of_four_kinds(site: Site) -> None:
    kinds = {
        "added": "alter table added add column w int default 7",
        "renamed": "alter table renamed rename column v to w",
        "retyped": "alter table retyped alter column id type bigint",
        "dropped": "alter table dropped drop column v",
    }
    site.source.execute(
        ";".join(f"create table {name} (id int primary key, v text)" for name in kinds)
    )
    site.target.execute("create table dropped (id int primary key, v text not null)")
    site = make_site(
        site.config.parent, site.source, site.target, "\n".join(f"{name}:" for name in kinds)
    )
    with site.running():
        for name, ddl in kinds.items():
            site.source.execute(f"insert into {name} values (1, 'before'); {ddl}")
            big = 2**40 if name == "retyped" else 2
            site.source.execute(f"insert into {name} (id) values ({big})")
        causes = {
            "added": 'no column "w"',
            "renamed": 'no column "w"',
            "retyped": "out of range",
            "dropped": 'null value in column "v"|"v" of target table',
        }
        remedies = {
            name: site.sees(cause, rf'alter table "public"\."{name}" [^;\n]*')
            for name, cause in causes.items()
        }
        # A check of the definitions, and doctor with it, knows the same remedies.
        advice = command(site.config, "doctor").stdout
        for name in ("added", "renamed", "dropped"):
            assert remedies[name] in advice, advice
        for remedy in remedies.values():
            site.target.execute(remedy)
        site.is_mended("added", "renamed", "retyped")
        rows = "select id from dropped order by id"
        assert site.source.execute(rows) == site.target.execute(rows)
        assert site.target.execute("select v from dropped order by id") == [("before",), (None,)]


@pytest.mark.follows("runbooks:restored#1")
def test_07_target_restored(tmp_path: Path, source: Database, server_directory: Path) -> None:
    source.execute(f"{DDL}; insert into t values (1, 'before')")
    with own_server(server_directory / tmp_path.name, {}) as (server, target):
        site = make_site(tmp_path, source, target)
        with site.running():
            pass
        kept = server.keep()
        with site.running():
            source.execute("insert into t values (2, 'after the backup')")
            caught_up(site.process)
            # The target is restored, and comes back within seconds.
            server.restore(kept)
            remedy = site.sees("restored to an earlier time", RESYNC)
            source.execute("insert into t values (3, 'after a hole')")
            assert target.execute("select id from t") == [(1,)]
            assert site.process.process.poll() is None
            assert remedy == block("restored#1", WITHOUT_SID).strip()
            run_block(site.config, "restored#1", WITHOUT_SID)
            site.is_mended()


@pytest.mark.follows("runbooks:table-in-error#3")
def test_08_writes_elsewhere(site: Site) -> None:
    with site.running():
        site.target.execute("insert into t values (2, 'not from the source')")
        site.source.execute("insert into t values (2, 'from the source')")
        site.sees(r"id\)?=\(?2|duplicate key", "streamer resync public.t --database shop")
        run_block(site.config, "table-in-error#3", {"orders": "t"})
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
            site.sees("password authentication failed", r"sources\[0\]", alike=BY_READER)
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
        remedy = site.sees(
            "stopped|no process reads", "streamer run", in_views=("status", "doctor")
        )
        # The page and readiness end with the process: a probe gets no answer.
        assert site.get("/readyz") is None
        assert site.get("/") is None
    assert remedy == "streamer run"
    with site.running():
        site.is_mended()
        site.sees("streaming", "", in_views=("status",))
        site.sees("1 source streams", "", in_views=("page",))


@pytest.mark.follows("runtime.guards.reconcile:_resync_command")
@pytest.mark.follows("runbooks:table-gone#2")
def test_11_table_removed_from_the_publication(site: Site) -> None:
    site.source.execute("create table other (id int primary key)")
    site = make_site(site.config.parent, site.source, site.target, "t:\nother:")
    with site.running():
        site.source.execute("alter publication streamer_shop drop table t")
        site.source.execute("insert into t values (2, 'missed'); insert into other values (1)")
        resync = r"streamer resync \S+ --database shop"
        remedy = site.sees("publication", resync, runbook="table-gone")
        assert remedy == block("table-gone#2", {"orders": "public.t"}).strip()
        run_block(site.config, "table-gone#2", {"orders": "t"})
        site.is_mended("t", "other")


@pytest.mark.parametrize("side", ["source", "target"])
def test_12_black_hole(site: Site, side: str) -> None:
    it = site.source if side == "source" else site.target
    with Proxy(it.server) as proxy:
        it.port, it.parameters = proxy.port, "connect_timeout=3"
        site = make_site(site.config.parent, site.source, site.target)
        with site.running():
            proxy.blackhole()
            site.source.execute("insert into t values (2, 'meanwhile')")
            cause, probe = "no answer|timed out|timeout", "pg_isready -h 127.0.0.1"
            # A session is dead after silence of 15 s and a probe without an answer.
            site.sees(cause, probe, alike=BY_READER, seconds=45)
            proxy.heal()
            site.is_mended()


@pytest.mark.follows("apply.write.rejection_advice:_run_at_target")
def test_13_duplicate_key(site: Site) -> None:
    site.target.execute("create table t (id int primary key, v text unique)")
    with site.running():
        site.source.execute("insert into t values (2, 'before')")
        remedy = site.sees("t_v_key", r"alter table [^;\n]* drop constraint \"t_v_key\"")
        site.target.execute(remedy)
        site.is_mended()


def test_14_second_instance(site: Site, tmp_path: Path) -> None:
    with site.running():
        directory = tmp_path / "second"
        directory.mkdir()
        second = make_site(directory, site.source, site.target)
        with second.running(until_ready=False):
            pid = site.process.process.pid
            # No problem: the second process shows the source of the first process, and waits.
            second.is_ready()
            second.sees(f"Process</dt><dd>[^<]*:{pid}", str(pid), in_views=("page",))
            # The databases know the process that runs, whichever configuration asks.
            (status,) = second.status()["sources"]
            assert (status["state"], status["error"]) == ("streaming", None)
            assert status["process"].endswith(f":{pid}")
            # The named process ends; the second process takes over.
            assert site.process.terminate() == 0
            second.source.execute("insert into t values (2, 'taken over')")
            second.is_mended()
            (status,) = second.status()["sources"]
            assert status["process"].endswith(f":{second.process.process.pid}")


def test_15_wrong_token(
    tmp_path: Path, source: Database, target: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute(f"{DDL}; insert into t values (1, 'before')")
    site = make_admin_site(tmp_path, source, target)
    site.config.write_text(site.config.read_text() + 'admin: {token: "${TOKEN}"}\n')
    monkeypatch.setenv("TOKEN", "the-token-of-the-process")
    with site.running():
        monkeypatch.setenv("TOKEN", "another-token-of-a-shell")
        refused = command(site.config, "tables", "list")
        assert refused.returncode == 3
        assert "the token is wrong" in refused.stderr
        assert "STREAMER_ADMIN__TOKEN" in refused.stderr
        assert "refused a request with a wrong token" in site.process.output
        wrong = {"Authorization": "Bearer another-token-of-a-shell"}
        page = site.get("/", wrong)
        assert page is not None
        assert page.status_code == 401
        assert "the token is wrong" in page.text
        # The stream continues without the mapping, and readiness and status still answer.
        ready = site.get("/readyz", wrong)
        assert ready is not None
        assert ready.json() == {"ready": True, "reasons": [], "problems": []}
        source.execute("insert into t values (2, 'meanwhile')")
        eventually(lambda: target.value("select count(*) from t") == 2)
        (status,) = site.status()["sources"]
        assert (status["state"], status["error"]) == ("streaming", None)
        monkeypatch.setenv("TOKEN", "the-token-of-the-process")
        assert "public" in site.run("streamer tables list")
        site.is_mended()


@pytest.mark.follows("mapping.lost_mapping:find_lost_mapping")
@pytest.mark.follows("mapping.lost_mapping:save_mapping")
@pytest.mark.follows("runbooks:mapping-lost#1")
@pytest.mark.follows("runbooks:mapping-lost#2")
def test_16_mapping_deleted(tmp_path: Path, source: Database, target: Database) -> None:
    """The tables of a deleted mapping keep slot and progress until an operator imports the mapping
    again.
    """
    source.execute(f"{DDL}; insert into t values (1, 'before')")
    site = make_admin_site(tmp_path, source, target)
    database, away = tmp_path / "mapping.sqlite", tmp_path / "away"
    with site.running():
        database.rename(away)
        remedy = site.sees("was deleted|there is no .*mapping.sqlite", SAVE, alike=BY_READER)
        assert remedy == block("mapping-lost#1").strip()
        assert "was deleted" in shown(site, "/healthz")
        refused = command(site.config, "tables", "add", "shop", "other")
        assert refused.returncode != 0
        assert "was deleted" in refused.stderr
        source.execute("insert into t values (2, 'it streams')")
        eventually(lambda: target.value("select count(*) from t") == 2)
        run_block(site.config, "mapping-lost#1")
        assert (tmp_path / "backup.yaml").read_text().startswith("# Backup of streamer's mapping")
        # A different file replaces the mapping database, and then the operator restores the file.
        database.write_bytes(b"")
        eventually(lambda: "was replaced" in shown(site, "/readyz"))
        away.rename(database)
        site.is_ready()
        assert "the mapping database is unusable" in site.process.output
        assert site.process.terminate() == 0
    for path in tmp_path.glob("mapping.sqlite*"):
        path.unlink()
    source.execute("insert into t values (3, 'meanwhile')")
    report = command(site.config, "status", "--json")
    assert report.returncode == 4
    assert '"shop"' in json.loads(report.stdout)["mapping"]["error"]
    with site.running(until_ready=False):
        site.sees("the target holds", "streamer import")
        assert "pg_drop_replication_slot" not in site.process.output
        run_block(site.config, "mapping-lost#2")
        site.is_mended()
        assert target.value("select attempt from streamer.relation") == 1, "no second copy"


def shown(site: Site, path: str) -> str:
    answer = site.get(path)
    return "" if answer is None else answer.text


@pytest.mark.follows("admin.mapping.mapping_file:_restore")
@pytest.mark.follows("runbooks:mapping-lost#1")
@pytest.mark.follows("runbooks:mapping-lost#2")
def test_17_mapping_corrupt(tmp_path: Path, source: Database, target: Database) -> None:
    source.execute(f"{DDL}; insert into t values (1, 'before')")
    site = make_admin_site(tmp_path, source, target)
    database = tmp_path / "mapping.sqlite"
    with site.running():
        with database.open("r+b") as file:
            file.seek(4096)
            file.write(b"no page of a database " * 2000)
        site.sees("is damaged|is malformed", SAVE, alike=BY_READER)
        metrics = site.get("/metrics")
        assert metrics is not None
        assert "streamer_mapping_error 1.0" in metrics.text
        # The stream continues with the mapping in memory, and `run` refuses edits.
        source.execute("insert into t values (2, 'meanwhile')")
        eventually(lambda: target.value("select count(*) from t") == 2)
        refused = command(site.config, "tables", "add", "shop", "other")
        assert refused.returncode != 0
        assert "is damaged" in refused.stderr
        run_block(site.config, "mapping-lost#1")
        assert site.process.terminate() == 0
    refused = command(site.config, "run")
    assert refused.returncode == 2
    assert str(database) in refused.stderr
    assert "streamer import backup.yaml" in refused.stderr
    # As every screen said: move the file away, and import the backup.
    for path in tmp_path.glob("mapping.sqlite*"):
        path.rename(tmp_path / f"broken-{path.name}")
    source.execute("insert into t values (3, 'not running')")
    with site.running(until_ready=False):
        site.sees("the target holds", "streamer import")
        run_block(site.config, "mapping-lost#2")
        site.is_mended()


def test_18_wrong_java(site: Site, tmp_path: Path) -> None:
    right = shutil.which("java", path=f"{os.environ.get('JAVA_HOME', '')}/bin:{os.environ['PATH']}")
    assert right is not None
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    site.environment["JAVA_HOME"] = str(tmp_path / "java")
    with site.running(until_ready=False, spark=True):
        site.sees(
            r"needs Java 17, and \S+ is version 11\.0\.2",
            "install a Java runtime of version 17 or newer, or set JAVA_HOME to one",
        )
        # An operator installs the right version of Java.
        new = java.with_name("new")
        new.symlink_to(right)
        new.rename(java)
        site.source.execute("insert into t values (2, 'meanwhile')")
        site.is_mended()


@pytest.mark.follows("commands.status:_remedy_of_loss")
@pytest.mark.follows("commands.check.source_findings:check_position")
def test_19_slot_dropped_while_no_process_runs(site: Site) -> None:
    with site.running():
        assert site.process.terminate() == 0
    drop_slot(site.source)
    site.source.execute("insert into t values (2, 'missed')")
    gone = 'replication slot "streamer_shop" is gone'
    site.run(site.sees(gone, RESYNC, in_views=("status", "doctor")))
    with site.running(until_ready=False):
        site.is_mended()


@pytest.mark.follows("target.session_waits:_describe")
def test_20_target_waits_for_its_standby(
    tmp_path: Path, source: Database, server_directory: Path
) -> None:
    source.execute(f"{DDL}; insert into t values (1, 'before')")
    with own_server(server_directory / tmp_path.name, {}) as (server, target):
        site = make_site(tmp_path, source, target)
        with site.running():
            server.execute("alter system set synchronous_standby_names = 'away'")
            server.execute("select pg_reload_conf()")
            source.execute("insert into t values (2, 'waits')")
            cause = r"commits at the target wait for a synchronous standby \(\S+ = 'away'\)"
            sql = "alter system set synchronous_standby_names = ''; select pg_reload_conf\\(\\)"
            remedy = site.sees(cause, sql, in_views=("readyz", "status"), runbook="source-lags")
            site.sees(cause, "start the standby")
            for statement in remedy.split("; "):
                target.execute(statement)
            site.is_mended()


def test_21_table_dropped(site: Site) -> None:
    site.source.execute("create table other (id int primary key)")
    site = make_site(site.config.parent, site.source, site.target, "t:\nother:")
    with site.running():
        site.source.execute("drop table t; insert into other values (1)")
        keep = "on_table_dropped: keep"
        site.sees("no longer exists at the source", keep, runbook="table-gone")
        # The check finds the cause, too, with advice for a name that was never right.
        assert "is in `tables`, but does not exist" not in site.view("doctor")
        (problem,) = site.status()["summary"]["problems"]
        assert problem["remedy"].startswith(f"if the table is permanently gone, set `{keep}`")
        text = site.config.read_text()
        site.config.write_text(text.replace("    t:", f"    t: {{{keep}}}"))
        site.process.process.send_signal(signal.SIGHUP)
        site.is_mended("other")
        assert site.target.execute("select * from t") == [(1, "before")]


def _refuse_sessions(site: Site, role: str) -> None:
    """Lower the limit of connections of *role* at the target, and run the remedy of the views."""
    site.target.execute(f"alter role {role} connection limit 0")
    site.target.execute(
        f"select pg_terminate_backend(pid) from pg_stat_activity where usename = '{role}'"
    )
    cause, statement = "too many connections for role", f'alter role "{role}" connection limit -1'
    remedy = site.sees(cause, statement, runbook="target-away")
    page = site.view("page")
    assert "The target refuses connections" in page
    assert "streamer needs up to" in page
    assert "pg_isready" not in page
    site.target.execute(remedy)


@pytest.mark.follows("target.missing_grants:MissingGrants.remedy")
@pytest.mark.follows("copy.copy_obstacles:find_unusable_namespace")
@pytest.mark.follows("postgres.session_refusals:Refusal.remedy")
def test_22_privileges_revoked(site: Site) -> None:
    """streamer connects with roles that are not superusers, and an administrator revokes rights."""
    source, target, reader = site.source, site.target, f"reader_{site.source.name}"
    source.execute(
        f"create role {reader} login replication; grant create on database {source.name} to {reader};"
        "create schema app; create table app.s (id int primary key);"
        "create type mood as enum ('good', 'bad'); create table typed (id int primary key, m mood);"
        "insert into app.s values (1); insert into typed values (1, 'good');"
        f"grant usage on schema app to {reader};"
        f"alter table t owner to {reader}; alter table typed owner to {reader};"
        f"alter table app.s owner to {reader}"
    )
    source.url_user = reader
    try:
        with ordinary_role(target) as role:
            tables = "t:\ntyped:\napp.s: {target: s}"
            site = make_site(site.config.parent, source, target, tables)
            with site.running():
                target.execute(
                    f"revoke insert on t from {role}; revoke usage on type mood from public, {role}"
                )
                source.execute(
                    "insert into t values (2, 'refused'); update typed set m = 'bad' where id = 1"
                )
                for cause, grant in (
                    ("denied for table t", rf'grant insert on "public"."t" to "{role}"'),
                    ("denied for type", rf'grant usage on type "public"."mood" to "{role}"'),
                ):
                    target.execute(site.sees(cause, grant, runbook="target-away"))
                site.is_mended("t", "typed")
                _refuse_sessions(site, role)
                site.is_mended("t", "typed")
                source.execute(f"revoke usage on schema app from {reader}")
                cause, grant = "not use its schema", f'grant usage on schema "app" to "{reader}"'
                failed = command(site.config, "resync", "app.s", "--database", "shop")
                assert grant in failed.stderr, failed
                source.execute(site.sees(cause, grant, runbook="copy-does-not-finish"))
                site.run(site.sees(cause, "streamer resume app.s --database shop"))
                site.is_mended("t", "typed")
                assert target.execute("select * from s") == [(1,)]
    finally:
        source.url_user = "postgres"
        drop_slot(source)
        source.execute(
            f"reassign owned by {reader} to postgres; drop owned by {reader}; drop role {reader}"
        )


@pytest.mark.follows("source.identity_advice:IdentityAdvice.remedy")
def test_23_no_replica_identity(site: Site) -> None:
    """A table never had a key, and a second table loses its key."""
    site.source.execute(
        "create table keyless (id int, v text); insert into keyless values (1, 'a')"
    )
    site = make_site(site.config.parent, site.source, site.target, "t:\nkeyless:")
    with site.running():
        full = r'alter table "public"\."{}" replica identity full'
        site.source.execute(site.sees("gets inserts only", full.format("keyless")))
        site.source.execute("alter table t drop constraint t_pkey")
        lost = "updates and deletes are no longer published"
        site.source.execute(site.sees(lost, full.format("t"), runbook="table-gone"))
        site.is_ready()
        site.source.execute("update keyless set v = 'b'; update t set v = 'after'")
        site.is_mended("t", "keyless")
