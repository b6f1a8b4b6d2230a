"""Comparisons in tests: in threads, or on a Spark session that the tests of a process share."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest
from pyspark import SparkContext

from streamer.commands import compare_command
from streamer.commands import repair as repair_command
from streamer.compare import local_program, spark_program
from streamer.compare.comparison import ComparisonScope, Options, TableResult
from streamer.compare.local_launcher import LocalProcess
from streamer.copy.spark.job import write_shipped
from streamer.copy.spark.launcher import SparkLauncher
from streamer.copy.spark.security import LOCAL_ENVIRONMENT
from streamer.copy.spark.start import start_spark
from tests.support.plain_python import plain_python
from tests.support.streamer import Streamer, copy_in_threads

DEFAULTS = Options(jobs=2, seconds=60)


@pytest.fixture(scope="session")
def spark_context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkContext]:
    """A driver whose tasks run as on a cluster: with the code that the driver ships."""
    directory = tmp_path_factory.mktemp("spark")
    python = str(plain_python(directory / "python"))
    with pytest.MonkeyPatch.context() as environment:
        # Only the start of the driver reads these: programs of later tests use a normal Python.
        for name, value in {"PYSPARK_PYTHON": python, **LOCAL_ENVIRONMENT}.items():
            environment.setenv(name, value)
        spark = start_spark("local[*]", 2, {"spark.python.daemon.module": "pyspark.daemon"})
    write_shipped(directory / "shipped.zip")
    spark.context.addPyFile(str(directory / "shipped.zip"))
    yield spark.context
    spark.stop()


Compare = Callable[..., Coroutine[Any, Any, dict[str, TableResult]]]


async def compare_in_thread(self: LocalProcess, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Take the place of `LocalProcess.submit`."""
    return await asyncio.to_thread(local_program.run, job)


@pytest.fixture
def comparing_in_threads(without_spark: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads compare and copy."""
    monkeypatch.setattr(LocalProcess, "submit", compare_in_thread)


@pytest.fixture
def compare(comparing_in_threads: None, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """Return a function that compares the tables of a streamer in threads.

    With *spark*, Spark compares. The result is by table, or by ``sid table`` for a source with a
    sid. With *repairs*, the result is that of the comparison after the repair; *first* receives the
    result of the first comparison.
    """
    context: SparkContext | None = None

    async def submit(self: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
        if job.get("program") != "compare":
            return await copy_in_threads(self, job)
        assert context is not None, "a small comparison needs no Spark"
        return await asyncio.to_thread(spark_program.run, context, job, job["ends"])

    monkeypatch.setattr(SparkLauncher, "submit", submit)

    async def run(
        streamer: Streamer,
        scope: ComparisonScope | None = None,
        *,
        repairs: bool = False,
        spark: SparkContext | None = None,
        first: dict[str, TableResult] | None = None,
        **options: Any,
    ) -> dict[str, TableResult]:
        nonlocal context
        context = spark
        settings = streamer.settings
        if spark is not None:
            always = settings.sync.model_copy(update={"compare_on_spark_above": 0})
            settings = settings.model_copy(update={"sync": always})

        async def compare_and_keep(*arguments: Any) -> list[TableResult]:
            results = await compare_command.compare(*arguments)
            if first == {}:
                first.update(by_name(results))
            return results

        monkeypatch.setattr(repair_command, "compare", compare_and_keep)
        work = repair_command.repair if repairs else compare_command.compare
        results = await work(
            settings,
            streamer.mapping,
            scope or ComparisonScope(),
            replace(DEFAULTS, **options),
        )
        return by_name(results)

    return run


def by_name(results: list[TableResult]) -> dict[str, TableResult]:
    return {
        result.source.removeprefix("public.")
        if result.sid is None
        else f"{result.sid} {result.source.removeprefix('public.')}": result
        for result in results
    }
