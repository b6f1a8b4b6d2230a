"""Comparisons in tests: on one Spark session of the test's own process, which many tests share."""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest
from pyspark import SparkContext

from streamer.commands import compare as compare_command
from streamer.commands import repair as repair_command
from streamer.compare import spark_program
from streamer.compare.comparison import ComparisonScope, Options, TableResult
from streamer.sync.launcher import SparkLauncher
from streamer.sync.spark_security import LOCAL_ENVIRONMENT
from streamer.sync.spark_start import start_spark
from tests.support.streamer import Streamer, copy_in_threads

DEFAULTS = Options(jobs=2, seconds=60)


@pytest.fixture(scope="session")
def spark_context() -> Iterator[SparkContext]:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {"PYSPARK_PYTHON": sys.executable, **LOCAL_ENVIRONMENT}.items():
            environment.setenv(name, value)
        spark = start_spark("local[*]", 2)
        yield spark.context
        spark.stop()


Compare = Callable[..., Coroutine[Any, Any, dict[str, TableResult]]]


@pytest.fixture
def compare(spark_context: SparkContext, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """Return a function that compares the tables of a streamer; copies need no Spark then.

    The result is by table, or by ``sid table`` for a source with a sid.
    """

    async def submit(self: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
        if job.get("program") != "compare":
            return await copy_in_threads(self, job)
        return await asyncio.to_thread(spark_program.run, spark_context, job, job["ends"])

    monkeypatch.setattr(SparkLauncher, "submit", submit)
    monkeypatch.setattr(SparkLauncher, "prepare", lambda self: None)

    async def run(
        streamer: Streamer,
        scope: ComparisonScope | None = None,
        *,
        repairs: bool = False,
        **options: Any,
    ) -> dict[str, TableResult]:
        work = repair_command.repair if repairs else compare_command.compare
        results = await work(
            streamer.settings,
            streamer.mapping,
            scope or ComparisonScope(),
            replace(DEFAULTS, **options),
        )
        return {
            result.source.removeprefix("public.")
            if result.sid is None
            else f"{result.sid} {result.source.removeprefix('public.')}": result
            for result in results
        }

    return run
