"""Spark dies in the middle of a repair's copy: the table stays unchanged, and the next repair
succeeds.
"""

import asyncio
import contextlib
import signal
from pathlib import Path

import psutil
import pytest

from streamer.util.failpoints import VARIABLE
from tests.support.postgres import Database
from tests.support.process import SPARK_PYTHON, Process, caught_up
from tests.support.sync_case import Case
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("without_spark")]

REPAIR = {
    "mode": "diff",
    "scope": {
        "where": [],
        "keys": [
            {
                "columns": ["id"],
                "types": ["integer"],
                "rows": [[str(n)] for n in range(2001) if n % 50 in (7, 8)],
            }
        ],
    },
}
"""The request that `streamer repair` makes for the rows that the case spoils."""
WRONG = "select count(*) from keyed where v = 'wrong' and id % 100 = 57"
"""Rows that the writer of the case leaves alone."""


def stopped(process: Process) -> list[psutil.Process]:
    """Return Spark's Python processes that stand at the failpoint."""
    found = []
    for child in process.children(SPARK_PYTHON):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_STOPPED:
                found.append(child)
    return found


def go_on(process: Process) -> None:
    for worker in stopped(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGCONT)


def kill_spark_twice(case: Case) -> None:
    with Process(case.config, environment={VARIABLE: "sync.part_copied=stop"}) as process:
        for victim in ("worker", "JVM"):
            workers = eventually(lambda: stopped(process), 120, "a task has copied its part")
            case.write(5)
            assert case.target.value(WRONG) == 20
            if victim == "JVM":
                for java in process.children("java"):
                    java.kill()
                go_on(process)  # a worker that outlives the JVM changes no row
            for worker in workers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.kill()

        def is_repaired() -> bool:
            go_on(process)
            return case.target.value(WRONG) == 0

        eventually(is_repaired, 120, "the rows are repaired")
        case.write(5)
        caught_up(process)
        assert process.terminate() == 0


@pytest.mark.timeout(600)
async def test_the_python_process_and_the_jvm_of_a_repairs_copy_are_killed(
    tmp_path: Path, source: Database, target: Database
) -> None:
    case = Case(tmp_path, source, target, "eu")
    await case.recover()
    case.spoil()
    case.ask_to_point(REPAIR)
    await asyncio.to_thread(kill_spark_twice, case)
    await case.recover()
