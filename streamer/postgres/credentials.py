"""Reads the current password of a connection string when a connection begins.

PostgreSQL checks a password only when a session begins, so a new password does not affect existing
sessions. Each new connection calls this module. After SIGHUP, `renew_password` reports changed
passwords, and the owners of the connections reconnect.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final
from weakref import WeakKeyDictionary

from streamer.postgres.conninfo import parse_conninfo, with_host_first, with_password_of
from streamer.postgres.password_source import (
    KnownPassword,
    PasswordSource,
    PasswordUnavailableError,
    keep_in_file,
    known_password,
    read_password_of,
    write_job_url,
)
from streamer.postgres.secret import Secret
from streamer.util.waiting import in_thread

_FILES_AT_ONCE: Final = 8
_COMMANDS_AT_ONCE: Final = 8
_SLOW_COMMANDS_AT_ONCE: Final = 2
_TARGETS_AT_ONCE: Final = 4
_threads: Final = ThreadPoolExecutor(
    _FILES_AT_ONCE + _COMMANDS_AT_ONCE + _SLOW_COMMANDS_AT_ONCE + _TARGETS_AT_ONCE,
    thread_name_prefix="password",
)
_RETRY_SECONDS: Final = 5.0
_ABANDONED_SECONDS: Final = 1.0


class _Reading:
    """The reading of a login's password. Connections that begin meanwhile await its end."""

    def __init__(self, url: Secret, source: PasswordSource, turn: asyncio.Semaphore) -> None:
        self._url = url
        self._source = source
        self._turn = turn
        self.has_begun = False
        self.task = asyncio.create_task(self._run(), name="password")

    async def _run(self) -> str:
        async with self._turn:
            self.has_begun = True
            return await self._read()

    async def _read(self) -> str:
        loop, abandoned = asyncio.get_running_loop(), threading.Event()
        ended = loop.run_in_executor(
            _threads, read_password_of, self._url.reveal(), self._source, abandoned
        )
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            abandoned.set()  # the command ends with its processes
            await asyncio.wait([ended], timeout=_ABANDONED_SECONDS)
            _retrieve(ended)
            raise


def _retrieve(ended: asyncio.Future[str]) -> None:
    """Keep asyncio from reporting a failure that no connection awaits."""
    if ended.done() and not ended.cancelled():
        ended.exception()


class _Readings:
    """The readings of an event loop, by login.

    A command that hangs delays only its own login. Files, the target, and commands whose last run
    hung are read independently.
    """

    def __init__(self) -> None:
        self._files = asyncio.Semaphore(_FILES_AT_ONCE)
        self._commands = asyncio.Semaphore(_COMMANDS_AT_ONCE)
        self._slow_commands = asyncio.Semaphore(_SLOW_COMMANDS_AT_ONCE)
        self._targets = asyncio.Semaphore(_TARGETS_AT_ONCE)
        self._by_login: dict[int, _Reading] = {}

    def current(self, url: Secret) -> _Reading | None:
        """Return the current reading."""
        return self._by_login.get(id(_known_password(url)))

    def begin(self, url: Secret, source: PasswordSource, state: KnownPassword) -> _Reading:
        """Return the current reading, or a new reading."""
        if (reading := self._by_login.get(id(state))) is None:
            reading = self._by_login[id(state)] = _Reading(url, source, self._turn(source, state))
            reading.task.add_done_callback(lambda _: self._by_login.pop(id(state)))
            reading.task.add_done_callback(_retrieve)  # all its connections may be cancelled
        return reading

    def _turn(self, source: PasswordSource, state: KnownPassword) -> asyncio.Semaphore:
        if state.goes_first:
            return self._targets
        if source.file is not None:
            return self._files
        return self._slow_commands if state.is_slow else self._commands


_readings: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, _Readings]] = WeakKeyDictionary()


def _readings_here() -> _Readings:
    return _readings.setdefault(asyncio.get_running_loop(), _Readings())


class ConnectionUrl(Secret):
    """A connection string whose password comes from a file or a command."""

    __slots__ = ("password_source",)

    def __init__(self, value: str, password_source: PasswordSource) -> None:
        super().__init__(value)
        self.password_source = password_source

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ConnectionUrl)
            and super().__eq__(other)
            and other.password_source == self.password_source
        )

    def __hash__(self) -> int:
        return hash((self.reveal(), self.password_source))


def _source(url: Secret) -> PasswordSource | None:
    return url.password_source if isinstance(url, ConnectionUrl) else None


def _known_password(url: Secret) -> KnownPassword:
    return known_password(url.reveal(), _source(url))


