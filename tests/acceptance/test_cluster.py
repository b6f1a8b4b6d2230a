"""The copy on a Spark cluster: a standalone master and two workers, one of which dies."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import pyspark
import pytest

from streamer.commands.embedded import free_port
from streamer.postgres.secret import Secret
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.schema import migrate
from streamer.source.place import PLACE_SQL, place_of
from streamer.sync import spark_job
from streamer.sync.parts import CopyEnds, copy_parts
from streamer.target.claim import LOCK_CLASS
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database, assert_same
from tests.support.process import Process, caught_up
from tests.support.streamer import write_config
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

SPARK_HOME = Path(pyspark.__file__).parent
SECRET = "s3cr3t-of-the-servers"
SPARK_SECRET = "s3cr3t-of-spark"
VALUE = "value-of-a-row"
"""In rows: a server's message about a rejected row must stay secret too."""


@dataclass
class Cluster:
    """A master and its workers, on this machine."""

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
        """The driver's needs here: names that resolve, little memory."""
        return {
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "128m",
            "SPARK_DAEMON_JAVA_OPTS": os.environ["SPARK_SUBMIT_OPTS"],
            "SPARK_CONF_DIR": str(self.directory / "conf"),
            "SPARK_HOME": str(SPARK_HOME),
            "PYSPARK_PYTHON": sys.executable,
        }

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        # As on other machines: our package is not on an executor's path.
        environment = os.environ | self.environment | {"PYTHONPATH": ""}
        with (self.directory / f"daemon-{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [SPARK_HOME / "bin" / "spark-class", *arguments],
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
            *("org.apache.spark.deploy.worker.Worker", "--host", "127.0.0.1", "--cores", "1"),
            *("--memory", "700m", "--work-dir", str(self.work), "--webui-port", "0", self.url),
        )

    def state(self) -> str:
        """Return the text of the master's page for machines; '' while there is none."""
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{self.web_port}/json/").text
        return ""

    def worker_of(self, port: int) -> "subprocess.Popen[bytes]":
        """Return the worker one of whose descendants has a connection from a local *port*."""
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
    """Kill a daemon with all it started, as when its machine dies."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid)
        for member in (*family.children(recursive=True), family):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    (cluster.directory / "conf").mkdir()
    (cluster.directory / "events").mkdir()
    (cluster.directory / "conf" / "spark-defaults.conf").write_text(
        "spark.eventLog.enabled true\n"
        f"spark.eventLog.dir file://{cluster.directory / 'events'}\n"
        "spark.eventLog.compress false\n"
        "spark.authenticate true\n"
        f"spark.authenticate.secret {SPARK_SECRET}\n"
        "spark.network.crypto.enabled true\n"
        f"spark.executor.extraJavaOptions {os.environ['SPARK_SUBMIT_OPTS']}\n"
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
    """Return all that the driver's UI tells."""
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
    """Return everything that is in files below *directories*."""
    files = [path for each in directories for path in each.rglob("*") if path.is_file()]
    return "".join(path.read_bytes().decode(errors="replace") for path in files)


def test_a_copy_on_a_cluster_outlives_a_worker_and_tells_no_secret(
    cluster: Cluster, source: Database, target: Database, tmp_path: Path
) -> None:
    for n in range(3):  # a task each
        ddl = f"create table big_{n} (id int primary key, v text, filler char(1900));"
        target.execute(ddl)
        source.execute(
            f"{ddl} insert into big_{n} select g, '{VALUE}', 'x' from generate_series(1, 9000) g"
        )
    for n in range(60):  # two tasks for all of them
        source.execute(f"create table small_{n} (id int primary key, v text)")
        source.execute(f"insert into small_{n} select g, 'v' from generate_series(1, {n % 3}) g")
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
        sync:
          spark_master: {cluster.url}
          jobs: 2
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
    # Copies stop in the middle, at a row that another session is about to write.
    stuck = (
        "from pg_stat_activity where datname = current_database() and query like 'copy %'"
        " and application_name like 'streamer copy%' and wait_event_type = 'Lock'"
    )
    with (
        target.connect() as blocker,
        Process(config, environment=cluster.environment) as process,
    ):
        # Planned, so the slot is made, which would wait for us too; Spark takes seconds to start.
        made = "select to_regclass('streamer.relation') is not null"
        planned = "select count(*) = 63 from streamer.relation where rows_total is not null"
        eventually(lambda: target.value(made) and target.value(planned), 300, "the copy is planned")
        blocker.execute("begin")
        for n in range(3):
            blocker.execute(f"insert into big_{n} values (5000, 'theirs')")

        def ports() -> list[int] | None:
            found = [int(str(row[0])) for row in target.execute(f"select client_port {stuck}")]
            return found if len(found) == 2 else None

        first, second = eventually(ports, 300, "both workers copy")
        assert cluster.worker_of(first) != cluster.worker_of(second)
        source.execute(
            "update big_0 set v = 'meanwhile' where id % 7 = 0; delete from big_1 where id < 50"
        )
        # A task that fails says why, and Spark writes that down.
        target.execute(f"select pg_terminate_backend(pid) {stuck} and client_port = {first}")
        shown = pages(ui_port) + cluster.state() + command_lines()
        assert "spark.speculation" in shown
        assert cluster.url in shown
        end(cluster.worker_of(second))
        blocker.execute("rollback")
        caught_up(process, 400)
        for n in range(3):
            assert_same(source, target, f"big_{n}")
        for n in range(60):
            assert_same(source, target, f"small_{n}")
        shown += process.output
        assert process.terminate() == 0
    cluster.start_worker()
    recorded = written(cluster.work, cluster.directory / "events", tmp_path / "spool")
    assert "SparkListenerTaskEnd" in recorded
    assert "streamer.sync.parts.PassingError: " in recorded, "why the task failed"
    for text in (shown, recorded):
        assert SECRET not in text
        assert SPARK_SECRET not in text
        assert VALUE not in text


