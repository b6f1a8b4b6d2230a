"""`streamer run` as users run it: a process, its signals, its pages, its neighbours."""

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from streamer import __version__
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


@pytest.fixture
def config(tmp_path: Path, source: Database, target: Database) -> Path:
    for db in (source, target):
        db.execute(DDL)
        db.execute(LOG)
    path = tmp_path / "config.yaml"
    write_config(path, source, target, TABLES)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def write_two_sources(
    path: Path, first: Database, second: Database, target: Database, tables: str, more: str = ""
) -> None:
    path.write_text(
        f"""
target: {{url: "{target.url}"}}
http: {{listen: ""}}
spool: {{directory: {path.parent / "spool"}}}
{more}
sources:
- database: shop
  urls:
  - {{url: "{first.url}", sid: eu}}
  - {{url: "{second.url}", sid: us}}
  tables: {{{tables}}}
"""
    )


SHARED = "create table t (sid text, id int, v text, primary key (sid, id))"


def test_sighup_applies_a_good_configuration_and_refuses_a_faulty_one(
    config: Path, source: Database, target: Database
) -> None:
    for db in (source, target):
        db.execute("create table more (id int primary key)")
    good = config.read_text()
    with Process(config) as process:
        caught_up(process)
        config.write_text(good + "\n    more: {colour: blue}\nworkers: 9")
        process.process.send_signal(signal.SIGHUP)
        eventually(lambda: "keeping the current configuration" in process.output)
        assert "colour" in process.output

        config.write_text(good + "\n    more: {initial: none}\nworkers: 9")
        process.process.send_signal(signal.SIGHUP)
        eventually(lambda: "configuration applied" in process.output)
        assert re.search("need a restart.*workers", process.output)
        source.execute("insert into t values (1, 'x'); insert into more values (1)")
        caught_up(process)
        assert_same(source, target, "more")
        assert_same(source, target, "t")
        assert process.terminate() == 0


def test_commands_that_say_how_it_stands(config: Path) -> None:
    with Process(config) as process:
        result = command(config, "wait")
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
        assert json.loads(command(config, "wait", "--json").stdout)["caught_up"] is True
        (source,) = json.loads(command(config, "status", "--json").stdout)["sources"]
        assert source.keys() == status(config)[0].keys()
        assert {table["state"] for table in source["tables"]} == {"ready"}
        assert "ready" in command(config, "status").stdout
        assert process.terminate() == 0


def test_sigterm_under_load(config: Path, source: Database, target: Database) -> None:
    with Process(config) as process:
        caught_up(process)
        with source.connect() as connection:
            for n in range(300):
                connection.execute("insert into t values (%s, 'x')", (n,))
                connection.execute("insert into log (line) values (%s)", (str(n),))
            began = time.monotonic()
            assert process.terminate() == 0
            assert (
                time.monotonic() - began < 25
            )  # the documentation promises ten; the machine may be busy
            for n in range(300, 400):
                connection.execute("insert into log (line) values (%s)", (str(n),))
        confirmed = source.value("select confirmed_flush_lsn from pg_replication_slots")
        assert confirmed is not None
    with Process(config) as process:
        caught_up(process)
        assert process.terminate() == 0
    assert_same(source, target, "t")
    assert_same(source, target, "log")


def test_a_second_signal_exits_at_once(config: Path, source: Database, target: Database) -> None:
    with Process(config) as process:
        caught_up(process)
        with psycopg.connect(target.url) as blocker:
            blocker.execute("lock table t in exclusive mode")
            source.execute("insert into t values (1, 'x')")
            eventually(lambda: waits_for_lock(target))
            process.process.send_signal(signal.SIGTERM)
            eventually(lambda: "stopping" in process.output)
            process.process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 128 + signal.SIGTERM


def test_sigterm_while_a_user_locks_the_table(
    config: Path, source: Database, target: Database
) -> None:
    with Process(config) as process:
        caught_up(process)
        with psycopg.connect(target.url) as blocker:
            blocker.execute("lock table t in exclusive mode")
            source.execute("insert into t values (1, 'x')")
            eventually(lambda: waits_for_lock(target))
            assert process.terminate() == 0


def test_kills_under_load(config: Path, source: Database, target: Database) -> None:
    """Killed at any moment, it continues without losing or doubling a row."""
    for round_number in range(4):
        with Process(config) as process:
            eventually(lambda: status(config)[0]["state"] == "streaming")
            with source.connect() as connection:
                for n in range(150):
                    connection.execute("insert into log (line) values (%s)", (f"{n}",))
                    connection.execute(
                        "insert into t values (%s, 'x') on conflict (id) do update set v = t.v || "
                        "'y'",
                        (n % 50,),
                    )
            eventually(partial(has_rows, target, 40 * round_number))
            process.kill()
    with Process(config) as process:
        caught_up(process)
    assert_same(source, target, "t")
    assert_same(source, target, "log")


