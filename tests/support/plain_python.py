"""A Python as on a machine of a cluster: with pyspark and psycopg, and without streamer."""

import sys
from pathlib import Path
from typing import Final

import pyspark

PACKAGES: Final = ("psycopg*", "pyspark", "py4j", "typing_extensions*")


def plain_python(directory: Path) -> Path:
    """Write a program to *directory* that starts such a Python."""
    packages = directory / "packages"
    packages.mkdir(parents=True)
    installed = Path(pyspark.__file__).parent.parent
    for pattern in PACKAGES:
        for path in installed.glob(pattern):
            (packages / path.name).symlink_to(path)
    program = directory / "python"
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{packages}" exec {sys.executable} -P -S "$@"\n'
    )
    program.chmod(0o755)
    return program
