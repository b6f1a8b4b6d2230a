"""Checks that this machine has PySpark and a Java that is recent enough. Blocking.

Only copies, and comparisons of large tables, need Spark. streamer does all other work without
Spark.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

from streamer.copy.spark.security import choose_environment

MAJOR_MIN: Final = 17
_JAVA_FIX: Final = (
    f"install a Java runtime of version {MAJOR_MIN} or newer, or set JAVA_HOME to one"
)
_PACKAGE_FIX: Final = "install PySpark: pip install 'pyspark>=4.1'"


class SparkObstacle(NamedTuple):
    """The reason why Spark cannot start on this machine, and the remedy in words."""

    problem: str
    fix: str


def find_obstacle() -> SparkObstacle | None:
    """Return why Spark cannot start here; None if Spark can. Does not start Spark."""
    if importlib.util.find_spec("pyspark") is None:
        return SparkObstacle("Spark needs the package pyspark, which is missing", _PACKAGE_FIX)
    problem = _find_problem_of_java()
    return None if problem is None else SparkObstacle(problem, _JAVA_FIX)


def _find_problem_of_java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home) / "bin" / "java") if home else "java"
    try:
        output = (
            _read_release(program)
            or subprocess.run(
                [program, "-version"],
                env=choose_environment(os.environ),
                check=False,
                capture_output=True,
                text=True,
                timeout=60,
            ).stderr
        )
    except (OSError, subprocess.SubprocessError):
        return f"Spark needs Java {MAJOR_MIN}, and {program} cannot be run"
    version = re.search(r'version[ =]"((?:1\.)?(\d+)[^"]*)', output, re.IGNORECASE)
    if version is None:
        return f"Spark needs Java {MAJOR_MIN}, and {program} does not say its version"
    if int(version[2]) < MAJOR_MIN:
        return f"Spark needs Java {MAJOR_MIN}, and {program} is version {version[1]}"
    return None


def _read_release(program: str) -> str | None:
    """Return the file beside *program* that contains the version, to save a start of Java."""
    path = shutil.which(program)
    release = None if path is None else Path(path).resolve().parents[1] / "release"
    if release is None or not release.is_file():
        return None
    text = release.read_text(errors="replace")
    return text if "JAVA_VERSION=" in text else None
