"""The file of the mapping database, as seen by a process that runs on this database.

SQLite continues to write to a deleted or replaced file, whose changes end with the process. SQLite
also serves pages of a damaged file from the cache. So this module checks the identity of the file
before every change, and the content after every write.

A restored file is valid again. A damaged file is not, because the connections of this process may
hold pages of either state: only a restart discards these pages.
"""

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Final
from urllib.parse import quote

from streamer.errors.remedies import Remedy, run
from streamer.mapping.lost_mapping import MappingProblem, save_mapping

_BUSY_SECONDS: Final = 1.0

FileIdentity = tuple[int, int]
"""Device and inode of a file."""


class MappingFile:
    """The file at *path*; a missing file is created for its owner alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage: str | None = None
        """SQLite's description of the damage; stays until the process ends."""
        self._identity = _create_file(path)
        self._examined: list[tuple[int, int]] | None = None

    def check(self, *, is_thorough: bool) -> MappingProblem | None:
        """Return the problem of the file; None for an intact file.

        *is_thorough*: also examine the content, if the file has changed since the last examination.
        """
        loss = _describe_loss(self.path, self._identity)
        if loss is not None:
            return _file_problem(
                self.path, loss, Remedy.of("then put the file back, or stop streamer, ", _restore())
            )
        if is_thorough and self.damage is None:
            versions = [_version(self.path), _version(self.path.with_name(f"{self.path.name}-wal"))]
            if versions != self._examined:
                self.damage = find_damage(self.path)
                self._examined = versions
        if self.damage is not None:
            alternative = "; or restore a backup of the file with its .key and restart"
            advice = Remedy.of("then stop streamer, ", _restore(), alternative)
            return _file_problem(self.path, f"is damaged ({self.damage})", advice)
        return None


def find_damage(path: Path) -> str | None:
    """Return SQLite's finding about the content of a file; None for a sound or busy file."""
    uri = f"file:{quote(str(path.absolute()))}?mode=rw"
    try:
        with contextlib.closing(
            sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS)
        ) as connection:
            for (line,) in connection.execute("pragma quick_check(1)"):
                if line != "ok":
                    return " ".join(str(line).split())
            # An empty file is a database, too.
            connection.execute("select max(number) from migration").fetchall()
    except sqlite3.DatabaseError as exc:
        if is_busy(exc):
            return None
        return str(exc)
    return None


def is_damage(error: BaseException | None) -> bool:
    """Return whether an error of SQLite means that the file is damaged."""
    return _primary_code(error) in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)


def is_busy(error: BaseException | None) -> bool:
    """Return whether an error of SQLite means that another connection has a lock."""
    return _primary_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _primary_code(error: BaseException | None) -> int:
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return 0 if code is None else code & 0xFF


def damage_remedy() -> Remedy:
    """Return the remedy of a damaged file, for commands."""
    return Remedy.of(
        "if streamer run still runs, save its mapping: ",
        save_mapping(),
        ", and stop streamer. Then ",
        _restore(),
        ". Or restore a backup of the file with its .key. Progress and slots stay",
    )


def _restore() -> Remedy:
    return Remedy.of(
        "move the file with its -wal and -shm away, start streamer run, and run: ",
        run("import", "backup.yaml"),
        ", then ",
        run("apply"),
    )


def _file_problem(path: Path, state: str, advice: Remedy) -> MappingProblem:
    return MappingProblem(
        f"mapping database {path} {state} while this process runs; streaming continues, and "
        "streamer refuses changes to the mapping",
        Remedy.of("save the mapping of this process: ", save_mapping(), "; ", advice),
    )


def _create_file(path: Path) -> FileIdentity:
    """Create a missing file, whose mode SQLite gives to the journal, too; return the identity."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    status = path.stat()
    return status.st_dev, status.st_ino


def _describe_loss(path: Path, identity: FileIdentity) -> str | None:
    """Return how the file at *path* was lost; None for a file with *identity*."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return "was deleted"
    except OSError as exc:
        return f"is unreachable ({exc.strerror})"
    if (status.st_dev, status.st_ino) != identity:
        return "was replaced by another file"
    return None


def _version(path: Path) -> tuple[int, int]:
    """Return a fingerprint that changes with every write to a file."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size
