"""Servers whose data directories are copies of one that initdb made.

A copy takes a tenth of the CPU of initdb. streamer tells clusters apart by their system identifiers, so
each copy gets one of its own.
"""

import atexit
import functools
import secrets
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from streamer.commands.embedded import Server

_IN_SEGMENT: Final = 24
"""Where the first page of a WAL segment has the identifier: xlp_sysid of XLogLongPageHeaderData."""


class CopiedServer(Server):
    """A server that does not run initdb itself."""

    def __init__(self, directory: Path, binaries: Path, settings: dict[str, str]) -> None:
        super().__init__(directory, binaries, settings)
        self._original = binaries

    def create(self) -> None:
        subprocess.run(["cp", "-a", _template(self._original), self.data], check=True)
        self.configure(**self._settings)
        _identify(self.data)


@functools.cache
def _template(binaries: Path) -> Path:
    """Return the data directory of a cluster that never runs; this process removes it at its end."""
    directory = tempfile.TemporaryDirectory(prefix="streamer-template-", ignore_cleanup_errors=True)
    atexit.register(directory.cleanup)
    Path(directory.name).chmod(0o755)
    server = Server(Path(directory.name) / "server", binaries)
    server.create()
    return server.data


def _identify(data: Path) -> None:
    """Give a cluster that has not run an identifier of its own."""
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
