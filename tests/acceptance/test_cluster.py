"""A Spark cluster: a standalone master and two workers. A worker dies in the middle of copies and
of a comparison.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import pyspark
import pytest

from streamer.commands.demo.embedded_servers import Server, free_port
from streamer.compare.comparison import Comparison, ComparisonScope, Options
from streamer.copy.parts.part_copier import CopyEnds, copy_parts
from streamer.copy.spark import job as spark_job
from streamer.copy.spark import launcher
from streamer.copy.spark.class_archive import use_options
from streamer.copy.spark.jvm import java_program
from streamer.copy.spark.launcher import SparkLauncher
from streamer.runtime.process import open_services
from streamer.source.reached_server import IDENTITY_SQL, identity_of
from streamer.target.fencing_token import LOCK_CLASS
from streamer.util.owned_directory import write_private
from tests.support.plain_python import plain_python
from tests.support.postgres import Database, assert_same, database, target_database
from tests.support.streamer import Streamer, write_config
from tests.support.waiting import eventually, until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

SPARK_HOME = Path(pyspark.__file__).parent
JARS = sorted(map(str, SPARK_HOME.glob("jars/*.jar")))
CLASS_PATH = ":".join(
    dict.fromkeys([f"{SPARK_HOME}/conf", *(jar for jar in JARS if "/slf4j-api-" in jar), *JARS])
)
"""The class path of a local driver: with this path, all JVMs of the cluster use the class data
archive.
"""
SECRET = "s3cr3t-of-the-servers"
SPARK_SECRET = "s3cr3t-of-spark"
VALUE = "value-of-a-row"
"""In rows: a server's message about a rejected row must stay secret too."""


def java_options() -> str:
    return " ".join([os.environ["SPARK_SUBMIT_OPTS"], *use_options(os.environ)])


@dataclass
class Cluster:
    """A master and workers, on this machine."""

    directory: Path
    port: int = field(default_factory=free_port)
    web_port: int = field(default_factory=free_port)
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self.port}"

    @property
    def work(self) -> Path:
        """The directory where workers keep the files and output of executors."""
        return self.directory / "work"

    @property
    def environment(self) -> dict[str, str]:
        """The driver's environment on one machine: names that resolve, and little memory."""
        return {
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_SCALA_VERSION": "2.13",
            "SPARK_CONF_DIR": str(self.directory / "conf"),
            "SPARK_HOME": str(SPARK_HOME),
            "PYSPARK_PYTHON": str(self.directory / "python" / "python"),
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "SPARK_SUBMIT_OPTS": java_options(),
        }

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        """Start a daemon as ``spark-class`` does, without the JVM that finds the command."""
        # As on remote machines, our package is not on an executor's path.
        environment = os.environ | self.environment | {"PYTHONPATH": ""}
        with (self.directory / f"daemon-{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *(java_program(os.environ), "-Xmx128m"),
                    *java_options().split(),
                    *("-cp", CLASS_PATH, *arguments),
                ],
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def start_worker(self) -> "subprocess.Popen[bytes]":
        return self.start(
            *("org.apache.spark.deploy.worker.Worker", "--host", "127.0.0.1", "--cores", "2"),
            *("--memory", "700m", "--work-dir", str(self.work), "--webui-port", "0", self.url),
        )

    def state(self) -> str:
        """Return the text of the master's page for machines; '' while there is none."""
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{self.web_port}/json/").text
        return ""

    def worker_of(self, port: int) -> "subprocess.Popen[bytes]":
        """Return the worker with a descendant that has a connection from a local *port*."""
        for worker in self.processes:
            if worker.poll() is None:
                for process in psutil.Process(worker.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        if any(its.laddr.port == port for its in process.net_connections("tcp")):
                            return worker
        raise AssertionError(f"no worker has port {port}")

    def stop(self) -> None:
        for process in self.processes:
            end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a daemon with all descendants, as at the death of a machine."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid)
        for member in (*family.children(recursive=True), family):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(signal.SIGKILL)
    process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path / "cluster")
    cluster.directory.mkdir()
    plain_python(cluster.directory / "python")
    (cluster.directory / "conf").mkdir()
    (cluster.directory / "events").mkdir()
    (cluster.directory / "conf" / "spark-defaults.conf").write_text(
        "spark.eventLog.enabled true\n"
        f"spark.eventLog.dir file://{cluster.directory / 'events'}\n"
        "spark.eventLog.compress false\n"
        "spark.authenticate true\n"
        f"spark.authenticate.secret {SPARK_SECRET}\n"
        "spark.network.crypto.enabled true\n"
        f"spark.driver.extraClassPath {CLASS_PATH}\n"
        f"spark.executor.extraClassPath {CLASS_PATH}\n"
        f"spark.executor.extraJavaOptions {java_options()}\n"
        "spark.sql.parquet.compression.codec uncompressed\n"
    )
    try:
        cluster.start(
            *("org.apache.spark.deploy.master.Master", "--host", "127.0.0.1"),
            *("--port", str(cluster.port), "--webui-port", str(cluster.web_port)),
        )
        cluster.start_worker()
        cluster.start_worker()
        eventually(lambda: cluster.state().count('"ALIVE"') >= 3, 120, "two workers register")
        yield cluster
    finally:
        cluster.stop()


