"""`streamer compare` killed at its failpoints does no harm, and the next run goes on.

The comparison runs by turns with and without Spark, and each run goes on with the remaining ranges.
A Spark loses the Python processes of tasks at each failpoint, and then the JVM.
"""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from streamer.commands import compare_command
from streamer.compare.comparison import Comparison, ComparisonScope, Options
from streamer.compare.process_or_spark import ComparisonRunner
from streamer.copy.spark import launcher
from streamer.copy.spark.launcher import SparkLauncher
from streamer.errors.error_classes import SparkJobError
from streamer.util.failpoints import NAMES, VARIABLE
from tests.support.comparing import Compare
from tests.support.forks import ForkedProcess
from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer, Streamer
from tests.support.waiting import eventually

TABLES = [f"t_{n}" for n in range(16)]
"""Enough that ranges are left for the last victim: killed tasks may end a few before they die."""
SESSIONS = "select count(*) from pg_stat_activity where application_name = 'streamer compare'"
BLOCKED = f"{SESSIONS} and wait_event_type = 'Lock'"
DONE = "select count(*) from streamer.compared_range where source_rows is not null"
RANGES, KEYS = "compare.range_done", "compare.keys_read"
"""In the order of a comparison: the read of keys comes after all ranges."""
SPARK = {"STREAMER_SYNC__COMPARE_ON_SPARK_ABOVE": "0"}
ALL = os.environ.get("TEST_COMBINATIONS") == "all"
"""In `make nightly`: each victim that costs a start of Spark dies at each failpoint, too."""


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def find_stopped(family: set[psutil.Process]) -> psutil.Process | None:
    """Return the process that stands at a failpoint."""
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_STOPPED:
                return child
    return None


def find_java(task: psutil.Process) -> psutil.Process:
    """Return the JVM of a task: earlier tests of this process may have left a JVM, too."""
    return next(parent for parent in task.parents() if parent.name() == "java")


