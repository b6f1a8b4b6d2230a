"""No foreign client on the network or the machine reads passwords from the Spark process."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.postgres import Database, assert_same
from tests.support.process import Process, caught_up, command
from tests.support.spark_blocks import broadcast_blocks, listening
from tests.support.streamer import write_config
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]

SECRET = "s3cr3t-of-the-servers"
VARIABLES = {"DW_PASSWORD", "STREAMER_ADMIN__TOKEN"}
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")

OPEN_SPARK = f"""
from streamer.copy.spark import start
start.LOCAL_SETTINGS.clear()
spark = start.start_spark("local[1]", 1, {{"spark.broadcast.compress": "false"}})
kept = spark.context.broadcast("{SECRET}")
print("done", flush=True)
input()
"""


@pytest.fixture
def open_spark() -> Iterator[psutil.Process]:
    """A local driver without protection, from which every client can fetch blocks."""
    with subprocess.Popen(
        [sys.executable, "-c", OPEN_SPARK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"done\n"
            yield psutil.Process(process.pid)
        finally:
            process.communicate(b"\n")


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def command_lines(processes: list[psutil.Process]) -> str:
    lines = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            lines += process.cmdline()
    return "\n".join(lines)


def test_any_client_can_fetch_broadcasts_of_an_open_spark(open_spark: psutil.Process) -> None:
    """The client of the next test works without protection."""
    found = [broadcast_blocks(address) for address in listening(family(open_spark))]
    assert SECRET.encode() in b"".join(found)


def test_no_port_gives_blocks_away_and_no_process_shows_a_password(
    source: Database, target: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute("create table t (id int primary key, v text)")
    source.execute("insert into t select g, 'v' from generate_series(1, 1000) g")
    target.execute("create table t (id int primary key, v text)")
    for database in (source, target):
        database.parameters = "password=${DW_PASSWORD}"
    config = tmp_path / "config.yaml"
    write_config(config, source, target, "t:", settings="sync: {jobs: 1, defer_indexes: false}")
    copying = (
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and query like 'copy %' and wait_event_type = 'Lock'"
    )
    planned = "select count(*) = 1 from streamer.relation where rows_total is not null"
    for name in VARIABLES:
        monkeypatch.setenv(name, SECRET)
    with target.connect() as blocker, Process(config) as process:
        # Planned, so the slot is made, which would wait for us too; Spark takes seconds to start.
        made = "select to_regclass('streamer.relation') is not null"
        eventually(lambda: target.value(made) and target.value(planned), 120, "it is planned")
        blocker.execute("begin")
        blocker.execute("insert into t values (500, 'theirs')")
        eventually(lambda: target.value(copying) == 1, 120, "the task copies")
        members = family(psutil.Process(process.process.pid))
        (java,) = [member for member in members if member.name() == "java"]
        addresses = sorted(set(listening(members)))
        assert addresses, "the driver listens"
        assert [ip for ip, _ in addresses if ip not in LOOPBACK] == []
        assert [address for address in addresses if broadcast_blocks(address)] == []
        assert SECRET not in command_lines(members)
        # The workers have the environment of the JVM.
        assert SECRET not in str(java.environ())
        assert not VARIABLES & java.environ().keys()
        for path in filter(Path.is_file, (tmp_path / "spool").rglob("*")):
            assert path.stat().st_mode & 0o077 == 0, path
        blocker.execute("rollback")
        caught_up(process, 60)
        assert_same(source, target, "t")
        assert process.terminate() == 0
    assert SECRET not in process.output


def test_a_cluster_that_protects_nothing_gets_no_job(
    source: Database, target: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`check` reports the problem beforehand, from the files; the driver reports effective
    settings.
    """
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    source.execute("create table t (id int primary key)")
    config = tmp_path / "config.yaml"

    def findings(settings: str) -> list[tuple[str, str]]:
        settings = f"sync: {{spark_master: 'spark://cluster:7077', {settings}}}"
        write_config(config, source, target, "t:", settings=settings)
        report = json.loads(command(config, "check", "--json").stdout)
        found = [f for f in report["findings"] if "spark." in f["problem"]]
        return [(f["severity"], f["problem"].partition(" ")[0]) for f in found]

    names = ["spark.authenticate", "spark.network.crypto.enabled"]
    assert findings("") == [("error", name) for name in names]
    assert findings("allow_insecure_spark: true") == [("warning", name) for name in names]
    (tmp_path / "spark-defaults.conf").write_text("spark.authenticate true\n")
    assert findings("spark_settings: {spark.network.crypto.enabled: true}") == []
    (tmp_path / "spark-defaults.conf").unlink()

    driver = subprocess.run(
        [
            *(sys.executable, "-m", "streamer.copy.spark.job", "--serve"),
            *("--master", "local-cluster[1,1,512]"),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert driver.returncode == 1
    (event,) = [json.loads(line) for line in driver.stdout.splitlines() if line.startswith("{")]
    assert event["event"] == "ended"
    assert "spark.authenticate is off" in event["error"]
