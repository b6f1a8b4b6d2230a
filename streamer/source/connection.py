"""Connections to a source, and the translation of driver errors.

A source's url may have every parameter of libpq, because libpq connects. This module alone
translates the driver's errors.
"""

import re
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import DictRow, dict_row

from streamer.errors.connection_limits import SourceConnectionLimitError
from streamer.errors.error_classes import (
    SlotInUseError,
    SlotMissingError,
    SnapshotExpiredError,
    SourceConfigurationError,
    SourceConnectionError,
    SourceContentionError,
    SourceError,
    SourceLimitError,
    SourcePasswordError,
    SourceRejectedError,
    SourceUnreadyError,
    StreamerError,
)
from streamer.errors.remedies import Remedy, join_remedies
from streamer.mapping.rules import SourceMapping
from streamer.postgres import pooler, session_settings
from streamer.postgres.connect_failures import connect_hint, refusal_kind, refusal_remedy
from streamer.postgres.conninfo import has_several_hosts, with_host_first
from streamer.postgres.credentials import (
    current_password,
    forget_password,
    has_password_source,
    job_url,
)
from streamer.postgres.password_source import PasswordUnavailableError
from streamer.postgres.quoting import quote_literal
from streamer.postgres.row_values import quote_unrecognized
from streamer.postgres.secret import Secret
from streamer.postgres.server_limits import limit_hint
from streamer.postgres.session_refusals import RefusalKind, SessionLogin
from streamer.postgres.sqlstate import PRIVILEGE_HINT, Meaning, is_catalog_race, meaning
from streamer.source.synchronous_commit import COMMIT_AT_ONCE_SQL

Connection = psycopg.AsyncConnection[DictRow]

_CONNECTION_DEFAULTS: Final = {
    "connect_timeout": "10",
    **{name: str(value) for name, value in session_settings.KEEPALIVES.items()},
}

_BY_SQLSTATE: Final[dict[str, type[StreamerError]]] = {
    "40001": SourceContentionError,  # serialization_failure
    "40P01": SourceContentionError,  # deadlock_detected
    "55P03": SourceContentionError,  # lock_not_available
    "55006": SlotInUseError,  # object_in_use
    "42704": SlotMissingError,  # undefined_object
}
_BY_MEANING: Final[dict[Meaning, type[StreamerError]]] = {
    Meaning.LOST: SourceConnectionError,
    Meaning.BUSY: SourceConnectionError,
    Meaning.REJECTED: SourceRejectedError,
}
_BY_REFUSAL: Final[dict[RefusalKind | None, type[StreamerError]]] = {
    RefusalKind.LOGIN: SourceRejectedError,
    RefusalKind.LIMIT: SourceConnectionLimitError,
}

_HINTS: Final = {
    "42501": PRIVILEGE_HINT,
    "57P01": "if an operator ended the session, do nothing; if the server stops, start the server",
}
SESSIONS_EACH: Final = 3
"""Sessions for each source beside its walsender: guard, observations, backlog or start."""
COPY_SESSIONS: Final = 2
"""Sessions at the source for each source that copies: its snapshot, and the lock on a table."""
_NEEDS: Final = (
    f"{SESSIONS_EACH + 1} connections for each source, and {COPY_SESSIONS} and `sync.jobs` more "
    "for a copy"
)

# "invalid memory alloc request size 1200000003" has the SQLSTATE of internal errors.
_ALLOCATION: Final = re.compile(r"invalid memory alloc|string buffer", re.IGNORECASE)


def first_line(error: BaseException) -> str:
    """Return the first line of a driver's message. Further lines are context, which may show
    values.
    """
    if isinstance(error, psycopg.Error) and error.diag.message_primary:
        return error.diag.message_primary
    lines = str(error).removeprefix("connection failed: ").strip().splitlines()
    return lines[0] if lines else type(error).__name__


def translate(error: psycopg.Error, label: str) -> StreamerError:
    """Translate a driver error of source *label*."""
    state = error.sqlstate
    message = f'source "{label}": {first_line(error)}'
    if state is None:
        return _translate_without_sqlstate(error, message)
    if state == "22023" and "snapshot" in message:
        return SnapshotExpiredError(message)
    if state == "55000" and "wal_level" in message:
        return SourceUnreadyError(
            message, hint="set wal_level = logical in postgresql.conf and restart that server"
        )
    if state == "54000" or _ALLOCATION.search(message):
        return SourceLimitError(f"{message}: a row is larger than 1 GB, the limit of the source")
    hint = limit_hint(f"{message} {error.diag.message_hint or ''}")
    # configuration_limit_exceeded; and out_of_memory, if a setting limits the shared memory
    if state == "53400" or (state == "53200" and hint is not None):
        return SourceUnreadyError(message, hint=hint)
    if is_catalog_race(state, first_line(error)):
        return SourceContentionError(message)
    means = meaning(state, error.diag.severity_nonlocalized)
    kind = _BY_SQLSTATE.get(state) or _BY_MEANING.get(means, SourceError)
    text = quote_unrecognized(first_line(error), state, error.diag.context)
    hint = _HINTS.get(state)
    if "snapshot too large" in text:  # "initial slot snapshot too large"
        hint = "too many transactions ran while the source created a slot; streamer tries again"
    return kind(f'source "{label}": {text}', hint=hint)


