"""Servers whose data directories are copies of a directory from initdb.

A copy takes a tenth of the CPU of initdb. streamer tells clusters apart by their system
identifiers, so each copy gets a new identifier.
"""

import atexit
import contextlib
import fcntl
import functools
import os
import secrets
import shutil
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from streamer.commands.demo.embedded_servers import Server

_IN_SEGMENT: Final = 24
"""Where the first page of a WAL segment has the identifier: xlp_sysid of XLogLongPageHeaderData."""


class CopiedServer(Server):
    """A server without its own initdb."""

    def __init__(self, directory: Path, binaries: Path, settings: dict[str, str]) -> None:
        super().__init__(directory, binaries, settings)
        self._original = binaries

    def create(self) -> None:
        subprocess.run(["cp", "-a", _template(self._original), self.data], check=True)
        self.configure(**self._settings)
        _identify(self.data)

    def keep(self) -> Path:
        """Take a backup of the files, with the server stopped meanwhile."""
        self.stop()
        kept = self.data.with_name("kept")
        subprocess.run(["cp", "-a", self.data, kept], check=True)
        self.start()
        return kept

    def restore(self, kept: Path) -> None:
        """Go back to the files of a backup."""
        self.stop("immediate")
        shutil.rmtree(self.data)
        kept.rename(self.data)
        self.start()


@functools.cache
def _template(binaries: Path) -> Path:
    """Return the data directory of a cluster that never runs.

    The processes of a run of pytest share the directory. The last process to end removes it.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    directory = Path(tempfile.gettempdir()) / f"streamer-template-{run}"
    name = f"{zlib.crc32(str(binaries).encode()):08x}"
    with _locked():
        directory.mkdir(mode=0o755, exist_ok=True)
        (directory / f"user-{os.getpid()}").touch()
        if not (directory / name).exists():
            server = Server(directory / f"{name}-new", binaries)
            server.create()
            _remove_maps(server.data)
            server.directory.rename(directory / name)
    atexit.register(_leave, directory)
    return directory / name / "data"


def _remove_maps(data: Path) -> None:
    """Remove the maps of free space and of visible pages, a quarter of the files that each CREATE
    DATABASE copies. The server makes a map when the server needs the map.
    """
    for kind in ("fsm", "vm"):
        for file in (data / "base").rglob(f"*_{kind}"):
            file.unlink()


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Exclude all processes but this from making or removing a template during a block."""
    with Path(__file__).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _leave(directory: Path) -> None:
    with _locked():
        (directory / f"user-{os.getpid()}").unlink(missing_ok=True)
        if not list(directory.glob("user-*")):
            shutil.rmtree(directory, ignore_errors=True)


def _identify(data: Path) -> None:
    """Give a new identifier to a cluster that has not run."""
    identifier = struct.pack("=Q", secrets.randbits(62))
    path = data / "global" / "pg_control"
    control = path.read_bytes()
    # The checksum follows a structure whose length depends on the version.
    ends = range(256, len(control), 4)
    end = next(n for n in ends if control[n : n + 4] == _crc32c(control[:n]))
    content = identifier + control[len(identifier) : end]
    path.write_bytes(content + _crc32c(content) + control[end + 4 :])
    for segment in (data / "pg_wal").glob("0*"):
        with segment.open("r+b") as file:
            file.seek(_IN_SEGMENT)
            file.write(identifier)


def _crc32c(content: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return struct.pack("=I", crc ^ 0xFFFFFFFF)