class Command:
    """A `streamer compare` in a separate process."""

    def __init__(self, config: Path, failpoint: str | None = None, **variables: str) -> None:
        self.temporary = config.parent / "tmp"
        self.temporary.mkdir(exist_ok=True)
        environment = os.environ | {"TMPDIR": str(self.temporary)} | variables
        if failpoint is not None:
            environment[VARIABLE] = f"{failpoint}=stop@1"
        self._output = config.parent / "compared.json"
        self._log = config.parent / "compared.log"
        self.process = ForkedProcess(
            "streamer",
            ["--config", str(config), "compare", "--continue", "--json"],
            environment=environment,
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

    def watch(self) -> set[psutil.Process]:
        self._family |= set(psutil.Process(self.process.pid).children(recursive=True))
        return self._family

    def kill(self, victim: str) -> None:
        """Kill *victim* while a process is at the failpoint."""
        stopped = eventually(lambda: find_stopped(self.watch()), 120, "it is at the failpoint")
        match victim:
            case "command":
                self.process.kill()
            case "JVM":
                find_java(stopped).kill()
            case _:
                stopped.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            stopped.send_signal(signal.SIGCONT)

    def assert_failed(self) -> str:
        """The command ends with all its processes, and without a result; return the log."""
        code, log = self.process.wait(120), self._log.read_text()
        eventually(lambda: not any(map(is_alive, self._family)), 60, "they end")
        assert (code != 0, self._output.read_text()) == (True, ""), log
        return log


def test_every_failpoint_is_here() -> None:
    assert {name for name in NAMES if name.startswith("compare.")} == {RANGES, KEYS}


class Case:
    """A streamer whose tables are compared again and again; ``done``: ranges after each time."""

    def __init__(self, streamer: Streamer, source: Database, target: Database) -> None:
        self.streamer = streamer
        self.source = source
        self.target = target
        self.done: list[int] = []

    def rest(self) -> None:
        eventually(lambda: not self.target.value(SESSIONS), what="no session is left")
        eventually(lambda: not self.source.value(SESSIONS), what="no session is left")
        self.done.append(int(str(self.target.value(DONE))))

    def interrupt(self) -> None:
        """Press Ctrl-C while several statements wait for locks."""
        with (
            self.target.connect() as other,
            Command(self.streamer.path, STREAMER_SYNC__JOBS="3") as command,
        ):
            other.execute("begin")
            other.execute(f"lock table {', '.join(TABLES)} in access exclusive mode")
            eventually(lambda: self.target.value(BLOCKED) == 3, what="three statements wait")
            command.watch()
            command.process.send_signal(signal.SIGINT)
            assert "Traceback" not in command.assert_failed()
            self.rest()

    def kill(self, failpoint: str, victim: str, **variables: str) -> None:
        with Command(self.streamer.path, failpoint, **variables) as command:
            command.kill(victim)
            log = command.assert_failed()
        if victim == "process":
            assert "the comparison stopped: its process ended" in log
        self.rest()

    async def compare_on(self, runner: ComparisonRunner) -> None:
        settings = self.streamer.settings
        comparison = Comparison(
            settings.target.url,
            self.streamer.mapping,
            runner,
            Options(jobs=1, continues=True),
        )
        await comparison.run(ComparisonScope())


def kill_jvm() -> None:
    """Kill the JVM of this process once a task is at the failpoint."""
    own = psutil.Process()
    stopped = eventually(
        lambda: find_stopped(set(own.children(recursive=True))), 120, "a task is at the failpoint"
    )
    find_java(stopped).kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        stopped.kill()


_submit, _prepare = SparkLauncher.submit, SparkLauncher.prepare


@pytest.mark.spark
@pytest.mark.timeout(600)
async def test_killed_at_each_failpoint_the_next_comparison_goes_on(
    stream: MakeStreamer,
    compare: Compare,
    monkeypatch: pytest.MonkeyPatch,
    source: Database,
    target: Database,
) -> None:
    for table in TABLES:
        source.execute(f"create table {table} (id int primary key, v text)")
        source.execute(f"insert into {table} select g, 'v' from generate_series(1, 20) g")
    async with stream('"*":', settings="sync: {jobs: 1}") as streamer:
        await streamer.caught_up()
        target.execute("update t_0 set v = 'w' where id = 3; delete from t_1 where id = 4")
        case = Case(streamer, source, target)
        await asyncio.to_thread(case.interrupt)
        always = streamer.settings.sync.model_copy(update={"compare_on_spark_above": 0})
        settings = streamer.settings.model_copy(update={"sync": always})
        with monkeypatch.context() as real:
            real.setattr(SparkLauncher, "submit", _submit)
            real.setattr(SparkLauncher, "prepare", _prepare)
            real.setattr(launcher, "IDLE_SECONDS", 300.0)
            # Each Python process of a task dies in the first comparison, and stops in the next two.
            real.setenv(VARIABLE, f"{RANGES}=kill@1,{KEYS}=stop@1")
            async with compare_command.comparing(settings) as spark:
                with pytest.raises(SparkJobError, match="worker exited unexpectedly"):
                    await case.compare_on(spark)
                await asyncio.to_thread(case.rest)
                for failpoint in (RANGES, KEYS):
                    for victim in ("process", "command"):
                        await asyncio.to_thread(case.kill, failpoint, victim)
                await kill_tasks(case, spark)
                killing = asyncio.create_task(asyncio.to_thread(kill_jvm))
                with pytest.raises(SparkJobError):  # the message depends on the moment
                    await case.compare_on(spark)
                await killing
                await asyncio.to_thread(case.rest)
        assert case.done == sorted(case.done), "ranges that are done stay done"
        assert len(set(case.done)) > 3
        assert case.done[-1] == len(TABLES) - 2
        for failpoint in (RANGES, KEYS) if ALL else ():
            for victim in ("command", "JVM"):
                target.execute("update streamer.compared_range set source_rows = null")
                await asyncio.to_thread(case.kill, failpoint, victim, **SPARK)
        results = await compare(streamer, jobs=1, continues=True)
        assert target.value("select count(*) from streamer.comparison") == 0
    assert [result.error for result in results.values()] == [None] * len(TABLES)
    found = {name: (r.missing, r.extra, r.different) for name, r in results.items() if r.differing}
    assert found == {"t_0": (0, 0, 1), "t_1": (1, 0, 0)}
    assert all(result.rows_source == 20 for result in results.values())


async def kill_tasks(case: Case, spark: ComparisonRunner) -> None:
    """Kill each process of a task that reads keys, until Spark gives up."""
    comparing = asyncio.create_task(case.compare_on(spark))
    own = psutil.Process()
    while not comparing.done():
        if (stopped := find_stopped(set(own.children(recursive=True)))) is not None:
            stopped.kill()
        await asyncio.wait([comparing], timeout=0.1)
    with pytest.raises(SparkJobError, match="worker exited unexpectedly"):
        await comparing
    await asyncio.to_thread(case.rest)
