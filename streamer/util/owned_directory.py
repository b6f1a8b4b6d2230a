"""Directories and files that only this user can change, and the directory of a process.

In a temporary directory or on a shared disk, any user can create a directory before this process.
The owner of a directory can replace each file in it. So this process uses a directory only if it
belongs to this user alone, and reads jobs and secrets only from such files. Foreign users must not
be able to rename a parent directory either, because they could substitute the directory. Paths
below a checked directory stay valid, and no descriptor needs to stay open.

The directory of a process is removed at the end of the process, or at the next start. A file there
stays locked while the process lives. A killed process cannot remove its directory, which may
contain connection strings, so the next process removes the old directory.
"""

import errno
import fcntl
import os
import shlex
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_LOCK: Final = "lock"
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class NotPrivateError(OSError):
    """A foreign user can change a directory or file. ``remedy``: the command to run."""

    def __init__(self, path: Path, problem: str, remedy: str | None = None) -> None:
        super().__init__(errno.EPERM, problem, str(path))
        self.remedy = remedy


def make_private(directory: Path) -> None:
    """Create *directory* with mode 0700, or check that it belongs to this user alone.

    Raises OSError: a NotPrivateError for a directory with the wrong owner or mode.
    """
    for path in (*reversed(directory.parents), directory):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)
    os.close(open_private(directory))
    for step in _steps(directory):
        _refuse_replaceable(step)


def _steps(path: Path) -> Iterator[Path]:
    """Yield the directories and links that decide where the absolute *path* leads."""
    for parent in reversed(path.absolute().parents):
        yield parent
        if parent.is_symlink():
            yield from _steps(target := parent.parent / parent.readlink())
            yield target


def _refuse_replaceable(step: Path) -> None:
    """Raise NotPrivateError if a foreign user could replace *step*, or an entry of this user in
    *step*. The operator trusts the groups of this process.
    """
    facts = step.lstat()
    if facts.st_uid not in (0, os.geteuid()):
        raise NotPrivateError(step, f"{step} above it belongs to the user with id {facts.st_uid}")
    is_of_group = facts.st_gid in (0, os.getegid(), *os.getgroups())
    writers = stat.S_IWOTH if is_of_group else stat.S_IWOTH | stat.S_IWGRP
    if stat.S_ISDIR(facts.st_mode) and facts.st_mode & writers and not facts.st_mode & stat.S_ISVTX:
        mode = f"{stat.S_IMODE(facts.st_mode):04o}"
        raise NotPrivateError(
            step, f"other users may replace it, because {step} has the mode {mode}"
        )


def open_private(directory: Path) -> int:
    """Open a directory that belongs to this user alone; return the descriptor. Raises OSError."""
    if directory.is_symlink():
        raise NotPrivateError(directory, "it is a symbolic link")
    descriptor = os.open(directory, _DIRECTORY)
    try:
        _require_private(descriptor, directory, "700")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_private(path: Path) -> str:
    """Return the text of a file that belongs to this user alone. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, encoding="utf-8") as file:
        _require_private(descriptor, path, "600")
        return file.read()


def write_private(path: Path, text: str) -> None:
    """Write *text* to a new file that only this user can read. Raises OSError."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _require_private(descriptor: int, path: Path, mode: str) -> None:
    facts = os.fstat(descriptor)
    if facts.st_uid != os.geteuid():
        raise NotPrivateError(
            path, f"it belongs to the user with id {facts.st_uid}, not to this user"
        )
    if facts.st_mode & _OTHERS:
        problem = f"its mode is {stat.S_IMODE(facts.st_mode):04o}, so other users may use it"
        raise NotPrivateError(path, problem, shlex.join(["chmod", mode, str(path)]))


class OwnedDirectory:
    """A new directory in *parent* that only this user can read. Raises OSError."""

    def __init__(self, parent: Path, prefix: str) -> None:
        remove_stale(parent, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._lock = self._acquire_lock()

    def make_again(self) -> None:
        """Create the directory again after a cleaner removes it. Raises OSError."""
        make_private(self.path)
        os.close(self._lock)
        self._lock = self._acquire_lock()

    def close(self) -> None:
        """Remove the directory with all files."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()

    def _acquire_lock(self) -> int:
        """Lock the file; repeat the lock if a starting process has removed the file as left
        over.
        """
        while True:
            make_private(self.path)
            try:
                lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
            except FileNotFoundError:
                continue
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                return lock
            os.close(lock)


def remove_stale(parent: Path, prefix: str) -> None:
    """Remove directories of this user whose processes have ended."""
    for directory in parent.glob(f"{prefix}*"):
        try:
            opened = open_private(directory)
        except OSError:
            continue
        try:
            lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW, dir_fd=opened)
        except OSError:
            continue
        finally:
            os.close(opened)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # the process lives
        else:
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock)
