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

from streamer.sync import class_archive

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]

MAKE = """
import sys
from pathlib import Path
from streamer.sync.class_archive import make_archive
print(make_archive(Path(sys.argv[1])))
"""


@contextmanager
def serving(environment: dict[str, str]) -> Iterator[tuple[bool, str]]:
    """Start the Spark process; yield whether it lacks an archive, and the files of its JVM."""
    program = [sys.executable, "-m", "streamer.sync.spark_job", "--serve"]
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
    directory = tmp_path / "streamer"
    name = class_archive.archive_name(environment)
    assert name is not None
    archive = directory / name
    made = subprocess.run(
        [
            *(sys.executable, "-c", MAKE, str(directory)),
        ],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert made.stdout.strip() == str(archive)
    assert list(directory.iterdir()) == [archive]
    with serving(environment) as (lacks, files):
        assert not lacks
        assert str(archive) in files
    archive.write_bytes(b"damaged" * 1000)
    with serving(environment) as (lacks, files):
        assert not lacks
        assert str(archive) not in files
