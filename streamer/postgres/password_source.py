"""Reads passwords that are not part of a connection string: from a file or the output of a command.

Tasks of Spark also import this module, and read the password themselves, because a copy can outlast
a token.
"""

import atexit
import itertools
import json
import os
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from streamer.postgres.conninfo import add_password, parse_conninfo
from streamer.postgres.secret_command import (
    COMMAND_SECONDS,
    OUTPUT_BYTES_MAX,
    CommandError,
    run_secret_command,
)
from streamer.util.owned_directory import OwnedDirectory, read_private

COMMAND_VARIABLE: Final = "STREAMER_PASSWORD_COMMAND"
"""The variable, in the environment of an executor, that names the password command of a worker."""
_VARIABLES: Final = {
    "host": "PGHOST",
    "port": "PGPORT",
    "user": "PGUSER",
    "dbname": "PGDATABASE",
}


class PasswordUnavailableError(Exception):
    """A password cannot be read. The message contains neither password nor command."""


@dataclass(frozen=True, slots=True)
class PasswordSource:
    """The place of a password: a *file*, or a *command* whose output is valid for *seconds*."""

    file: str | None = None
    command: str | None = None
    seconds: float = 0.0


@dataclass(slots=True)
class KnownPassword:
    """The state of a password in this process."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    last: str | None = None
    """The password of the last connection."""
    renewed: str | None = None
    """The password at the beginning of this generation. Recent connections may use a newer
    password.
    """
    expires_at: float = 0.0
    """The end of validity of a command's output, on the monotonic clock."""
    replacement: str | None = None
    """The url's new password, if the url has changed since the process began."""
    generation: int = 0
    """The number of times that an operator changed the password."""
    command_seconds: float = 0.0
    """The duration of the last run of the command."""
    goes_first: bool = False
    """Whether this is the target's login, whose password reads have a separate limit. So password
    reads of sources do not delay this login.
    """
    file: Path | None = None
    """A file with the last output of the command, for tasks of jobs."""

    @property
    def valid(self) -> str | None:
        """The output of a command that is still valid."""
        return self.last if time.monotonic() < self.expires_at else None

    @property
    def is_slow(self) -> bool:
        """Whether the last run of the command hung, or almost did."""
        return self.command_seconds >= COMMAND_SECONDS / 2


_passwords: Final[dict[tuple[PasswordSource | None, tuple[str | None, ...]], KnownPassword]] = {}
_known_lock: Final = threading.Lock()


def known_password(url: str, source: PasswordSource | None) -> KnownPassword:
    """Return the state of the password for the server and role of *url*."""
    try:
        parameters = parse_conninfo(url)
    except ValueError:
        parameters = {}
    key = source, tuple(parameters.get(name) for name in (*_VARIABLES, "service"))
    with _known_lock:
        return _passwords.setdefault(key, KnownPassword())


def read_password_of(
    url: str, source: PasswordSource, abandoned: threading.Event | None = None
) -> str:
    """Return the current password for *url*. Blocks while a command runs.

    *abandoned*: see `run_secret_command`. Raises PasswordUnavailableError.
    """
    state = known_password(url, source)
    with state.lock:
        if source.file is not None:
            state.last = _read_file(Path(source.file))
        elif state.valid is None:
            assert source.command is not None
            began = time.monotonic()
            try:
                state.last = _run(source.command, url, abandoned)
            finally:
                state.command_seconds = time.monotonic() - began
            state.expires_at = time.monotonic() + source.seconds
            if state.file is not None:
                _write_file(state.file, state.last)
        assert state.last is not None
        if state.renewed is None:
            state.renewed = state.last
        return state.last


def _read_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(OUTPUT_BYTES_MAX + 1)
    except OSError as exc:
        raise PasswordUnavailableError(f"password_file {path}: {exc.strerror}") from None
    return _single_line(content, f"password_file {path}")


def _run(command: str, url: str, abandoned: threading.Event | None) -> str:
    parameters = parse_conninfo(url)
    variables = {
        variable: parameters[name] for name, variable in _VARIABLES.items() if name in parameters
    }
    try:
        output = run_secret_command(command, variables, abandoned)
    except CommandError as exc:
        raise PasswordUnavailableError(f"password_command: {exc}") from None
    return _single_line(output, "password_command")


def _single_line(content: bytes, place: str) -> str:
    """Return the only line. A file of several lines, such as a private key, is not a password."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise PasswordUnavailableError(f"{place}: the password is not UTF-8") from None
    lines = text.splitlines()
    if len(content) > OUTPUT_BYTES_MAX or len(lines) != 1 or not lines[0] or "\0" in text:
        raise PasswordUnavailableError(f"{place}: expected one line with the password")
    return lines[0]


# ---- jobs of Spark -------------------------------------------------------------------------------


_files: OwnedDirectory | None = None
_numbers: Final = itertools.count(1)


def keep_in_file(url: str, source: PasswordSource) -> Path:
    """Keep the output of the command for *url* in a file from now on; return the file.

    Only this user can read the file. Raises OSError.
    """
    global _files  # the directory lives as long as the process
    state = known_password(url, source)
    with state.lock:
        if state.file is None:
            with _known_lock:
                if _files is None:
                    parent = Path(tempfile.gettempdir())
                    _files = OwnedDirectory(parent, "streamer-passwords-")
                    atexit.register(_files.close)
                state.file = _files.path / str(next(_numbers))
        if state.last is not None:
            _write_file(state.file, state.last)
    return state.file


def _write_file(path: Path, password: str) -> None:
    """Replace the file atomically, so that a task reads either the old or the new password.

    An error of the disk has no effect here; then tasks use the password from the start of the job.
    """
    with suppress(OSError):
        if _files is not None and not path.parent.exists():  # a cleaner has removed the directory
            _files.make_again()
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(password)
        os.replace(name, path)


def write_job_url(
    url: str, password: str, source: PasswordSource | None, kept_file: Path | None = None
) -> str:
    """Return a secret text for the file of a Spark job, which `open_job_url` reads.

    The text contains the current password, and the path of the file with later passwords: the file
    that *source* names, or *kept_file* (see `keep_in_file`). The text has no command,
    because a process that could change the job's file could then run any program as this user.
    """
    now = add_password(url, password)
    if source is None:
        return now
    job: dict[str, Any] = {"url": url, "now": now, "file": source.file, "kept": None}
    if kept_file is not None:
        job |= {"kept": str(kept_file), "seconds": source.seconds}
    return json.dumps(job)


def open_job_url(text: str) -> str:
    """Return the connection string of a job with the current password.

    A worker of a cluster without file and command uses the password of the job's start.
    """
    if not text.startswith("{"):
        return text
    job = json.loads(text)
    try:
        password = _read_job_password(job)
    except (PasswordUnavailableError, OSError):
        return str(job["now"])
    return str(job["now"]) if password is None else add_password(job["url"], password)


def _read_job_password(job: dict[str, Any]) -> str | None:
    if job["file"] is not None:
        return read_password_of(job["url"], PasswordSource(job["file"]))
    if job["kept"] is None:
        return None
    if os.path.exists(job["kept"]):
        return read_private(Path(job["kept"]))
    command = os.environ.get(COMMAND_VARIABLE)
    if command is None:
        return None
    return read_password_of(job["url"], PasswordSource(None, command, job["seconds"]))
