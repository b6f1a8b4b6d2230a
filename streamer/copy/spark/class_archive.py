"""The class data archive of Spark's JVM: classes that are parsed and verified once.

With an archive, a local Spark is ready for the first task in half the time. An archive fits one
Java and one PySpark at fixed paths. The JVM checks the archive, and continues without an archive
that does not fit. ``python -m streamer.copy.spark.class_archive`` creates the archive. The image
and ``.venv`` contain an archive; otherwise `streamer.copy.spark.launcher` creates an archive in the
user's cache after the first copies.

A process that can write the archive can change the JVM's behaviour. So streamer uses a file only if
no user but the current user and root can write the file.

JEP 350, "Dynamic CDS Archives".
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from streamer.copy.spark.jvm import find_spark_home, java_program
from streamer.copy.spark.security import choose_environment
from streamer.util.owned_directory import write_private

PROGRAM: Final = "streamer.copy.spark.class_archive"
_MAKE_SECONDS: Final = 300.0
_NICENESS: Final = 10
_WORK: Final = ".making-"
_QUIET: Final = ("-Xshare:auto", "-Xlog:cds=off", "-Xlog:cds+dynamic=off")


def find_archive(environment: Mapping[str, str]) -> Path | None:
    """Return the archive for this Java and this PySpark; None without a trusted archive."""
    if (name := archive_name(environment)) is None:
        return None
    for directory in filter(None, (cache_directory(environment), installed_directory())):
        path = directory / name
        if path.exists() and is_trusted(path) and is_trusted(directory):
            return path
    return None


def archive_name(environment: Mapping[str, str]) -> str | None:
    """Return the file name for a Java and a PySpark; None if either is missing."""
    java, home = shutil.which(java_program(environment)), find_spark_home(environment)
    if java is None or home is None:
        return None
    real = Path(java).resolve()
    try:
        facts = real.stat()
        spark = version("pyspark")
    except (OSError, PackageNotFoundError):
        return None
    parts = (real, facts.st_size, facts.st_mtime_ns, spark, home.resolve())
    key = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]
    return f"spark-{spark}-{key}.jsa"


def cache_directory(environment: Mapping[str, str]) -> Path | None:
    """Return this user's directory for archives; None without a home."""
    if cache := environment.get("XDG_CACHE_HOME"):
        return Path(cache) / "streamer"
    home = environment.get("HOME")
    return None if home is None else Path(home) / ".cache" / "streamer"


def installed_directory() -> Path:
    """Return the directory of an archive that belongs to the installation."""
    return Path(sys.prefix) / "share" / "streamer"


def is_trusted(path: Path) -> bool:
    """Return whether only this user and root can write *path*."""
    facts = path.stat()
    return facts.st_uid in (0, os.geteuid()) and not facts.st_mode & 0o022


def use_options(environment: Mapping[str, str]) -> list[str]:
    """Return the options of a JVM that uses the archive; empty without an archive."""
    archive = find_archive(environment)
    return [] if archive is None else [f"-XX:SharedArchiveFile={archive}", *_QUIET]


def make_options(path: Path) -> list[str]:
    """Return the options of a JVM that writes the archive *path* at its end."""
    return [f"-XX:ArchiveClassesAtExit={path}", *_QUIET]


def make_archive(directory: Path) -> Path | None:
    """Create the archive in *directory*; return the path, or None after a failure.

    A file gets its name when it is complete, so two processes may create archives at the same time.
    """
    if (name := archive_name(os.environ)) is None or not _prepare(directory):
        return None
    with tempfile.TemporaryDirectory(prefix=_WORK, dir=directory) as work:
        made = Path(work) / name
        # Two tasks without parts load the classes that every copy needs.
        job = Path(work) / "job.json"
        names = ("source_url", "target_url", "snapshot_name", "application_name")
        ends: dict[str, Any] = dict.fromkeys(names, "") | {"server": [], "fence": []}
        write_private(job, json.dumps({"tasks": [[], []], "ends": ends}))
        program = [sys.executable, "-m", "streamer.copy.spark.job", "--master", "local[2]"]
        try:
            subprocess.run(
                [*program, "--jobs", "2", "--job", str(job), "--archive-classes", str(made)],
                check=True,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_MAKE_SECONDS,
                env=choose_environment(os.environ) | {"PYSPARK_PYTHON": sys.executable},
            )
            made.chmod(0o644)
            os.replace(made, directory / name)
        except (OSError, subprocess.SubprocessError):
            return None
    return directory / name


def _prepare(directory: Path) -> bool:
    """Create *directory* and remove files of killed processes; return whether the directory is
    usable.
    """
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        for leftover in directory.glob(f"{_WORK}*"):
            if time.time() - leftover.stat().st_mtime > _MAKE_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK) and is_trusted(directory)


def main(arguments: list[str] | None = None) -> int:
    """Run as a program that never fails: Spark works without an archive, only slower."""
    parser = argparse.ArgumentParser(description="Make the class data archive of Spark's JVM.")
    parser.add_argument(
        "--installed", action="store_true", help="make it for all users of this installation"
    )
    options = parser.parse_args(arguments)
    os.nice(_NICENESS)
    archive = find_archive(os.environ)
    directory = installed_directory() if options.installed else cache_directory(os.environ)
    if archive is None and directory is not None:
        archive = make_archive(directory)
    sys.stdout.write(f"{archive}\n" if archive else "no class data archive: Spark starts slower\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
