"""The class data archive: made once, used by Spark's JVM, and never in the way."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from streamer.copy.spark import class_archive

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]


@contextmanager
def serving(environment: dict[str, str]) -> Iterator[tuple[bool, str]]:
    """Start the Spark process; yield whether it lacks an archive, and the files of its JVM."""
    program = [sys.executable, "-m", "streamer.copy.spark.job", "--serve"]
    with subprocess.Popen(
        [*program, "--master", "local[1]", "--jobs", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    ) as process:
        assert process.stdout is not None
        event = json.loads(process.stdout.readline())
        assert event["event"] == "ready"
        (jvm,) = [c for c in psutil.Process(process.pid).children() if c.name() == "java"]
        yield event["lacks_archive"], Path(f"/proc/{jvm.pid}/maps").read_text()


def test_an_archive_is_made_once_and_a_damaged_one_is_ignored(tmp_path: Path) -> None:
    environment = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    # scripts/setup.sh has run this where there was a Java. It takes a minute of a busy machine.
    make = [sys.executable, "-m", class_archive.PROGRAM, "--installed"]
    made = subprocess.run(make, env=environment, check=True, capture_output=True, text=True)
    name = class_archive.archive_name(environment)
    assert name is not None
    archive = class_archive.installed_directory() / name
    assert made.stdout.strip() == str(archive)
    assert archive.exists()
    assert not list(archive.parent.glob(".making-*"))
    with serving(environment) as (lacks, files):
        assert not lacks
        assert str(archive) in files
    # The user's cache comes before the installation.
    damaged = tmp_path / "streamer" / name
    damaged.parent.mkdir(mode=0o755)
    damaged.write_bytes(b"damaged" * 1000)
    assert class_archive.find_archive(environment) == damaged
    with serving(environment) as (lacks, files):
        assert not lacks
        assert str(damaged) not in files
