"""`streamer run` as users run the command: the process, signals, pages, neighbours."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from streamer import __version__
from streamer.commands.demo.embedded_servers import free_port
from tests.support.invoking import invoke
from tests.support.postgres import (
    Database,
    assert_same,
    running,
    versions,
    waits_for_lock,
)
from tests.support.process import Process, caught_up, command, status
from tests.support.runbooks import run_block
from tests.support.streamer import write_config
from tests.support.waiting import eventually

DDL = "create table t (id int primary key, v text)"
LOG = "create table log (at timestamptz default clock_timestamp(), line text)"
TABLES = "t: {initial: none}\nlog: {initial: none}"
PASSWORD = "s3cr3t-not-right"


@pytest.fixture
def config(tmp_path: Path, source: Database, target: Database) -> Path:
    for db in (source, target):
        db.execute(DDL)
        db.execute(LOG)
    path = tmp_path / "config.yaml"
    write_config(path, source, target, TABLES)
    return path


SHARED = "create table t (sid text, id int, v text, primary key (sid, id))"


def test_sighup_and_a_watched_change_apply_a_good_configuration_and_refuse_a_faulty_one(
    config: Path, source: Database, target: Database
) -> None:
    for db in (source, target):
        db.execute("create table more (id int primary key)")
    good = config.read_text()
    with Process(config, "--watch-config") as process:
        caught_up(process)
        config.write_text(good + "\n    more: {colour: blue}\nworkers: 9")
        process.process.send_signal(signal.SIGHUP)
        eventually(lambda: "keeping the current configuration" in process.output)
        assert "colour" in process.output

        # As Kubernetes does: a file that differs takes the place of the former file, and no signal comes.
        changed = config.with_name("changed.yaml")
        changed.write_text(good + "\n    more: {initial: none}\nworkers: 9")
        changed.replace(config)
        eventually(lambda: "configuration applied" in process.output)
        assert re.search("need a restart.*workers", process.output)
        source.execute("insert into t values (1, 'x'); insert into more values (1)")
        caught_up(process)
        assert_same(source, target, "more")
        assert_same(source, target, "t")
        assert process.terminate() == 0


def test_commands_that_say_how_it_stands(config: Path) -> None:
    config.write_text(config.read_text().replace("//postgres@", f"//postgres:{PASSWORD}@"))
    with Process(config) as process:
        lines = (["wait"], ["wait", "--json"], ["status", "--json"], ["status"])
        waited, as_json, report, text = (command(config, *line) for line in lines)
        assert (waited.returncode, waited.stdout, waited.stderr) == (0, "", "")
        assert json.loads(as_json.stdout)["caught_up"] is True
        (source,) = json.loads(report.stdout)["sources"]
        assert source.keys() == status(config)[0].keys()
        assert {table["state"] for table in source["tables"]} == {"ready"}
        assert "ready" in text.stdout
        assert PASSWORD not in f"{waited}{as_json}{report}{text}{process.output}"
        assert process.terminate() == 0


def test_signals_end_it(config: Path, source: Database, target: Database) -> None:
    """Under load, while a user locks a table, and at once if a second signal comes."""
    with Process(config) as process, source.connect() as connection:
        caught_up(process)
        for n in range(300):
            connection.execute("insert into t values (%s, 'x')", (n,))
            connection.execute("insert into log (line) values (%s)", (str(n),))
        began = time.monotonic()
        assert process.terminate() == 0
        # The documentation promises ten; the machine may be busy.
        assert time.monotonic() - began < 25
        for n in range(300, 400):
            connection.execute("insert into log (line) values (%s)", (str(n),))
    assert source.value("select confirmed_flush_lsn from pg_replication_slots") is not None
    with Process(config) as process:
        caught_up(process)
        assert_same(source, target, "t")
        assert_same(source, target, "log")
        with psycopg.connect(target.url) as blocker:
            blocker.execute("lock table t in exclusive mode")
            source.execute("insert into t values (1000, 'x')")
            eventually(lambda: waits_for_lock(target))
            assert process.terminate() == 0
            with Process(config) as again:
                eventually(lambda: waits_for_lock(target))
                again.process.send_signal(signal.SIGTERM)
                eventually(lambda: "stopping" in again.output)
                again.process.send_signal(signal.SIGTERM)
                assert again.wait(30) == 128 + signal.SIGTERM


def test_pages_tell_the_truth(
    tmp_path: Path, source: Database, target: Database, config: Path
) -> None:
    port = free_port()
    write_config(config, source, target, TABLES, port=port)

    def metrics() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        page = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }

    def value(name: str, **labels: str) -> float | None:
        everything = {"database": "shop", "sid": ""} | labels
        return metrics().get((name, tuple(sorted(everything.items()))))

    with Process(config) as process:
        caught_up(process)
        first = next(line for line in process.output.splitlines() if "starting" in line)
        for said in (
            __version__,
            str(config),
            f"http://127.0.0.1:{port}/",
            "sources=shop",
            target.name,
        ):
            assert said in first
        assert httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
        assert httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
        source.execute("insert into t select g, 'v' from generate_series(1, 10) g")
        source.execute("update t set v = 'w' where id <= 4")
        source.execute("delete from t where id = 1")
        source.execute("truncate log")
        caught_up(process)

        def applied(operation: str, table: str = "public.t") -> float | None:
            return value("streamer_changes_applied_total", table=table, operation=operation)

        eventually(lambda: applied("truncate", "public.log") == 1)
        assert (applied("insert"), applied("update"), applied("delete")) == (10, 4, 1)
        assert value("streamer_transactions_applied_total") == 4
        assert value("streamer_commit_to_visible_seconds_count") == 4
        assert value("streamer_table_state", table="public.t", state="ready") == 1
        assert value("streamer_table_state", table="public.t", state="error") == 0
        eventually(lambda: value("streamer_lag_bytes") == 0)
        eventually(lambda: value("streamer_lag_seconds") == 0)
        assert value("streamer_retained_wal_bytes") is not None

        # A table in error: still alive, no longer ready, and the reason is given.
        target.execute("alter table t add check (v <> 'refused')")
        source.execute("insert into t values (99, 'refused')")
        eventually(lambda: httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 503)
        reasons = httpx.get(f"http://127.0.0.1:{port}/readyz").json()["reasons"]
        assert "public.t" in json.dumps(reasons)
        assert "t_v_check" in json.dumps(reasons)
        assert httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
        assert value("streamer_table_state", table="public.t", state="error") == 1
        errors = {k: v for k, v in metrics().items() if k[0] == "streamer_errors_total"}
        assert sum(errors.values()) == 1, errors
        assert process.output.count("[error") == 1, process.output


@pytest.mark.follows("runbooks:remove-a-source#1")
def test_two_tenants_in_one_table_until_one_is_torn_down(
    tmp_path: Path, source: Database, second: Database, target: Database
) -> None:
    for db in (source, second):
        db.execute(DDL)
    target.execute(SHARED)
    path = tmp_path / "config.yaml"
    write_config(path, source, target, "t: {initial: none}", sid="eu", others={"us": second})
    with Process(path) as process:
        caught_up(process)
        source.execute("insert into t select g, 'eu' from generate_series(1, 100) g")
        second.execute("insert into t select g, 'us' from generate_series(1, 100) g")
        second.execute("update t set v = 'new' where id % 2 = 0; delete from t where id = 7")
        source.execute("truncate t; insert into t values (7, 'again')")
        caught_up(process)
        rows = [("eu", 7, "again")]
        rows += [("us", n, "us" if n % 2 else "new") for n in range(1, 101) if n != 7]
        assert target.execute("select sid, id, v from t order by 1, 2") == rows
        process.terminate()
    run_block(path, "remove-a-source#1")
    slots = "select slot_name::text from pg_replication_slots where slot_name like 'streamer_shop%'"
    assert source.execute(slots) == [("streamer_shop_us",)]
    assert source.execute("select 1 from pg_publication") == []
    assert second.value("select count(*) from pg_publication") == 2
    assert target.execute("select sid, id, v from t order by 1, 2") == rows, "the rows stay"
    # A source that comes back refuses its earlier rows.
    write_config(path, source, target, "t: {}", sid="eu", others={"us": second})
    with Process(path, spark=False) as process:
        refused = "truncate_target: true"
        eventually(lambda: refused in str(status(path)), 60)
    write_config(
        path, source, target, "t: {truncate_target: true}", sid="eu", others={"us": second}
    )
    with Process(path, spark=False) as process:
        caught_up(process)
        assert target.execute("select sid, id, v from t order by 1, 2") == rows


def test_a_source_that_is_down_does_not_stop_the_others(
    tmp_path: Path, source: Database, target: Database, server_directory: Path
) -> None:
    target.execute(SHARED)
    source.execute(DDL)
    path = tmp_path / "config.yaml"
    settings = {"wal_level": "logical"}
    with running(server_directory / tmp_path.name, versions()["18"], settings) as server:
        server.execute("create database us")
        us = Database(server, "us")
        us.execute(DDL)
        write_config(path, source, target, "t: {initial: none}", sid="eu", others={"us": us})
        with Process(path) as process:
            caught_up(process)
            us.execute("insert into t values (1, 'before')")
            server.stop("immediate")
            source.execute("insert into t values (2, 'meanwhile')")
            eventually(lambda: target.execute("select 1 from t where sid = 'eu' and id = 2"))
            eventually(
                lambda: [s["state"] for s in status(path) if s["sid"] == "us"] != ["streaming"]
            )
            server.start()
            us.execute("insert into t values (3, 'after')")
            caught_up(process)
            rows = {(sid, n) for sid, n in target.execute("select sid, id from t")}
            assert rows == {("eu", 2), ("us", 1), ("us", 3)}
            # The source can stop promptly while the program is connected.
            began = time.monotonic()
            server.stop("fast")
            assert time.monotonic() - began < 40
            assert process.terminate() == 0


def test_stop_conditions(config: Path, source: Database, target: Database) -> None:
    assert command(config, "run", "--stop-when-caught-up").returncode == 0
    source.execute("insert into t values (1, 'x')")
    lsn = source.value("select pg_current_wal_insert_lsn()")
    source.execute("insert into t values (2, 'x')")
    result = command(config, "run", "--stop-at-lsn", str(lsn))
    assert result.returncode == 0, result.stderr
    assert target.execute("select id from t") == [(1,)]
    assert command(config, "run", "--stop-when-caught-up").returncode == 0
    assert_same(source, target, "t")


def test_only_some_sources(
    tmp_path: Path, source: Database, second: Database, target: Database
) -> None:
    for db in (source, second):
        db.execute(DDL)
        db.execute("insert into t values (1, 'x')")
    target.execute(SHARED)
    path = tmp_path / "config.yaml"
    write_config(path, source, target, "t: {initial: none}", sid="eu", others={"us": second})
    assert command(path, "run", "--only", "shop:eu", "--stop-when-caught-up").returncode == 0
    assert source.value("select count(*) from pg_publication") == 2
    assert second.value("select count(*) from pg_publication") == 0
    unknown = command(path, "run", "--only", "shop:asia")
    assert unknown.returncode == 2
    assert "shop:eu" in unknown.stderr


def test_a_second_process_takes_over(config: Path, source: Database, target: Database) -> None:
    with Process(config) as first:
        caught_up(first)
        with Process(config) as second:
            eventually(
                lambda: str(first.process.pid) in second.output or "another" in second.output
            )
            source.execute("insert into t values (1, 'x')")
            caught_up(first)
            first.kill()
            source.execute("insert into t values (2, 'x')")
            caught_up(second)
            assert_same(source, target, "t")
            assert second.terminate() == 0


def test_pause_resume_resync_teardown(config: Path, source: Database, target: Database) -> None:
    def state() -> str:
        tables = status(config)[0]["tables"]
        return str(next(table["state"] for table in tables if table["source"] == "public.t"))

    with Process(config) as process:
        caught_up(process)
        assert command(config, "pause", "t").returncode == 0
        eventually(lambda: state() == "paused")
        source.execute("insert into t values (1, 'x')")
        source.execute("insert into log (line) values ('goes on')")
        eventually(lambda: target.execute("select 1 from log"))
        assert not target.execute("select id from t")
        assert command(config, "wait", "--timeout", "1").returncode == 1
        process.kill()
    with Process(config) as process:
        eventually(lambda: status(config)[0]["state"] == "streaming")
        assert state() == "paused"
        assert command(config, "resume", "public.t").returncode == 0
        caught_up(process)
        assert_same(source, target, "t")
        unknown = command(config, "pause", "nothing")
        assert unknown.returncode == 2, unknown.stderr
        assert "nothing" in unknown.stderr
    refused = command(config, "teardown")
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    for _ in range(2):
        done = command(config, "teardown", "--yes")
        assert done.returncode == 0, done.stderr
        assert source.execute("select 1 from pg_publication") == []
        assert (
            source.execute(f"select 1 from pg_replication_slots where database = '{source.name}'")
            == []
        )
    assert_same(source, target, "t")


Edit = Callable[[str], str]


EDITS: list[tuple[Edit, str]] = [
    (lambda text: text.replace("tables:", "tabels:"), "tabels"),
    (lambda text: text.replace("{initial: none}", "{initial: nothing}", 1), "initial"),
    (lambda text: text.replace("shop", "${NO_SUCH_THING}"), "NO_SUCH_THING"),
    (lambda text: text + "\n  ] [", "config.yaml"),
    (lambda text: text.replace("t: {", "nowhere: {", 1), "nowhere"),
    (lambda text: text.replace("127.0.0.1:", "127.0.0.1:99", 1), "port"),
]


def test_wrong_configurations(config: Path) -> None:
    right = config.read_text()
    for edit, says in EDITS:
        config.write_text(edit(right))
        result = command(config, "run", "--stop-when-caught-up", seconds=50)
        assert (result.returncode, says in result.stderr) == (2, True), (says, result.stderr)
        assert len(result.stderr.strip().splitlines()) == 1, result.stderr
        assert "Traceback" not in result.stderr


def test_a_target_out_of_reach(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    url = f"postgresql://postgres:{PASSWORD}@127.0.0.1:1"
    config.write_text(
        f"target: {{url: '{url}/dw'}}\nspool: {{directory: {tmp_path / 'spool'}}}\n"
        f"sources: [{{database: shop, urls: [{{url: '{url}/shop'}}], tables: {{t: }}}}]\n"
    )
    for arguments, code in ((["status"], 3), (["wait", "--timeout", "1"], 1), (["pause", "t"], 3)):
        result = invoke("--config", str(config), *arguments)
        assert (result.exit_code, "target" in result.stderr) == (code, True), result.output
        assert PASSWORD not in result.output


def test_stopped_for_longer_than_the_timeout(
    config: Path, source: Database, target: Database
) -> None:
    source.parameters = "options=-c%20wal_sender_timeout%3D1s"
    write_config(config, source, target, TABLES)
    with Process(config) as process:
        caught_up(process)
        os.kill(process.process.pid, signal.SIGSTOP)
        source.execute("insert into log (line) select g::text from generate_series(1, 1000) g")
        walsender = "select active from pg_replication_slots where slot_name = 'streamer_shop'"
        eventually(lambda: not source.value(walsender), what="the source gives it up")
        os.kill(process.process.pid, signal.SIGCONT)
        source.execute("insert into log (line) values ('after')")
        caught_up(process)
        assert_same(source, target, "log")
