"""Streaming, status, check and comparison work on a machine without PySpark and without Java."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.support.postgres import Database
from tests.support.streamer import write_config

WITHOUT_PYSPARK: Final = """
import sys
sys.modules["pyspark"] = sys.modules["py4j"] = None
from streamer.cli.main import main
main()
"""
DDL: Final = "create table t (id int primary key, v text)"


@pytest.fixture
def config(tmp_path: Path, source: Database, target: Database) -> Path:
    for db in (source, target):
        db.execute(DDL)
    path = tmp_path / "config.yaml"
    write_config(path, source, target, "t: {initial: none}")
    return path


def streamer(config: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in an environment in which neither PySpark nor Java can start."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_PYSPARK, "--config", str(config), *arguments],
        env=os.environ | {"JAVA_HOME": str(config.parent)},
        cwd=config.parent,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_mapping_without_copies_needs_no_spark(
    config: Path, source: Database, target: Database
) -> None:
    checked = streamer(config, "check")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "Spark needs the package pyspark" in checked.stdout
    streamed = streamer(config, "run", "--stop-when-caught-up")
    assert streamed.returncode == 0, streamed.stderr
    source.execute("insert into t select n, n from generate_series(1, 100) n")
    streamed = streamer(config, "run", "--stop-when-caught-up")
    assert streamed.returncode == 0, streamed.stderr
    assert target.value("select count(*) from t") == 100
    assert streamer(config, "status").returncode == 0
    compared = streamer(config, "compare")
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert "equal" in compared.stdout
    config.write_text(config.read_text() + "\nsync: {compare_on_spark_above: 1kB}\n")
    compared = streamer(config, "compare")
    assert compared.returncode == 0, compared.stdout + compared.stderr


def test_a_copy_without_pyspark_names_the_package_to_install(config: Path) -> None:
    config.write_text(config.read_text().replace("initial: none", "initial: copy"))
    checked = streamer(config, "check")
    assert checked.returncode == 1
    assert "pip install 'pyspark>=4.1'" in checked.stdout