def pages(ui_port: int) -> str:
    """Return the text of all pages of the driver's UI."""
    base = f"http://127.0.0.1:{ui_port}"
    (application,) = httpx.get(f"{base}/api/v1/applications", timeout=60).json()
    rest = f"{base}/api/v1/applications/{application['id']}"
    asked = [f"{rest}/{page}" for page in ("environment", "stages")]
    asked += [f"{base}/{page}/" for page in ("environment", "stages")]
    with httpx.Client(timeout=60, follow_redirects=True) as client:
        return "".join(client.get(url).raise_for_status().text for url in asked)


def command_lines() -> str:
    return "\n".join(
        " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])
    )


def written(*directories: Path) -> str:
    """Return the content of all files below *directories*."""
    files = [path for each in directories for path in each.rglob("*") if path.is_file()]
    return "".join(path.read_bytes().decode(errors="replace") for path in files)


DDL = "create table big_{} (id int primary key, v text, filler char(1900));"
ROWS = f"insert into big_{{}} select g, '{VALUE}', 'x' from generate_series(1, 9000) g"
GATE = """
create function wait() returns trigger language plpgsql as $$
begin perform pg_catalog.pg_advisory_xact_lock_shared(4711); return new; end $$;
create trigger gate before insert on big_{0} for each row when (new.id = 5000) execute function wait();
alter table big_{0} enable always trigger gate
"""
"""Copies stop in the middle. The session of the lock is idle without a transaction, for which a new
slot would wait.
"""
STUCK = "from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
COPYING = f"{STUCK} and application_name like 'streamer copy%' and query like 'copy %'"
SMALL = 12
COMPARED = [f"t_{n}" for n in range(6)]


def two_ports(target: Database, stuck: str) -> list[int] | None:
    found = [int(str(row[0])) for row in target.execute(f"select client_port {stuck}")]
    return found if len(found) == 2 else None


