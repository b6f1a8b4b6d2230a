"""The Spark job of a copy: each task copies some parts (`streamer.copy.parts.part_copier`)."""

from functools import partial
from typing import TYPE_CHECKING, Any

from streamer.copy.parts.part_copier import CopyEnds, copy_tasks

if TYPE_CHECKING:
    from pyspark import SparkContext


def run(
    context: "SparkContext", job: dict[str, Any], ends: dict[str, Any] | str
) -> list[dict[str, Any]]:
    """Copy the parts of *job*; return the parts that a server rejects.

    *ends*: the connection strings of tasks, or the path of a file.
    """
    tasks = job["tasks"]
    task_ends = ends if isinstance(ends, str) else CopyEnds.from_json(ends)
    # A partition per task: Spark starts partitions in order, so the largest begin first.
    parts = context.parallelize(tasks, len(tasks))
    return list(parts.mapPartitions(partial(copy_tasks, ends=task_ends)).collect())