def test_a_comparison_ships_its_code_outlives_a_worker_and_leaves_no_value_behind(
    cluster: Cluster, source: Database, target: Database, tmp_path: Path
) -> None:
    """An executor is lost while its task reads a range: another one reads it."""
    tables = [f"t_{n}" for n in range(6)]
    for table in tables:
        source.execute(f"create table {table} (id int primary key, v text)")
        source.execute(
            f"insert into {table} select g, '{VALUE}' || g from generate_series(1, 50) g"
        )
    for db in (source, target):
        db.parameters = f"password={SECRET}"
    config = tmp_path / "config.yaml"
    settings = f"sync: {{spark_master: '{cluster.url}', jobs: 2}}"
    write_config(config, source, target, '"*":', settings=settings)
    waiting = (
        "select client_port from pg_stat_activity where wait_event_type = 'Lock'"
        " and application_name = 'streamer compare'"
    )
    with Process(config, spark=False) as process, target.connect() as blocker:
        caught_up(process, 120)
        target.execute("update t_2 set v = 'other' where id = 7; delete from t_3 where id = 8")
        blocker.execute("begin")
        blocker.execute(f"lock table {', '.join(tables)} in access exclusive mode")
        with (tmp_path / "output").open("wb") as output, (tmp_path / "log").open("wb") as log:
            comparing = subprocess.Popen(
                [sys.executable, "-m", "streamer", "-c", config, "compare", "--json"],
                env=os.environ | cluster.environment,
                stdout=output,
                stderr=log,
            )
        try:

            def ports() -> list[int] | None:
                found = [int(str(row[0])) for row in target.execute(waiting)]
                return found if len(found) == 2 else None

            first, second = eventually(ports, 300, "both workers compare")
            assert cluster.worker_of(first) != cluster.worker_of(second)
            end(cluster.worker_of(second))
            blocker.execute("rollback")
            code = comparing.wait(300)
        finally:
            comparing.kill()
            comparing.wait()
            cluster.start_worker()
        assert process.terminate() == 0
    text, told = (tmp_path / "output").read_text(), (tmp_path / "log").read_text()
    assert code == 1, told
    found = json.loads(text)["tables"]
    assert {
        table["source"]: (table["missing"], table["extra"], table["different"])
        for table in found
        if not table["equal"]
    } == {"public.t_2": (0, 0, 1), "public.t_3": (1, 0, 0)}, text
    recorded = written(cluster.work, cluster.directory / "events")
    for each in (text, told, recorded):
        assert SECRET not in each
        assert VALUE not in each


async def make_bookkeeping(target: Database) -> None:
    bookkeeping = Bookkeeping(TargetAddress.parse(Secret(target.url)))
    await migrate(bookkeeping)
    await bookkeeping.close()


def copy_all(tasks: list[list[dict[str, Any]]], ends: CopyEnds) -> None:
    assert [failure for task in tasks for failure in copy_parts(task, ends)] == []


def test_a_job_by_spark_submit(
    cluster: Cluster, source: Database, target: Database, tmp_path: Path
) -> None:
    """Its parts are copied by another task at the same time: each is there once."""
    source.execute("create table t (id int, v text)")
    source.execute("insert into t select g, 'v' from generate_series(1, 1000) g")
    target.execute("create table t (id int, v text)")
    asyncio.run(make_bookkeeping(target))
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
    part |= {"lock": "lock table only public.t in access share mode"}
    part |= {"look": "select id, v from only public.t limit 0"}
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
        ((identifier, segment, started),) = source.execute(PLACE_SQL)
        place = place_of(str(identifier), str(segment), int(str(started)), ("", 0, 1))
        ends: dict[str, Any] = {
            "source_url": source.url,
            "target_url": target.url,
            "snapshot_name": row[0],
            "place": place,
            "claim": (LOCK_CLASS, 1, blocker.info.backend_pid, "token"),
        }
        job = tmp_path / "job.json"
        job.write_text(
            json.dumps({"tasks": tasks, "ends": ends | {"application_name": "submitted"}})
        )
        # Both plan the same parts before either copies one.
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
