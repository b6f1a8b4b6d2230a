"""The Spark program of a comparison, whose tasks run the engine of `streamer.compare.unit_reader`.

`streamer.copy.spark.job` runs this program for a job whose ``program`` is ``compare``. The program
has two stages:

1. *ranges*: tasks find the differing small ranges and buckets;
2. *keys*: new tasks judge the rows, because differences are often together in a few ranges.

The driver merges the findings of tasks. Verdicts for a report or for statements wait in the
driver's `VerdictFile`. All other data stays with the executors, which get connection strings from
`streamer.copy.spark.job`.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from pyspark import RDD, SparkContext, StorageLevel

from streamer.compare.compared_table import ComparedTable
from streamer.compare.comparison_files import PARQUET, VerdictFile, write_files, write_report
from streamer.compare.parquet_report import write_parquet
from streamer.compare.readings import Tables
from streamer.compare.unit_reader import find_parts, is_findings, is_row, judge_parts
from streamer.compare.verdicts import Findings, KeyVerdict

RANGES_PER_TASK: Final = 8

Task = Callable[..., Iterator[Any]]


def run(
    context: SparkContext, job: dict[str, Any], ends: dict[str, Any] | str
) -> list[dict[str, Any]]:
    """Compare the tables of *job*; return a result for each.

    *ends*: the connection strings of tasks, or the path of a file.
    """
    tables = {row["relation_id"]: ComparedTable.from_json(row) for row in job["tables"]}
    findings = Findings(tables, job["keys_max"])
    settings = {name: job[name] for name in job.keys() - {"tables", "units", "ends"}}
    jobs = max(1, int(job["jobs"]))
    stages: list[RDD[Any]] = []

    def run_stage(name: str, rows: "RDD[Any]", task: Task) -> "RDD[Any]":
        """Run *task* once, because a repeated stage would read the servers again."""
        context.setJobDescription(f"streamer compare: {name}")
        work = partial(task, tables=tables, ends=ends, job=settings)
        stages.append(rows.mapPartitions(work).persist(StorageLevel.DISK_ONLY))
        for by_table in stages[-1].filter(is_findings).collect():
            findings.merge(by_table)
        return stages[-1].filter(is_row)

    try:
        parts = run_stage("ranges", _spread(context, job["units"], jobs), find_parts)
        with VerdictFile() as verdicts:
            if count := parts.count():
                # Distribute parts by number, because a hash would leave some tasks without work.
                spread = parts.partitionBy(min(count, jobs), int).values()
                for row in run_stage("keys", spread, judge_parts).toLocalIterator():
                    verdicts.add(row)
            context.setJobDescription("streamer compare: files")
            write_files(job, tables, verdicts, partial(_write_report, context))
        return findings.results()
    finally:
        for rows in stages:
            rows.unpersist()


def _spread(context: SparkContext, units: list[Any], jobs: int) -> "RDD[Any]":
    """Distribute *units* to tasks, which open separate connections. Neighbours often differ
    together, so neighbours go to several tasks.
    """
    count = max(1, min(len(units), max(4 * jobs, len(units) // RANGES_PER_TASK)))
    return context.parallelize([units[n::count] for n in range(count)], count).flatMap(list)


def _write_report(
    context: SparkContext, path: Path, tables: Tables, verdicts: Iterable[KeyVerdict]
) -> None:
    """Write a file: Parquet, or a line of JSON for each row."""
    if path.suffix == PARQUET:
        write_parquet(context, path, tables, verdicts)
    else:
        write_report(path, tables, verdicts)
