"""Runs a comparison in a Python process or with Spark.

A JVM costs about ten seconds of processor time before the first row. A Python process reads a
gigabyte in that time. Both write the same ledger of ranges, so either can continue an interrupted
comparison.
"""

import asyncio
from typing import Any

from streamer.compare.comparison_files import PARQUET
from streamer.compare.local_launcher import LocalProcess
from streamer.config.sync_section import SyncSection
from streamer.copy.spark.launcher import SparkLauncher
from streamer.copy.spark.obstacle import find_obstacle
from streamer.copy.spark.security import is_local


def always_needs_spark(settings: SyncSection) -> bool:
    """Return whether Spark runs every comparison. Pure."""
    return not is_local(settings.spark_master) or not settings.compare_on_spark_above


def needs_spark(settings: SyncSection, job: dict[str, Any]) -> bool:
    """Return whether the settings or a Parquet report of *job* require Spark. Pure."""
    return always_needs_spark(settings) or (job["report"] or "").endswith(PARQUET)


def prefers_spark(settings: SyncSection, job: dict[str, Any]) -> bool:
    """Return whether Spark runs the comparison *job* faster, if Spark can start. Pure."""
    return bool(job["size_bytes"] > settings.compare_on_spark_above)


class ComparisonRunner:
    """Runs the jobs of comparisons. *launcher*: starts Spark with the first job for Spark.

    The process or Spark starts while the caller still reads definitions and cuts ranges.
    """

    def __init__(self, settings: SyncSection, launcher: SparkLauncher) -> None:
        self._settings = settings
        self._launcher = launcher
        self._process = LocalProcess()
        if always_needs_spark(settings):
            launcher.prepare()
        else:
            self._process.prepare()

    async def close(self) -> None:
        await self._process.close()

    async def submit(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """Run *job* to the end. A cancellation cancels the job.

        Raises SparkJobError, ComparisonError.
        """
        if needs_spark(self._settings, job) or (
            prefers_spark(self._settings, job) and await asyncio.to_thread(find_obstacle) is None
        ):
            await self._process.close()
            return await self._launcher.submit(job)
        return await self._process.submit(job)
