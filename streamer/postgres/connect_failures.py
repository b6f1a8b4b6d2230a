"""The causes of failed connection attempts, from the messages of the drivers. Pure.

libpq reports no SQLSTATE, so the text is the only evidence. With several hosts, each host has a
separate error.
"""

import os
import re
from typing import Final

from streamer.errors.remedies import Remedy, join_remedies
from streamer.postgres.conninfo import TLS_HINT, TLS_WORDS
from streamer.postgres.session_refusals import RefusalKind, SessionLogin, find_refusal

_OF_HOST: Final = re.compile(r"^- host: ", re.MULTILINE)
"""Begins the error of a host in psycopg's message about several hosts."""
_LOST: Final = ("SSL SYSCALL error", "SSL connection has been closed", "unexpected eof")
"""Texts about a lost encrypted connection, whose cause is not the encryption."""
_STANDBY_TEXTS: Final = (
    "session is read-only",
    "server is in hot standby mode",
    "None of the hosts match the target attribute",
)
_POOLER_TEXTS: Final = ("unsupported startup parameter",)
_PRIMARY_TEXTS: Final = ("session is not read-only", "server is not in hot standby mode")

STANDBY_HINT: Final = (
    "the server is a standby: promote it with select pg_promote(), or list its primary in the url"
)
PRIMARY_HINT: Final = (
    "the server is a primary now: list its standby in the url, or write "
    "target_session_attrs=prefer-standby"
)
POOLER_HINT: Final = (
    "the url leads to a pooler, which does not pass this connection on: name the server in the url"
)


def _host_errors(text: str) -> list[str]:
    first, *of_hosts = _OF_HOST.split(text)
    return of_hosts or [first]


def _has(text: str, words: tuple[str, ...]) -> bool:
    return any(word in text for word in words)


def refusal_kind(text: str, state: str | None = None) -> RefusalKind | None:
    """Return the kind of cause for which servers refuse a session; None without such a cause.

    The cause is the login only if every host refuses the login. A host that is down, or a standby,
    may soon be the right host.
    """
    refusals = [find_refusal(message, state) for message in _host_errors(text)]
    kinds = {None if refusal is None else refusal.kind for refusal in refusals}
    if kinds == {RefusalKind.LOGIN}:
        return RefusalKind.LOGIN
    return RefusalKind.LIMIT if RefusalKind.LIMIT in kinds else None


def refusal_remedy(text: str, login: SessionLogin, state: str | None = None) -> Remedy | None:
    """Return the remedies for the hosts that refuse a session; None without such a host."""
    parts: dict[Remedy, None] = {}
    for message in _host_errors(text):
        if (refusal := find_refusal(message, state)) is not None:
            parts[refusal.remedy(message, login)] = None
    return join_remedies(parts)


def connect_hint(text: str) -> str | None:
    """Return the next step if the hosts are standbys, primaries or poolers, or lack TLS; None for
    different errors.
    """
    hints: dict[str, None] = {}
    for message in _host_errors(text):
        if _has(message, _STANDBY_TEXTS):
            hints[STANDBY_HINT] = None
        elif _has(message, _PRIMARY_TEXTS):
            hints[PRIMARY_HINT] = None
        elif _has(message, _POOLER_TEXTS):
            hints[POOLER_HINT] = None
        elif _has(message, TLS_WORDS) and not _has(message, _LOST):
            hints[TLS_HINT] = None
    return "; ".join(hints) or None


_CLOSED: Final = "server closed the connection unexpectedly"
"""libpq's message. asyncpg shows the error of the socket, or names a call of its own."""
_ASYNCPG_CLOSED: Final = frozenset(
    {"unexpected connection_lost() call", "connection was closed in the middle of operation"}
)


def first_line(error: BaseException) -> str:
    """Return the first line of a driver's message: later lines are context that may show values."""
    if isinstance(error, ConnectionResetError | BrokenPipeError) or str(error) in _ASYNCPG_CLOSED:
        return _CLOSED
    if isinstance(error, TimeoutError) and not str(error):
        return "timed out"
    if isinstance(error, OSError) and error.strerror:
        return _as_libpq(error) or error.strerror
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


_CALL_FAILED: Final = re.compile(r"Connect call failed \('([^']+)', (\d+)(?:, \d+)*\)")
"""asyncio's text for a connection that a server refuses."""


def _as_libpq(error: OSError) -> str | None:
    """Return the message of a failed connection in libpq's form; None for any different error."""
    match = _CALL_FAILED.fullmatch(error.strerror or "")
    if match is None or error.errno is None:
        return None
    host, port = match.groups()
    reason = os.strerror(error.errno)
    return f'connection to server at "{host}", port {port} failed: {reason}'
