"""The choice between a single process and Spark for a comparison."""

from typing import Any

import pytest

from streamer.compare.process_or_spark import always_needs_spark, needs_spark
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
def test_spark_compares_what_is_large_or_what_a_cluster_or_a_file_asks_for(
    settings: dict[str, Any], size_bytes: int, report: str | None, wanted: bool
) -> None:
    assert needs_spark(SyncSection(**settings), job(size_bytes, report)) is wanted


def test_spark_starts_early_only_if_no_size_matters() -> None:
    assert not always_needs_spark(SyncSection())
    assert always_needs_spark(SyncSection(compare_on_spark_above=0))
    assert always_needs_spark(SyncSection(spark_master="k8s://cluster"))
