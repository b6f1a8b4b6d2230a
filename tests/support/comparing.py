"""Comparisons in tests. Many tests share one Spark session of their own process; others use the
program of the standing verification, which needs no Spark.
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest
from pyspark import SparkContext

from streamer.commands import compare as compare_command
from streamer.commands import repair as repair_command
from streamer.compare import local_program, spark_program
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
def comparing_without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a thread compare as the standing verification does, and threads copy."""

    async def submit(self: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
        if job.get("program") != "compare":
            return await copy_in_threads(self, job)
        return await compare_in_thread(job)

    monkeypatch.setattr(SparkLauncher, "submit", submit)
    monkeypatch.setattr(SparkLauncher, "prepare", lambda self: None)


async def compare_in_thread(job: dict[str, Any]) -> list[dict[str, Any]]:
    assert job["report"] is None, "only Spark writes reports"
    assert job["sql"] is None, "only Spark writes statements"
    return await asyncio.to_thread(local_program.run, job)


@pytest.fixture
def compare(spark_context: SparkContext, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """Return a function that compares the tables of a streamer; copies need no Spark then.

    With *local* a thread compares. The result is by table, or by ``sid table`` for a source with a
    sid. With *repairs* it is that of the comparison after the repair; *first* gets the one before.
    """
    runs_locally = False

    async def submit(self: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
        if job.get("program") != "compare":
            return await copy_in_threads(self, job)
        if runs_locally:
            return await compare_in_thread(job)
        return await asyncio.to_thread(spark_program.run, spark_context, job, job["ends"])

    monkeypatch.setattr(SparkLauncher, "submit", submit)
    monkeypatch.setattr(SparkLauncher, "prepare", lambda self: None)

    async def run(
        streamer: Streamer,
        scope: ComparisonScope | None = None,
        *,
        repairs: bool = False,
        local: bool = False,
        first: dict[str, TableResult] | None = None,
        **options: Any,
    ) -> dict[str, TableResult]:
        nonlocal runs_locally
        runs_locally = local

        async def compare_and_keep(*arguments: Any) -> list[TableResult]:
            results = await compare_command.compare(*arguments)
            if first == {}:
                first.update(by_name(results))
            return results

        monkeypatch.setattr(repair_command, "compare", compare_and_keep)
        work = repair_command.repair if repairs else compare_command.compare
        results = await work(
            streamer.settings,
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