def has_rows(target: Database, count: int) -> bool:
    return bool(target.value(f"select count(*) >= {count} from log"))


def test_pages_tell_the_truth(
    tmp_path: Path, source: Database, target: Database, config: Path
) -> None:
    port = free_port()
    text = config.read_text().replace('listen: ""', f"listen: 127.0.0.1:{port}")
    config.write_text(text)

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
            "['shop']",
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
    write_two_sources(path, source, second, target, "t: {initial: none}")
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
    # A source that comes back refuses its rows of before.
    write_two_sources(path, source, second, target, "t: {}")
    with Process(path, spark=False) as process:
        refused = "truncate_target: true"
        eventually(lambda: refused in str(status(path)), 60)
    write_two_sources(path, source, second, target, "t: {truncate_target: true}")
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
        write_two_sources(path, source, us, target, "t: {initial: none}")
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


def test_the_target_restarts(tmp_path: Path, source: Database, server_directory: Path) -> None:
    source.execute(DDL)
    with running(server_directory / tmp_path.name, versions()["18"]) as server:
        server.execute("create database dw")
        target = Database(server, "dw")
        target.execute(DDL)
        path = tmp_path / "config.yaml"
        write_config(path, source, target, "t: {initial: none}")
        with Process(path) as process:
            caught_up(process)
            with source.connect() as connection:
                for n in range(400):
                    connection.execute("insert into t values (%s, 'x')", (n,))
                    if n == 150:
                        server.stop("immediate")
                    if n == 300:
                        server.start()
            caught_up(process)
            assert_same(source, target, "t")
            assert process.process.poll() is None
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
    write_two_sources(path, source, second, target, "t: {initial: none}")
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


@pytest.mark.parametrize(
    ("edit", "code", "says"),
    [
        (lambda text: text.replace("tables:", "tabels:"), 2, "tabels"),
        (lambda text: text.replace("{initial: none}", "{initial: nothing}", 1), 2, "initial"),
        (lambda text: text.replace("shop", "${NO_SUCH_THING}"), 2, "NO_SUCH_THING"),
        (lambda text: text + "\n  ] [", 2, "config.yaml"),
        (lambda text: text.replace("t: {", "nowhere: {", 1), 2, "nowhere"),
        (lambda text: text.replace("127.0.0.1:", "127.0.0.1:99", 1), 2, "port"),
    ],
)
def test_wrong_configurations(config: Path, edit: Edit, code: int, says: str) -> None:
    config.write_text(edit(config.read_text()))
    result = command(config, "run", "--stop-when-caught-up", seconds=50)
    assert result.returncode == code, result.stderr
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [["status"], ["wait", "--timeout", "1"], ["pause", "t"]])
def test_a_target_out_of_reach(config: Path, arguments: list[str]) -> None:
    config.write_text(re.sub("127.0.0.1:[0-9]+", "127.0.0.1:1", config.read_text(), count=1))
    result = command(config, *arguments)
    assert result.returncode == (1 if arguments[0] == "wait" else 3), result.stderr
    assert "target" in result.stderr


def test_no_secret_is_printed(config: Path, source: Database) -> None:
    text = config.read_text()
    config.write_text(text.replace("//postgres:", "//postgres:s3cr3t-not-right", 2))
    result = command(config, "status")
    assert "s3cr3t" not in result.stdout + result.stderr


def test_stopped_for_longer_than_the_timeout(
    tmp_path: Path, target: Database, server_directory: Path
) -> None:
    settings = {"wal_level": "logical", "wal_sender_timeout": "1s"}
    with running(server_directory / tmp_path.name, versions()["18"], settings) as server:
        server.execute("create database shop")
        source = Database(server, "shop")
        for db in (source, target):
            db.execute(LOG)
        path = tmp_path / "config.yaml"
        write_config(path, source, target, "log: {initial: none}")
        with Process(path) as process:
            caught_up(process)
            os.kill(process.process.pid, signal.SIGSTOP)
            source.execute("insert into log (line) select g::text from generate_series(1, 1000) g")
            walsender = "select active from pg_replication_slots"
            eventually(lambda: not source.value(walsender), what="the source gives it up")
            os.kill(process.process.pid, signal.SIGCONT)
            source.execute("insert into log (line) values ('after')")
            caught_up(process)
            assert_same(source, target, "log")
