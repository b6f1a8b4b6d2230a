"""`streamer compare` killed at its failpoints: nothing is harmed, and another run goes on.

The Python process of a task dies in the Spark that tests share. The JVM and the command each die in
a Spark of their own.
"""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest
from pyspark import SparkContext

from streamer.failpoints import NAMES, VARIABLE
from tests.support.comparing import Compare
from tests.support.forks import ForkedProcess
from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.spark,
    # PySpark leaves sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
TABLES = [f"t_{n}" for n in range(16)]
"""Enough that ranges are left for the last victim: killed tasks may end a few on their way out."""
SESSIONS = "select count(*) from pg_stat_activity where application_name = 'streamer compare'"
DONE = "select count(*) from streamer.compared_range where source_rows is not null"


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class Command:
    """A `streamer compare` in a process of its own, whose tasks stop at *failpoint*."""

    def __init__(self, config: Path, failpoint: str) -> None:
        self.temporary = config.parent / "tmp"
        self.temporary.mkdir(exist_ok=True)
        environment = {VARIABLE: f"{failpoint}=stop@1", "TMPDIR": str(self.temporary)}
        self._output = config.parent / f"compared-{failpoint}.json"
        self._log = config.parent / f"compared-{failpoint}.log"
        self.process = ForkedProcess(
            "streamer",
            ["--config", str(config), "compare", "--json"],
            environment=os.environ | environment,
            stdout=self._output,
            stderr=self._log,
        )
        self._family: set[psutil.Process] = set()

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        """Leave no process behind."""
        for process in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()

    def stopped_worker(self) -> psutil.Process | None:
        """Return the Python process of Spark that stands at the failpoint."""
        self._family |= set(psutil.Process(self.process.pid).children(recursive=True))
        for child in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() == psutil.STATUS_STOPPED:
                    return child
        return None

    def _java(self) -> psutil.Process:
        for child in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name() == "java":
                    return child
        raise AssertionError("there is no JVM")

    def kill(self, victim: str) -> tuple[int, str, str]:
        """Kill *victim* while a task is at the failpoint; return exit code, output and log."""
        worker = eventually(self.stopped_worker, 120, "a task is at the failpoint")
        if victim == "command":
            self.process.kill()
        else:
            self._java().kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGCONT)
        code = self.process.wait(120)
        eventually(lambda: not any(map(is_alive, self._family)), 60, "they end")
        return code, self._output.read_text(), self._log.read_text()


VICTIMS = ("command", "JVM")
FAILPOINTS = ("compare.range_done", "compare.keys_read")
"""In the order of a comparison: all ranges are done when it reads keys."""


def test_every_failpoint_is_here() -> None:
    assert {name for name in NAMES if name.startswith("compare.")} == set(FAILPOINTS)


def victims_at(name: str) -> tuple[str, ...]:
    """Return the processes to kill at a failpoint beside a task's. Each costs a start of Spark, so
    one dies at each failpoint, and in `make nightly` both.
    """
    if os.environ.get("TEST_COMBINATIONS") == "all":
        return VICTIMS
    return VICTIMS[:1] if name == FAILPOINTS[0] else VICTIMS[1:]


@pytest.mark.timeout(600)
async def test_killed_at_each_failpoint_the_next_comparison_goes_on(
    stream: MakeStreamer,
    compare: Compare,
    spark_context: SparkContext,
    monkeypatch: pytest.MonkeyPatch,
    source: Database,
    target: Database,
) -> None:
    """At each, the Python process of a task first, then the command or Spark's JVM."""
    for table in TABLES:
        source.execute(f"create table {table} (id int primary key, v text)")
        source.execute(f"insert into {table} select g, 'v' from generate_series(1, 20) g")
    async with stream('"*":', settings="sync: {jobs: 1}") as streamer:
        await streamer.caught_up()
        target.execute("update t_0 set v = 'w' where id = 3; delete from t_1 where id = 4")
        counts: list[int] = []

        def count() -> None:
            eventually(lambda: not target.value(SESSIONS), what="no session is left")
            eventually(lambda: not source.value(SESSIONS), what="no session is left")
            counts.append(int(str(target.value(DONE))))

        for name in FAILPOINTS:
            with monkeypatch.context() as armed:
                # Spark starts other Python processes for another environment.
                armed.setitem(spark_context.environment, VARIABLE, f"{name}=kill@1")
                with pytest.raises(Exception, match="worker exited unexpectedly"):
                    await compare(streamer, jobs=1)
            await asyncio.to_thread(count)
            for victim in victims_at(name):
                with Command(streamer.path, name) as command:
                    code, output, log = await asyncio.to_thread(command.kill, victim)
                assert (code != 0, output) == (True, ""), log
                await asyncio.to_thread(count)
            if "JVM" in victims_at(name):  # that command ends in order
                left = [*command.temporary.glob("streamer-compare-*")]
                assert left == [], "the next comparison removes what a killed one leaves"
        assert counts == sorted(counts), "ranges that are done stay done"
        assert counts[0] > 0
        results = await compare(streamer, local=True)
        assert target.value("select count(*) from streamer.comparison") == 0
    assert [result.error for result in results.values()] == [None] * len(TABLES)
    found = {name: (r.missing, r.extra, r.different) for name, r in results.items() if r.differing}
    assert found == {"t_0": (0, 0, 1), "t_1": (1, 0, 0)}
    assert all(result.rows_source == 20 for result in results.values())
