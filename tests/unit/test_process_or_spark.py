"""The choice between one process and Spark for a comparison, and the output."""

import io
from typing import Any

import pytest
from rich.console import Console

from streamer.commands.compare_command import print_results
from streamer.compare.comparison import TableResult
from streamer.compare.process_or_spark import (
    always_needs_spark,
    needs_spark,
    prefers_spark,
)
from streamer.config.sync_section import SyncSection

GB = 1 << 30


def job(size_bytes: int, report: str | None = None) -> dict[str, Any]:
    return {"size_bytes": size_bytes, "report": report}


@pytest.mark.parametrize(
    ("settings", "size_bytes", "report", "wanted"),
    [
        ({}, 0, None, False),
        ({}, GB, "/tmp/report.jsonl", False),
        ({}, GB + 1, None, True),
        ({}, 0, "/tmp/report.parquet", True),
        ({"compare_on_spark_above": "10MB"}, GB, None, True),
        ({"compare_on_spark_above": 0}, 0, None, True),
        ({"spark_master": "local[2]"}, GB, None, False),
        ({"spark_master": "spark://master:7077"}, 0, None, True),
        ({"spark_master": "yarn"}, 0, None, True),
    ],
)
def test_spark_compares_large_tables_and_on_request_of_a_cluster_or_a_file(
    settings: dict[str, Any], size_bytes: int, report: str | None, wanted: bool
) -> None:
    section, asked = SyncSection(**settings), job(size_bytes, report)
    assert (needs_spark(section, asked) or prefers_spark(section, asked)) is wanted


def test_spark_starts_early_only_if_no_size_matters() -> None:
    assert not always_needs_spark(SyncSection())
    assert always_needs_spark(SyncSection(compare_on_spark_above=0))
    assert always_needs_spark(SyncSection(spark_master="k8s://cluster"))


def test_the_output_counts_the_rows_that_differ_and_are_not_shown() -> None:
    sample: list[dict[str, Any]] = [
        {"key": {"id": n}, "kind": "missing", "columns": []} for n in range(5)
    ]
    table = ("public.t", "public.t", "shop", None, 1)
    different = TableResult(*table, rows_source=9, missing=7, sample=sample)
    repaired = TableResult(*table, rows_source=9, rows_target=9, repaired=7)
    out = io.StringIO()
    print_results([different, repaired], Console(file=out, width=200))
    lines = out.getvalue().splitlines()
    assert lines[1].endswith("different")
    assert lines[2].endswith("equal, 7 rows repaired")
    assert lines[-1] == "shop public.t: 4 more rows differ; --report FILE writes all"