def lose_a_worker(cluster: Cluster, target: Database, ui_port: int) -> str:
    """Lose the connection of the first copy, and the worker of the second; return the output of
    Spark.
    """
    copying = eventually(lambda: two_ports(target, COPYING), 300, "both workers copy")
    comparing = f"{STUCK} and application_name = 'streamer compare'"
    ports = eventually(lambda: two_ports(target, comparing), 300, "both workers compare")
    first, second = (cluster.worker_of(port) for port in copying)
    assert first != second
    assert {first, second} == {cluster.worker_of(port) for port in ports}
    # A task that fails prints the reason, and Spark writes the reason into files.
    target.execute(f"select pg_terminate_backend(pid) {COPYING} and client_port = {copying[0]}")
    shown = pages(ui_port) + cluster.state() + command_lines()
    end(second)
    return shown


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_copies_and_a_comparison_outlive_a_worker_and_tell_no_secret_and_a_job_is_submitted(
    cluster: Cluster,
    source: Database,
    target: Database,
    shared_server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A single driver copies tables, then further tables during a comparison of the first. The
    worker that dies has tasks of both.
    """
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launcher, "IDLE_SECONDS", 300.0)
    made: list[SparkLauncher] = []

    def make(*arguments: Any, **options: Any) -> SparkLauncher:
        made.append(SparkLauncher(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(open_services, "SparkLauncher", make)
    for table in COMPARED:
        source.execute(f"create table {table} (id int primary key, v text)")
        source.execute(
            f"insert into {table} select g, '{VALUE}' || g from generate_series(1, 50) g"
        )
    for n in range(SMALL):  # a single task for all tables
        source.execute(f"create table small_{n} (id int primary key, v text)")
        source.execute(f"insert into small_{n} select g, 'v' from generate_series(1, {n % 3}) g")
    for n in range(2):  # a task for each table, once the tables exist
        target.execute(DDL.format(n))
    target.execute(GATE.format(0) + ";" + GATE.partition("$$;")[2].format(1))
    for db in (source, target):
        db.parameters = f"password={SECRET}"
    ui_port = free_port()
    config = tmp_path / "config.yaml"
    write_config(
        config,
        source,
        target,
        '"*":',
        settings=f"""
        discovery_interval: 0.5
        sync:
          spark_master: {cluster.url}
          jobs: 4
          defer_indexes: false
          spark_settings:
            spark.ui.enabled: true
            spark.ui.port: {ui_port}
            # Tasks are run twice whenever they are a little slower than others.
            spark.speculation: true
            spark.speculation.multiplier: 1.05
            spark.speculation.quantile: 0.1
        """,
    )
    streamer = Streamer(config)
    streamer.start()
    try:
        await streamer.caught_up(300)
        with target.connect() as gate, target.connect() as blocker:
            gate.execute("select pg_advisory_lock(4711)")
            for n in range(2):
                source.execute(DDL.format(n) + ROWS.format(n))
            await until(lambda: two_ports(target, COPYING) is not None, "two copies stop", 300)
            target.execute("update t_2 set v = 'other' where id = 7; delete from t_3 where id = 8")
            blocker.execute("begin")
            blocker.execute(f"lock table {', '.join(COMPARED)} in access exclusive mode")
            comparison = Comparison(
                streamer.settings.target.url,
                streamer.mapping,
                made[0],
                Options(jobs=4, report=tmp_path / "rows.parquet"),
            )
            comparing = asyncio.create_task(comparison.run(ComparisonScope(("t_*",))))
            source.execute(
                "update big_0 set v = 'meanwhile' where id % 7 = 0; delete from big_1 where id < 50"
            )
            shown = await asyncio.to_thread(lose_a_worker, cluster, target, ui_port)
            gate.execute("select pg_advisory_unlock(4711)")
            blocker.execute("rollback")
        results = {result.source: result for result in await comparing}
        await streamer.caught_up(300)
    finally:
        await streamer.stop()
    report = (tmp_path / "rows.parquet").read_bytes()
    assert set(re.findall(rb"public\.t_\d", report)) == {b"public.t_2", b"public.t_3"}
    assert set(re.findall(rb'\["\d"\]', report)) == {b'["7"]', b'["8"]'}
    assert "spark.speculation" in shown
    assert cluster.url in shown
    assert results.keys() == {f"public.{table}" for table in COMPARED}
    assert {
        name: (r.missing, r.extra, r.different) for name, r in results.items() if not r.is_equal
    } == {"public.t_2": (0, 0, 1), "public.t_3": (1, 0, 0)}, results
    for n in range(2):
        assert_same(source, target, f"big_{n}")
    for n in range(SMALL):
        assert_same(source, target, f"small_{n}")
    out, err = capfd.readouterr()
    shown += out + err + str([result.to_json() for result in results.values()])
    recorded = written(cluster.work, cluster.directory / "events", tmp_path / "spool")
    assert "SparkListenerTaskEnd" in recorded
    assert "streamer.copy.parts.part_copier.TransientError: " in recorded, "why the task failed"
    for text in (shown, recorded):
        assert SECRET not in text
        assert SPARK_SECRET not in text
        assert VALUE not in text
    with (
        database(shared_server, "source_of_job") as source_of_job,
        target_database(shared_server) as target_of_job,
    ):
        job = partial(a_job_by_spark_submit, cluster, source_of_job, target_of_job, tmp_path)
        await asyncio.to_thread(job)


def copy_all(tasks: list[list[dict[str, Any]]], ends: CopyEnds) -> None:
    assert [failure for task in tasks for failure in copy_parts(task, ends)] == []


def a_job_by_spark_submit(
    cluster: Cluster, source: Database, target: Database, tmp_path: Path
) -> None:
    """A second task copies the same parts at the same time: the target has each row once."""
    source.execute("create table t (id int, v text)")
    source.execute("insert into t select g, 'v' from generate_series(1, 1000) g")
    target.execute("create table t (id int, v text)")
    target.execute(
        "insert into streamer.source (database, slot, publication, lock_token)"
        " values ('shop', 's', 'p', 'token');"
        "insert into streamer.relation (source_id, source, target, type, state, attempt)"
        " values (1, 'public.t', 'public.t', 'clone', 'copying', 1);"
        "insert into streamer.sync_partition (relation_id, part, attempt, description)"
        " select 1, n, 1, '' from generate_series(0, 9) n"
    )
    part = {"relation_id": 1, "attempt": 1, "copy_in": "copy public.t from stdin"}
    bookkeeping = source.execute(
        "select oid::int8, pg_relation_filenode(oid)::int8 from pg_class where oid = 't'::regclass"
    )
    part |= {"types_out": "", "types_in": "", "stores": bookkeeping, "numbers": [1, 2]}
    part |= {"named": ["public.t", bookkeeping[0][0]]}
    part |= {"lock": "lock table only public.t in access share mode"}
    part |= {"probe": "select id, v from only public.t limit 0"}
    tasks = [
        [
            part
            | {
                "part": n,
                "copy_out": f"copy (select * from public.t where id % 10 = {n}) to stdout",
            }
        ]
        for n in range(10)
    ]
    waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and application_name = '{}'"
    with psycopg.connect(source.url) as exporter, psycopg.connect(target.url) as blocker:
        exporter.execute("set transaction isolation level repeatable read")
        row = exporter.execute("select pg_export_snapshot()").fetchone()
        assert row is not None
        blocker.execute("select pg_advisory_lock(%s::int8::bit(32)::int4, 1)", (LOCK_CLASS,))
        blocker.commit()
        ((identifier, segment, started),) = source.execute(IDENTITY_SQL)
        server = identity_of(str(identifier), str(segment), int(str(started)), ("", 0, 1))
        ends: dict[str, Any] = {
            "source_url": source.url,
            "target_url": target.url,
            "snapshot_name": row[0],
            "server": server,
            "fence": (LOCK_CLASS, 1, blocker.info.backend_pid, "token"),
        }
        job = tmp_path / "job.json"
        write_private(
            job, json.dumps({"tasks": tasks, "ends": ends | {"application_name": "submitted"}})
        )
        # Both tasks plan the same parts before either copies a part.
        blocker.execute("select from streamer.sync_partition for update")
        submitted = subprocess.Popen(
            [
                *(SPARK_HOME / "bin" / "spark-submit", "--master", cluster.url),
                *("--conf", "spark.driver.memory=512m", "--conf", "spark.cores.max=1"),
                *(str(spark_job.__file__), "--job", job),
            ],
            env=os.environ | cluster.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        rival = threading.Thread(
            target=copy_all, args=(tasks, CopyEnds(**ends, application_name="rival"))
        )
        rival.start()
        eventually(lambda: target.value(waiting.format("rival")), 300, "the rival waits")
        eventually(lambda: target.value(waiting.format("submitted")), 300, "the job waits")
        blocker.rollback()
        output, _ = submitted.communicate(timeout=300)
        rival.join()
    assert submitted.returncode == 0
    lines = [line for line in output.splitlines() if line.startswith("{")]
    assert [json.loads(line) for line in lines] == [
        {"event": "finished", "job": str(job), "result": []}
    ]
    assert_same(source, target, "t")
    assert target.value("select sum(rows_copied) from streamer.sync_partition") == 1000
