"""The class data archive: made once, and never in the way. `test_sync` has a JVM that uses the
archive.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from streamer.copy.spark import class_archive

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]

SERVE = (*("-m", "streamer.copy.spark.job", "--serve"), *("--master", "local[1]", "--jobs", "1"))


def test_an_archive_is_made_once_and_a_damaged_one_is_ignored(tmp_path: Path) -> None:
    environment = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    # scripts/setup.sh has made the archive if Java was installed, which takes a minute of a busy
    # machine.
    make = [sys.executable, "-m", class_archive.PROGRAM, "--installed"]
    made = subprocess.run(make, env=environment, check=True, capture_output=True, text=True)
    name = class_archive.archive_name(environment)
    assert name is not None
    archive = class_archive.installed_directory() / name
    assert made.stdout.strip() == str(archive)
    assert archive.exists()
    assert not list(archive.parent.glob(".making-*"))
    # The user's cache comes before the installation.
    damaged = tmp_path / "streamer" / name
    damaged.parent.mkdir(mode=0o755)
    damaged.write_bytes(b"damaged" * 1000)
    assert class_archive.find_archive(environment) == damaged
    with subprocess.Popen(
        [sys.executable, *SERVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"event": "ready", "lacks_archive": False}
        (jvm,) = [c for c in psutil.Process(process.pid).children() if c.name() == "java"]
        assert str(damaged) not in Path(f"/proc/{jvm.pid}/maps").read_text()
