"""Passwords that are not part of a connection string: in a file, or printed by a command.

Tasks of Spark import this module too. They read the password themselves, because a copy can outlast
a token.
"""

import json
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from streamer.postgres.conninfo import add_password, parse_conninfo

COMMAND_SECONDS: Final = 10.0
PASSWORD_BYTES_MAX: Final = 65536
"""A token of a cloud has up to 2 kB; larger files are no password files."""
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
    """The state of one password in this process."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    last: str | None = None
    """The password that the last connection got."""
    renewed: str | None = None
    """The password that the connections of this generation have, apart from new connections."""
    expires_at: float = 0.0
    """On the monotonic clock, for the output of a command."""
    replacement: str | None = None
    """A password that the url has got since the process began."""
    generation: int = 0
    """How often an operator has had the password renewed to another one."""


_known: Final[dict[tuple[PasswordSource | None, tuple[str | None, ...]], KnownPassword]] = {}
_known_lock: Final = threading.Lock()


def known_password(url: str, source: PasswordSource | None) -> KnownPassword:
    """Return the state of the password for the server and role of *url*."""
    try:
        given = parse_conninfo(url)
    except ValueError:
        given = {}
    key = source, tuple(given.get(name) for name in (*_VARIABLES, "service"))
    with _known_lock:
        return _known.setdefault(key, KnownPassword())


def read_password_of(url: str, source: PasswordSource) -> str:
    """Return the current password for *url*. Blocks while a command runs.

    Raises PasswordUnavailableError.
    """
    known = known_password(url, source)
    with known.lock:
        if source.file is not None:
            known.last = _read_file(Path(source.file))
        elif known.last is None or time.monotonic() >= known.expires_at:
            assert source.command is not None
            known.last = _run(source.command, url)
            known.expires_at = time.monotonic() + source.seconds
        if known.renewed is None:
            known.renewed = known.last
        return known.last


def _read_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(PASSWORD_BYTES_MAX + 1)
    except OSError as exc:
        raise PasswordUnavailableError(f"password_file {path}: {exc.strerror}") from None
    return _single_line(content, f"password_file {path}")


def _run(command: str, url: str) -> str:
    given = parse_conninfo(url)
    variables = {variable: given[name] for name, variable in _VARIABLES.items() if name in given}
    return _single_line(command_output(command, "password_command", variables), "password_command")


def command_output(command: str, setting: str, variables: Mapping[str, str]) -> bytes:
    """Return the output of a command, which runs without a shell. Blocks.

    *setting*: its name, for errors. *variables*: of its environment, beside streamer's own. Raises
    PasswordUnavailableError.
    """
    try:
        done = subprocess.run(
            shlex.split(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMMAND_SECONDS,
            check=False,
            env=os.environ | variables,
        )
    except subprocess.TimeoutExpired:
        problem = f"streamer ended it after {COMMAND_SECONDS:g} s"
        raise PasswordUnavailableError(f"{setting}: {problem}") from None
    except OSError as exc:
        raise PasswordUnavailableError(f"{setting}: {exc.strerror}") from None
    if done.returncode != 0:
        # Its messages may repeat a secret.
        problem = f"it ended with exit status {done.returncode}"
        raise PasswordUnavailableError(f"{setting}: {problem}")
    return done.stdout


def _single_line(content: bytes, place: str) -> str:
    """Return the only line. A file of several lines, such as a private key, is no password."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise PasswordUnavailableError(f"{place}: the password is not UTF-8") from None
    lines = text.splitlines()
    if len(content) > PASSWORD_BYTES_MAX or len(lines) != 1 or not lines[0] or "\0" in text:
        raise PasswordUnavailableError(f"{place}: expected one line with the password")
    return lines[0]


# ---- jobs of Spark -------------------------------------------------------------------------------


def write_job_url(url: str, password: str, source: PasswordSource | None) -> str:
    """Return a secret text for the file of a Spark job, which `open_job_url` reads.

    It has the password of now, and the place of the next ones.
    """
    now = add_password(url, password)
    if source is None:
        return now
    found: dict[str, Any] = {
        "url": url,
        "now": now,
        "file": source.file,
        "command": source.command,
        "seconds": source.seconds,
    }
    return json.dumps(found)


def open_job_url(text: str) -> str:
    """Return the connection string of a job with the password that is current now.

    A worker of a cluster that has neither file nor command takes the password of the job's start.
    """
    if not text.startswith("{"):
        return text
    found = json.loads(text)
    source = PasswordSource(found["file"], found["command"], found["seconds"])
    try:
        password = read_password_of(found["url"], source)
    except PasswordUnavailableError:
        return str(found["now"])
    return add_password(found["url"], password)
