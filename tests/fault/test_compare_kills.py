"""`streamer compare` killed at its failpoints: nothing is harmed, and another run goes on."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamer.failpoints import NAMES
from tests.support.postgres import Database
from tests.support.process import Process, caught_up
from tests.support.streamer import write_config
from tests.support.waiting import eventually

pytestmark = pytest.mark.spark
TABLES = [f"t_{n}" for n in range(8)]
SESSIONS = "select count(*) from pg_stat_activity where application_name = 'streamer compare'"


class Command:
    """A `streamer compare` in a process of its own."""

    def __init__(self, config: Path, failpoints: str = "") -> None:
        temporary = config.parent / "tmp"
        temporary.mkdir(exist_ok=True)
        environment = {"STREAMER_FAILPOINTS": failpoints, "TMPDIR": str(temporary)}
        self._output, self._log = config.parent / "compared.json", config.parent / "compared.log"
        with self._output.open("wb") as output, self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "streamer", "-c", config, "compare", "--json"],
                env=os.environ | environment,
                stdout=output,
                stderr=log,
            )
        self.family: set[psutil.Process] = set()

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        """Leave no process behind."""
        for process in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()

    def wait(self) -> tuple[int, str, str]:
        """Return exit code, output and log."""
        code = self.process.wait(240)
        return code, self._output.read_text(), self._log.read_text()

    def stopped_worker(self) -> psutil.Process | None:
        """Return the Python process of Spark that stands at a failpoint."""
        self.family |= set(psutil.Process(self.process.pid).children(recursive=True))
        for child in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() == psutil.STATUS_STOPPED:
                    return child
        return None

    def java(self) -> psutil.Process:
        for child in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name() == "java":
                    return child
        raise AssertionError("there is no JVM")

    def end(self, worker: psutil.Process) -> None:
        """Wait until the command and all its processes are gone."""
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGCONT)
        self.process.wait(120)
        eventually(lambda: not any(child.is_running() for child in self.family), 60, "they end")


def answer(config: Path) -> dict[str, tuple[int, int, int]]:
    with Command(config) as command:
        code, output, log = command.wait()
    assert code == 1, log
    tables: list[dict[str, Any]] = json.loads(output)["tables"]
    assert [table["error"] for table in tables] == [None] * len(TABLES)
    return {
        table["source"].removeprefix("public."): (
            table["missing"],
            table["extra"],
            table["different"],
        )
        for table in tables
        if not table["equal"]
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(name for name in NAMES if name.startswith("compare.")))
def test_a_comparison_killed_at(
    name: str, tmp_path: Path, source: Database, target: Database
) -> None:
    """The Python process of a task first, then Spark's JVM, then the command."""
    for table in TABLES:
        source.execute(f"create table {table} (id int primary key, v text)")
        source.execute(f"insert into {table} select g, 'v' from generate_series(1, 20) g")
    config = tmp_path / "config.yaml"
    write_config(config, source, target, '"*":', settings="sync: {jobs: 1}")
    done = "select count(*) from streamer.compared_range where source_rows is not null"
    with Process(config, spark=False) as process:
        caught_up(process)
        target.execute("update t_0 set v = 'w' where id = 3; delete from t_1 where id = 4")
        counts: list[int] = []
        for victim in ("worker", "JVM", "command"):
            action = "kill" if victim == "worker" else "stop"
            with Command(config, f"{name}={action}@1") as command:
                if victim != "worker":
                    worker = eventually(command.stopped_worker, 120, "a task is at the failpoint")
                    (command.java() if victim == "JVM" else command.process).send_signal(
                        signal.SIGKILL
                    )
                    command.end(worker)
                code, output, log = command.wait()
            assert (code != 0, output) == (True, ""), log
            eventually(lambda: not target.value(SESSIONS), what="no session is left")
            eventually(lambda: not source.value(SESSIONS), what="no session is left")
            counts.append(int(str(target.value(done))))
        assert counts == sorted(counts), "ranges that are done stay done"
        assert counts[0] > 0
        assert answer(config) == {"t_0": (0, 0, 1), "t_1": (1, 0, 0)}
        assert target.value("select count(*) from streamer.comparison") == 0
        left = [*(tmp_path / "tmp").glob("streamer-compare-*")]
        assert left == [], "the next comparison removes what a killed one leaves"
        assert process.terminate() == 0
