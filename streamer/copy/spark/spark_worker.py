"""Imports the code of tasks once, and forks the processes that run the tasks of a local Spark.

PySpark's daemon forks first, and every fork imports PySpark from a zip file without compiled code.
For four forks, the imports take about five seconds of processor time; here they take half a second.
Spark starts this module instead of `pyspark.daemon` (``spark.python.daemon.module``).
"""

import gc
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def without_archives(paths: list[str]) -> list[str]:
    """Return *paths* without Spark's zip files, if PySpark is also installed unpacked."""
    entries = [path for path in paths if not Path(path).name.startswith(("pyspark.zip", "py4j-"))]
    spec = PathFinder.find_spec("pyspark", entries)
    home = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    archives = {Path(path).parents[2] for path in paths if Path(path).name == "pyspark.zip"}
    return entries if archives == {home} else paths


sys.path[:] = without_archives(sys.path)

import psycopg  # noqa: E402
import pyspark.worker  # noqa: E402
from pyspark.daemon import manager  # noqa: E402

import streamer.copy.parts.part_copier  # noqa: E402

__all__ = ["psycopg", "pyspark", "streamer"]

if __name__ == "__main__":
    gc.collect()
    gc.freeze()  # otherwise garbage collection in a fork would copy every page
    manager()
