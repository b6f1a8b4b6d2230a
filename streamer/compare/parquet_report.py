"""Writes a report in Parquet to a disk of this machine.

The driver gets the rows as JSON, which Spark converts to Parquet. Executors of a cluster would
write to remote disks. So the driver of a cluster starts a local driver in a separate process, with
the program ``parquet``.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from pyspark import SparkContext
from pyspark.sql import SparkSession

from streamer.compare.readings import Tables
from streamer.compare.verdicts import KeyVerdict
from streamer.copy.spark.security import choose_environment, is_local
from streamer.util.owned_directory import write_private

PROGRAM: Final = "streamer.copy.spark.job"
SCHEMA: Final = (
    "database string, sid string, table string, target_table string, key string, kind string,"
    " missing long, extra long, different long, columns array<string>, source string,"
    " target string, lsn string"
)


def write_parquet(
    context: SparkContext, path: Path, tables: Tables, verdicts: Iterable[KeyVerdict]
) -> None:
    """Write *verdicts* to a file. Raises OSError, CalledProcessError."""
    directory = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    rows = directory / "rows"
    job = {"program": "parquet", "ends": {}, "path": str(path), "rows": str(rows)}
    try:
        with rows.open("w", encoding="utf-8") as file:
            for verdict in verdicts:
                file.write(json.dumps(_fields(tables, verdict)) + "\n")
        if is_local(context.master):
            run(context, job)
        else:
            _run_local_driver(directory / "job.json", job)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _fields(tables: Tables, verdict: KeyVerdict) -> dict[str, Any]:
    table = tables[verdict.relation]
    names = {"database": table.database, "sid": table.sid}
    return names | {
        "table": table.source_name,
        "target_table": table.target_name,
        **verdict._asdict(),
    }


def _run_local_driver(path: Path, job: dict[str, Any]) -> None:
    write_private(path, json.dumps(job))
    subprocess.run(
        [sys.executable, "-m", PROGRAM, "--master", "local[1]", "--jobs", "1", "--job", str(path)],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=choose_environment(os.environ),
    )


def run(context: SparkContext, job: dict[str, Any], _ends: str = "") -> list[dict[str, Any]]:
    """Convert the rows of *job* to Parquet, in the directory of the rows."""
    rows = Path(job["rows"])
    made = rows.with_name("parquet")
    frame = SparkSession(context).read.schema(SCHEMA).json(rows.as_uri())
    frame.coalesce(1).write.parquet(made.as_uri())
    (part,) = made.glob("part-*")
    part.replace(job["path"])
    return []
