"""Starts Spark while `run` imports the program, if a table waits for a copy of its rows.

Spark and the program each need a second of processor time or more. For a table that appears only
later, such as a new match of a pattern, `streamer.runtime.session.session` starts Spark.
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from streamer.bookkeeping.relation_records import awaits_copies
from streamer.config.settings import Settings
from streamer.copy.spark.launcher import SparkLauncher
from streamer.errors.error_classes import StreamerError
from streamer.mapping.rule_options import Initial
from streamer.mapping.rules import SourceMapping
from streamer.target.connection import TargetAddress, target_connection

QUERY_SECONDS: Final = 2.0


async def begin_spark(settings: Settings, sources: Iterable[SourceMapping]) -> SparkLauncher | None:
    """Return a launcher whose process has started; None if no copy is certain to be due."""
    copied = [
        (source.database, source.sid)
        for source in sources
        if any(rule.initial is Initial.COPY for rule in source.rules)
    ]
    if not copied:
        return None
    try:
        async with asyncio.timeout(QUERY_SECONDS):
            address = TargetAddress.parse(settings.target.url)
            async with target_connection(address, "streamer start") as connection:
                if not await awaits_copies(connection, copied):
                    return None
    except (StreamerError, TimeoutError):
        return None  # the process reports the error when it connects for its work
    launcher = make_launcher(settings, settings.spool.path)
    await launcher.start()
    return launcher


def make_launcher(settings: Settings, directory: Path) -> SparkLauncher:
    """Return a launcher with the settings of copies. *directory* gets the files of jobs."""
    return SparkLauncher(
        settings.sync.spark_master,
        settings.sync.jobs,
        directory,
        settings.sync.spark_settings,
        allow_insecure=settings.sync.allow_insecure_spark,
    )
