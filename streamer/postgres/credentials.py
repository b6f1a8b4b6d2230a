"""The passwords of connection strings, as they are current when a connection begins.

PostgreSQL checks a password only when a session begins, so a new one changes nothing for the
sessions that are there. Each new connection asks this module. After SIGHUP, `renew_password`
reports the passwords that have changed, and the owners of their connections reconnect.
"""

import asyncio
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from streamer.postgres.conninfo import parse_conninfo, with_host_first, with_password_of
from streamer.postgres.password_source import (
    KnownPassword,
    PasswordSource,
    known_password,
    read_password_of,
    write_job_url,
)
from streamer.postgres.secret import Secret

# Commands of a slow vault would occupy the threads that write spool files.
_threads: Final = ThreadPoolExecutor(8, thread_name_prefix="password")


class ConnectionUrl(Secret):
    """A connection string whose password comes from elsewhere."""

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


def _known(url: Secret) -> KnownPassword:
    return known_password(url.reveal(), _source(url))


def has_password_source(url: Secret) -> bool:
    """Whether the password of *url* is in a file or comes from a command."""
    return isinstance(url, ConnectionUrl)


async def current_password(url: Secret) -> str | None:
    """Return the current password; None if *url* itself or libpq has it.

    Raises PasswordUnavailableError.
    """
    source = _source(url)
    if source is None:
        return _known(url).replacement
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_threads, read_password_of, url.reveal(), source)


def forget_password(url: Secret) -> bool:
    """Let the next connection run the command again; return whether its output was kept."""
    known = _known(url)
    had_one, known.expires_at = known.expires_at > 0, 0.0
    return had_one


async def renew_password(url: Secret) -> bool:
    """Read the password again; return whether connections use another one.

    Their `password_generation` is outdated then. Raises PasswordUnavailableError.
    """
    if not has_password_source(url):
        return False
    known = _known(url)
    before = known.renewed
    forget_password(url)
    now = await current_password(url)
    # A connection that began a moment ago may have read it already; the others have the former one.
    if before is None or before == now:
        return False
    known.renewed = now
    known.generation += 1
    return True


def is_same_login(before: Secret, now: Secret) -> bool:
    """Whether two urls differ at most in their passwords, and both or neither have one."""
    if has_password_source(before) or has_password_source(now):
        return before == now
    try:
        old, new = parse_conninfo(before.reveal()), parse_conninfo(now.reveal())
    except ValueError:
        return False
    passwords = old.pop("password", None), new.pop("password", None)
    return old == new and (passwords[0] is None) == (passwords[1] is None)


def replace_password(before: Secret, now: Secret) -> None:
    """Let new connections by *before* use the password in *now*, if all else is equal.

    The `password_generation` of the others is outdated then.
    """
    if has_password_source(before) or not is_same_login(before, now):
        return
    known = _known(before)
    old = known.replacement or parse_conninfo(before.reveal()).get("password")
    password = parse_conninfo(now.reveal()).get("password")
    if password != old:
        known.replacement = password
        known.generation += 1


def password_generation(url: Secret) -> int:
    """Return a number that grows when an operator has a changed password taken over."""
    return _known(url).generation


async def job_url(
    url: Secret,
    environment: Mapping[str, str] | None = None,
    *,
    first_host: tuple[str, str] | None = None,
) -> str:
    """Return *url* for the file of a Spark job: a secret text that `open_job_url` reads.

    *environment*: see `with_password_of`. *first_host*: the one to try before the others. Raises
    PasswordUnavailableError.
    """
    password, text = await current_password(url), url.reveal()
    if first_host is not None:
        text = with_host_first(text, first_host)
    if password is None:
        return with_password_of(os.environ if environment is None else environment, text)
    return write_job_url(text, password, _source(url))