def has_password_source(url: Secret) -> bool:
    """Whether the password of *url* is in a file or comes from a command."""
    return isinstance(url, ConnectionUrl)


async def current_password(url: Secret, *, goes_first: bool = False) -> str | None:
    """Return the current password; None if *url* itself or libpq has it.

    *goes_first*: from now on, this login does not wait for passwords of sources. Raises
    PasswordUnavailableError.
    """
    source, state = _source(url), _known_password(url)
    if source is None:
        return state.replacement
    state.goes_first |= goes_first
    if state.valid is not None:
        return state.valid
    reading = _readings_here().begin(url, source, state)
    return await asyncio.shield(reading.task)


def awaited_password(url: Secret) -> str | None:
    """Return the reason why a connection by *url* still waits for its password; None without a
    wait.
    """
    source, reading = _source(url), _readings_here().current(url)
    if source is None or reading is None:
        return None
    if source.file is not None:
        return f"password_file {source.file}"
    if reading.has_begun:
        return "the output of its password_command"
    return "its turn to run password_command, after the commands of other connections"


def forget_password(url: Secret) -> bool:
    """Expire the cached password, so that the next connection reads the password again.

    Return whether a password was cached.
    """
    state = _known_password(url)
    had_one, state.expires_at = state.expires_at > 0, 0.0
    return had_one


async def renew_password(url: Secret) -> bool:
    """Read the password again; return whether connections use a different password.

    Then the `password_generation` of these connections is outdated. Raises
    PasswordUnavailableError.
    """
    if not has_password_source(url):
        return False
    state = _known_password(url)
    former = state.renewed
    forget_password(url)
    now = await current_password(url)
    # A recent connection may have read the new password already; older connections have the former
    # password.
    if former is None or former == now:
        return False
    state.renewed = now
    state.generation += 1
    return True


def is_same_login(former: Secret, now: Secret) -> bool:
    """Whether two urls differ only in their passwords, and both or neither have a password."""
    if has_password_source(former) or has_password_source(now):
        return former == now
    try:
        old, new = parse_conninfo(former.reveal()), parse_conninfo(now.reveal())
    except ValueError:
        return False
    passwords = old.pop("password", None), new.pop("password", None)
    return old == new and (passwords[0] is None) == (passwords[1] is None)


def replace_password(former: Secret, now: Secret) -> None:
    """Use the password of *now* for new connections by *former*, if the rest of both urls is equal.

    Then the `password_generation` of older connections is outdated.
    """
    if has_password_source(former) or not is_same_login(former, now):
        return
    state = _known_password(former)
    old = state.replacement or parse_conninfo(former.reveal()).get("password")
    password = parse_conninfo(now.reveal()).get("password")
    if password != old:
        state.replacement = password
        state.generation += 1


def password_state(url: Secret) -> KnownPassword:
    """Return the state of the password, which is a single object for the life of the process."""
    return _known_password(url)


def password_generation(url: Secret) -> int:
    """Return a number that increases when an operator has applied a changed password."""
    return _known_password(url).generation


async def job_url(
    url: Secret,
    environment: Mapping[str, str] | None = None,
    *,
    first_host: tuple[str, str] | None = None,
) -> str:
    """Return *url* for the file of a Spark job: a secret text that `open_job_url` reads.

    *environment*: see `with_password_of`. *first_host*: the host to try first. Raises
    PasswordUnavailableError.
    """
    password, text = await current_password(url), url.reveal()
    if first_host is not None:
        text = with_host_first(text, first_host)
    if password is None:
        return with_password_of(os.environ if environment is None else environment, text)
    source, kept_file = _source(url), None
    if source is not None and source.command is not None:
        kept_file = await in_thread(keep_in_file, url.reveal(), source)
    return write_job_url(text, password, source, kept_file)


@asynccontextmanager
async def passwords_renewed(*urls: Secret) -> AsyncIterator[None]:
    """Run the commands of *urls* again before their outputs expire, during a block.

    The tasks of a job read the outputs from files (`job_url`).
    """
    tasks = [
        asyncio.create_task(_renew(url, source), name="password of a job")
        for url in urls
        if (source := _source(url)) is not None and source.command is not None
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def _renew(url: Secret, source: PasswordSource) -> None:
    state = _known_password(url)
    while True:
        remaining = state.expires_at - time.monotonic() if state.expires_at else source.seconds
        await asyncio.sleep(max(remaining, min(_RETRY_SECONDS, source.seconds)))
        # The next pass runs the command again; until then tasks use the last output.
        with contextlib.suppress(PasswordUnavailableError):
            await current_password(url)
