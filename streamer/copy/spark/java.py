"""Checks that Spark's Java is present and recent enough. Blocking."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from streamer.copy.spark.security import choose_environment

MAJOR_MIN: Final = 17
FIX: Final = f"install a Java runtime of version {MAJOR_MIN} or newer, or set JAVA_HOME to one"


def find_obstacle() -> str | None:
    """Return why Spark cannot start here; None if it can. Does not start Spark."""
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home) / "bin" / "java") if home else "java"
    try:
        said = (
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
    version = re.search(r'version[ =]"((?:1\.)?(\d+)[^"]*)', said, re.IGNORECASE)
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
