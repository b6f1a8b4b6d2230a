"""A directory of one process: it goes with the process, or as the next one starts.

A file in it stays locked while its process lives. A killed process cannot remove its directory, in
which there may be connection strings, so the next process that makes one removes it.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

_LOCK: Final = "lock"


class OwnedDirectory:
    """A new directory in *parent* that only this user can read. Raises OSError."""

    def __init__(self, parent: Path, prefix: str) -> None:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_stale(parent, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._lock = self._take_lock()

    def make_again(self) -> None:
        """Make the directory after a cleaner has removed it. Raises OSError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(self._lock)
        self._lock = self._take_lock()

    def close(self) -> None:
        """Remove the directory with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_lock(self) -> int:
        """Lock the file, again if another process removed it as that of a dead one meanwhile."""
        while True:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
            except FileNotFoundError:
                continue
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                return lock
            os.close(lock)


def remove_stale(parent: Path, prefix: str) -> None:
    """Remove directories whose processes have ended."""
    for directory in parent.glob(f"{prefix}*"):
        try:
            lock = os.open(directory / _LOCK, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its process lives
        else:
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock)