def _translate_without_sqlstate(error: psycopg.Error, message: str) -> StreamerError:
    # libpq reports a failed connection attempt as text, without SQLSTATE.
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        kind = _BY_REFUSAL.get(refusal_kind(str(error)), SourceConnectionError)
        return kind(message, hint=connect_hint(str(error)))
    return SourceError(message)


@contextmanager
def translating(label: str) -> Iterator[None]:
    """Translate every driver error raised inside."""
    try:
        yield
    except psycopg.Error as exc:
        raise translate(exc, label) from exc


def require_configured(source: SourceMapping) -> None:
    """Raise SourceConfigurationError if a variable or a password of *source* is missing."""
    if source.fault is not None:
        raise SourceConfigurationError(
            f'source "{source.label}": {source.fault.problem}', hint=source.fault.hint
        )


_first_hosts: Final[dict[Secret, tuple[str, str]]] = {}
"""The host that each connection tries first, by url."""


def put_host_first(source: SourceMapping, host: tuple[str, str]) -> None:
    """Make later connections to *source* first try the given host and port of its url."""
    _first_hosts[source.url] = host


def conninfo(source: SourceMapping, **parameters: str) -> str:
    """Return *source*'s connection string with streamer's defaults, which *parameters* override.

    Raises SourceConfigurationError.
    """
    require_configured(source)
    url = source.url.reveal()
    if (first := _first_hosts.get(source.url)) is not None:
        url = with_host_first(url, first)
    from_url = {k: str(v) for k, v in conninfo_to_dict(url).items() if v is not None}
    defaults = _CONNECTION_DEFAULTS | {"application_name": f"streamer {source.label}"}
    return make_conninfo(**(defaults | from_url | {"client_encoding": "UTF8"} | parameters))


_PASSWORD_REFUSAL: Final = "authentication failed"


def _password_error(source: SourceMapping, problem: str) -> SourcePasswordError:
    place = source.url_place or "its url"
    hint = f"check the role's password and {place}; each attempt reads the password again"
    return SourcePasswordError(f'source "{source.label}": {problem}', hint=hint)


async def _password(source: SourceMapping) -> dict[str, str]:
    try:
        password = await current_password(source.url)
    except PasswordUnavailableError as exc:
        raise _password_error(source, str(exc)) from None
    return {} if password is None else {"password": password}


async def login_of_source(source: SourceMapping) -> str:
    """Return the url of *source* for a Spark job, as `job_url` does. Raises SourcePasswordError."""
    try:
        return await job_url(source.url, first_host=_first_hosts.get(source.url))
    except PasswordUnavailableError as exc:
        raise _password_error(source, str(exc)) from None


async def _log_in(source: SourceMapping, parameters: dict[str, str]) -> Connection:
    return await psycopg.AsyncConnection.connect(
        conninfo(source, **parameters, **await _password(source)),
        autocommit=True,
        row_factory=dict_row,
        prepare_threshold=None,
    )


@contextmanager
def _advising(source: SourceMapping) -> Iterator[None]:
    """Add the remedy to the error of a session that the server refuses."""
    try:
        yield
    except (SourceRejectedError, SourceConnectionError) as exc:
        if isinstance(exc.__cause__, psycopg.Error) and not isinstance(exc, SourcePasswordError):
            place = source.url_place
            login = SessionLogin("source", source.url, place or "the url", _NEEDS)
            remedy = refusal_remedy(str(exc.__cause__), login, exc.__cause__.sqlstate)
            if place and place in str(remedy):
                restart = "; restart `streamer run` after a change of url or variable"
                remedy = Remedy.of(remedy, restart)
            exc.remedy = join_remedies(filter(None, (remedy, exc.remedy)))
        raise


def _pin_sql(connection: Connection) -> str:
    info = connection.info
    is_superuser = info.parameter_status("is_superuser")
    return session_settings.pin_sql(version=info.server_version, is_superuser=is_superuser)


ANYWHERE: Final[Mapping[str, str]] = {}
AT_PRIMARY: Final = {"target_session_attrs": "primary"}


