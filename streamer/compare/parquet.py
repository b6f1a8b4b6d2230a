"""Writes a report in Parquet to a disk of this machine.

Executors of a cluster have other disks. So the driver of a cluster keeps the rows as JSON, and
starts a local driver in another process. That makes Parquet of them, as the program ``parquet``.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as t

from streamer.owned_directory import write_private
from streamer.sync.spark.security import choose_environment, is_local

PROGRAM: Final = "streamer.sync.spark.job"


def write_parquet(frame: DataFrame, path: Path) -> None:
    """Write *frame* to one file. Raises OSError, CalledProcessError."""
    directory = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        if is_local(frame.sparkSession.sparkContext.master):
            _write(frame, path, directory)
        else:
            _write_with_local_driver(frame, path, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _write(frame: DataFrame, path: Path, directory: Path) -> None:
    inner = directory / "rows"
    frame.coalesce(1).write.parquet(inner.as_uri())
    (part,) = inner.glob("part-*")
    part.replace(path)


def _write_with_local_driver(frame: DataFrame, path: Path, directory: Path) -> None:
    rows, job = directory / "rows.json", directory / "job.json"
    with rows.open("w", encoding="utf-8") as file:
        for line in frame.toJSON().toLocalIterator():
            file.write(f"{line}\n")
    fields = {"program": "parquet", "ends": {}, "schema": frame.schema.jsonValue()}
    write_private(job, json.dumps(fields | {"rows": rows.as_uri(), "path": str(path)}))
    subprocess.run(
        [sys.executable, "-m", PROGRAM, "--master", "local[1]", "--jobs", "1", "--job", str(job)],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=choose_environment(os.environ),
    )


def run(context: SparkContext, job: dict[str, Any], _ends: str) -> list[dict[str, Any]]:
    """Make Parquet of the rows of *job*."""
    schema = t.StructType.fromJson(job["schema"])
    write_parquet(SparkSession(context).read.schema(schema).json(job["rows"]), Path(job["path"]))
    return []
