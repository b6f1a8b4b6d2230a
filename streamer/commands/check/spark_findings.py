"""Problems of the Spark installation that copies tables. The check does not start Spark."""

import os
from collections.abc import Iterator
from importlib.util import find_spec

from streamer.commands.check.findings import SPARK, Finding, error, in_words, warning
from streamer.config.sync_section import SyncSection
from streamer.copy.spark.obstacle import find_obstacle
from streamer.copy.spark.security import (
    find_defaults_file,
    find_weaknesses,
    is_local,
    parse_properties,
)


def check_driver(*, copies: bool) -> Iterator[Finding]:
    """Judge whether Spark's driver, which runs on this machine, can start. Blocking.

    *copies*: a table of the mapping begins with a copy.
    """
    if (obstacle := find_obstacle()) is not None:
        words = obstacle.problem, in_words(obstacle.fix)
        yield error(SPARK, *words) if copies else warning(SPARK, *words)


def check_spark(settings: SyncSection) -> Iterator[Finding]:
    """Judge whether a cluster protects the connection strings that copies send to it."""
    if is_local(settings.spark_master):
        return
    spec = find_spec("pyspark")
    home = next(iter((spec and spec.submodule_search_locations) or ()), "")
    path = find_defaults_file(os.environ, home)
    try:
        defaults = parse_properties(path.read_text(encoding="utf-8"))
    except OSError:
        defaults = {}
    for weakness in find_weaknesses(defaults | settings.spark_settings):
        if settings.allow_insecure_spark:
            fix = in_words(
                "copies send connection strings anyway, because sync.allow_insecure_spark is set"
            )
            yield warning(SPARK, weakness, fix)
        else:
            words = f"set it in {path}, with the same secret on the cluster; otherwise copies fail"
            yield error(SPARK, weakness, in_words(words))