async def connect(
    source: SourceMapping, *, replication: bool = False, at: Mapping[str, str] = ANYWHERE
) -> Connection:
    """Connect to *source* with settings pinned; with *replication*, as a logical walsender.

    *at*: parameters that choose among the hosts of the url; they override the url's parameters.

    Raises SourceConnectionError, SourceRejectedError, SourceConfigurationError; also
    SourcePasswordError if the password comes from a file or a command.
    """
    parameters: dict[str, str] = {"replication": "database"} if replication else {}
    parameters |= at
    with _advising(source), translating(source.label):
        try:
            connection = await _log_in(source, parameters)
        except psycopg.OperationalError as exc:
            if not has_password_source(source.url) or _PASSWORD_REFUSAL not in str(exc):
                raise
            if not forget_password(source.url):
                raise _password_error(source, first_line(exc)) from exc
            # The cached password may have been revoked before it expired.
            try:
                connection = await _log_in(source, parameters)
            except psycopg.OperationalError as again:
                raise _password_error(source, first_line(again)) from again
        try:
            pinned = f"{_pin_sql(connection)}; {COMMIT_AT_ONCE_SQL}; {pooler.PID_SQL}"
            cursor = await connection.execute(pinned.encode())
            while cursor.nextset():
                pass
            is_pooled = not replication and await _is_pooled(
                source, parameters, connection, await cursor.fetchone()
            )
        except BaseException:
            await connection.close()
            raise
    if is_pooled:
        await connection.close()
        raise SourceRejectedError(f'source "{source.label}": {pooler.POOLED}', hint=pooler.HINT)
    return connection


async def _is_pooled(
    source: SourceMapping,
    parameters: dict[str, str],
    connection: Connection,
    row: DictRow | None,
) -> bool:
    """Whether the connection passes a pooler in transaction mode; *row* has the pid of the server's
    process.
    """
    assert row is not None
    if not pooler.needs_mode_check(source.url, connection.info.backend_pid, row["pid"]):
        return False

    async def ask(session: Connection, sql: str) -> int:
        return int((await fetch_one(session, sql))["pid"])

    async def begin(sql: str) -> None:
        await second.execute(sql.encode())

    second = await _log_in(source, parameters)
    try:
        return await pooler.shares_sessions(
            source.url, row["pid"], partial(ask, connection), partial(ask, second), begin
        )
    finally:
        await second.close()


@asynccontextmanager
async def connection(
    source: SourceMapping, *, replication: bool = False, at: Mapping[str, str] = ANYWHERE
) -> AsyncIterator[Connection]:
    """Connect during a block, and translate the block's errors."""
    connected = await connect(source, replication=replication, at=at)
    try:
        with translating(source.label):
            yield connected
    finally:
        await connected.close()


def is_standby(connection: Connection) -> bool:
    """Return whether the server is a standby now; False before PostgreSQL 14."""
    return connection.info.parameter_status("in_hot_standby") == "on"


def names_several_hosts(source: SourceMapping) -> bool:
    """Return whether the url of *source* lists more than one host."""
    return has_several_hosts(source.url.reveal())


UNCONVERTIBLE: Final = ("22P05", "22021")
"""SQLSTATEs of text that the server cannot convert: untranslatable or not in the repertoire."""


def has_any_text(connection: Connection) -> bool:
    """Return whether the server's text may have any encoding, because the database's encoding is
    SQL_ASCII.
    """
    return connection.info.parameter_status("server_encoding") == "SQL_ASCII"


async def as_stored(connection: Connection, command: str) -> bytes:
    """Return *command* in the encoding of the server, as `pass_bytes` requires."""
    if command.isascii():
        return command.encode()
    encoding = connection.info.parameter_status("server_encoding") or "UTF8"
    literal = quote_literal(command)
    row = await fetch_one(
        connection, f"select pg_catalog.convert_to({literal}, {quote_literal(encoding)}) as stored"
    )
    return bytes(row["stored"])


async def pass_bytes(connection: Connection) -> None:
    """Make the server send stored text unchanged, unless the text is UTF-8.

    For a different client encoding the server would validate or convert the text. A character
    without an equivalent would then end the stream of all tables. From now on, text in results is
    bytes.
    """
    if connection.info.parameter_status("server_encoding") != "UTF8":
        await connection.execute("set client_encoding to 'SQL_ASCII'")


_REPEATS: Final = sys.maxsize
_GENERIC_PLANS_SQL: Final = "set plan_cache_mode = force_generic_plan"


async def plan_once(connection: Connection) -> None:
    """Make the server plan each query with parameters once, for a session that repeats queries.

    The plan of a query over catalogs costs several times as much as the query.
    """
    await connection.execute(_GENERIC_PLANS_SQL)
    connection.prepare_threshold = _REPEATS  # only `fetch_all` prepares


async def fetch_all(connection: Connection, sql: Any, *parameters: Any) -> list[DictRow]:
    """Run a query and return the rows as dictionaries."""
    cursor = await connection.execute(sql, parameters or None, prepare=bool(parameters))
    return await cursor.fetchall()


async def fetch_one(connection: Connection, sql: Any, *parameters: Any) -> DictRow:
    """Run a query that returns exactly one row."""
    (row,) = await fetch_all(connection, sql, *parameters)
    return row
