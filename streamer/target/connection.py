"""Connections to the target: a typed interface to asyncpg.

Only this module and `streamer.target.driver_errors` import asyncpg.
"""

import asyncio
import contextlib
import socket
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

import asyncpg
import structlog
from asyncpg import connect_utils

from streamer.errors.error_classes import (
    SettingsError,
    StreamerError,
    TargetConnectionError,
    TargetError,
    TargetMovedError,
    TargetPasswordError,
    TargetRejectedError,
)
from streamer.postgres import pooler, replication_origin, session_settings
from streamer.postgres.connect_failures import first_line
from streamer.postgres.conninfo import parse_conninfo, several_hosts
from streamer.postgres.credentials import (
    current_password,
    forget_password,
    has_password_source,
    job_url,
    password_state,
)
from streamer.postgres.password_source import PasswordUnavailableError
from streamer.postgres.quoting import quote_identifier, quote_qualified
from streamer.postgres.secret import Secret
from streamer.postgres.session_refusals import SessionLogin
from streamer.target import url_parameters
from streamer.target.array_types import OWN_ARRAYS, own_array
from streamer.target.driver_errors import DRIVER_ERRORS, translate, translating
from streamer.target.failed_logins import failed_login
from streamer.target.fencing_token import FENCE_SQL, TOKEN_SQL, FencingToken
from streamer.target.silent_server import Activity, SilenceMonitor, Unreachable, activity_sql
from streamer.target.whole_message import WholeMessage, copy_data

log = structlog.get_logger()

CONNECT_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class TargetAddress:
    """The target's address: a libpq connection string translated for asyncpg.

    With a *fence*, a connection must reach the server of that token. *url*: the configured url,
    with the current password.
    """

    dsn: Secret
    """The connection string of the first host."""
    url: Secret
    connect_seconds: float
    socket_options: dict[str, int] = field(default_factory=dict)
    fence: FencingToken | None = None
    further_dsns: tuple[Secret, ...] = ()
    """The connection strings of the hosts after the first, in the order of the url."""
    needs: str = ""
    """The connections that `run` needs, in words; empty if unknown."""

    @classmethod
    def parse(cls, url: Secret, needs: str = "") -> "TargetAddress":
        """Translate *url*; raises SettingsError for a parameter that asyncpg cannot honor."""
        try:
            stated = parse_conninfo(url.reveal())
            hosts = several_hosts(stated)
        except ValueError as exc:
            raise SettingsError(f"target.url: {exc}") from None
        parameters = url_parameters.passed(stated)
        timeout = float(stated.get("connect_timeout", CONNECT_SECONDS)) or CONNECT_SECONDS
        sockets = url_parameters.of_sockets(stated)
        # asyncpg limits the time for all hosts together, and takes the first refusal as final. A
        # machine that vanished, or a server that starts up, would hide its standby.
        of_hosts = [{"host": host, "port": port} for host, port in hosts] or [{}]
        first, *further = (
            Secret(f"postgresql://?{urlencode(parameters | of_host)}") for of_host in of_hosts
        )
        return cls(first, url, timeout, sockets, further_dsns=tuple(further), needs=needs)


class _TLSUpgrade(connect_utils.TLSUpgradeProto):  # type: ignore[misc]
    """asyncpg's TLS request, whose answer no task needs to await.

    A connection attempt that is cancelled or times out before the request is sent leaves a future
    with the error of the lost connection. Without a reader, asyncio logs that error as unretrieved.
    """

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if not self.on_data.cancelled():
            self.on_data.exception()  # marks the error as retrieved; an awaiting task still gets it


connect_utils.TLSUpgradeProto = _TLSUpgrade


@contextmanager
def _translating_login(address: TargetAddress) -> Iterator[None]:
    """Translate the driver error of a failed connection attempt, with the remedy."""
    try:
        yield
    except DRIVER_ERRORS as exc:
        login = SessionLogin("target", address.url, "target.url", address.needs)
        state = getattr(exc, "sqlstate", None)
        raise failed_login(translate(exc), first_line(exc), state, login) from exc


Record = Mapping[str, Any]


class _Introspected(NamedTuple):
    """Replaces the statement of the driver's type introspection.

    If the replaced statement has no name, the driver prepares the user's statement again.
    """

    name: str = "none"


class _DriverConnection(asyncpg.Connection):  # type: ignore[misc]
    """A connection of the driver with the array types of streamer's statements in advance.

    The driver would read an array's type at its first use in each session, which takes three
    statements and 15 ms.
    """

    async def _introspect_types(self, typeoids: Collection[int], *rest: Any) -> Any:
        if OWN_ARRAYS.keys() >= set(typeoids):
            return [own_array(oid) for oid in typeoids], _Introspected()
        return await super()._introspect_types(typeoids, *rest)


class TargetConnection:
    """A connection to the target, with pinned settings, for a single task at a time."""

    def __init__(self, connection: "asyncpg.Connection", address: TargetAddress) -> None:
        self._connection = connection
        self._before = ""
        self._rows_before: list[bytes] = []
        """The rows of the COPY statements among the statements of `_before`."""
        self.ended_tags: list[bytes] = []
        """The command tags of the finished statements, for a transaction sent as one message."""
        self._has_origin = False
        self._is_lost = False
        self.checks_foreign_keys = True
        """Whether the server checks foreign keys for rows of this session."""
        self._verified: dict[int, FencingToken] = {}
        self._lock_session: str | None = None
        self._password = password_state(address.url)
        self._password_generation = self._password.generation
        self.backend_pid = int(connection.get_server_pid())
        self._protocol = connection._protocol
        connection.add_termination_listener(lambda _: self._lost())
        self._watch = SilenceMonitor(
            lambda: _read_activity(address, self.backend_pid),
            self.terminate,
            self._unsent_bytes,
        )

    @classmethod
    async def connect(
        cls, address: TargetAddress, application_name: str, *, applies: bool = False
    ) -> "TargetConnection":
        """Connect and pin settings; with *applies*, also set up the session for applying changes.

        Raises TargetConnectionError, TargetRejectedError.
        """
        generation = password_state(address.url).generation
        with _translating_login(address):
            raw = await _log_in(address, {"application_name": application_name[:63]})
        with translating():
            connection = cls(raw, address)
            connection._password_generation = generation
            try:
                connection._set_socket_options(address.socket_options)
                await connection._pin(applies)
                await connection._require_own_session(address)
                if address.fence is not None:
                    await connection.verify_fence(address.fence)
            except BaseException:
                raw.terminate()
                raise
        return connection

    async def _require_own_session(self, address: TargetAddress) -> None:
        """Refuse a pooler in transaction mode. Raises TargetRejectedError."""
        dsn, pid, raw = address.dsn, self.backend_pid, self._connection
        if not pooler.needs_mode_check(dsn, int(raw.get_server_pid()), pid):
            return
        with _translating_login(address):
            peer = await _log_in(address, {})
        try:
            if await pooler.shares_sessions(dsn, pid, raw.fetchval, peer.fetchval, peer.execute):
                raise TargetRejectedError(f"target: {pooler.POOLED}", hint=pooler.HINT)
        finally:
            peer.terminate()

    def has_verified(self, fence: FencingToken) -> bool:
        """Whether this session has been on the server of *fence*."""
        return self._verified.get(fence.source_id) == fence

    async def verify_fence(self, fence: FencingToken, *, again: bool = False) -> None:
        """Check that this session is on the server of *fence*.

        A session stays on its server, so a single check suffices. *again*: also check that the
        token is still valid. Raises TargetMovedError.
        """
        if fence.lock_session != self._lock_session:
            is_valid = await self.fetch_value(FENCE_SQL, *fence.parameters)
        elif again or not self.has_verified(fence):
            is_valid = await self.fetch_value(TOKEN_SQL, fence.source_id, fence.token)
        else:
            return
        if not is_valid:
            raise TargetMovedError(
                "target: this connection does not reach the server on which this process holds "
                "the source's lock",
                fences=[fence],
            )
        self._verified[fence.source_id] = fence
        self._lock_session = fence.lock_session

    @property
    def is_outdated(self) -> bool:
        """Whether an operator has renewed the password since this connection began."""
        return self._password.generation != self._password_generation

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call *callback* when either side closes the connection."""
        self._connection.add_termination_listener(lambda *_: callback())

    def _unsent_bytes(self) -> int:
        transport = self._connection._transport
        return 0 if transport is None else int(transport.get_write_buffer_size())

    def _set_socket_options(self, stated: dict[str, int]) -> None:
        endpoint = self._connection._transport.get_extra_info("socket")
        if endpoint is None or endpoint.family == socket.AF_UNIX or stated.get("keepalives") == 0:
            return
        endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        values = session_settings.KEEPALIVES | stated
        for option, name in (
            ("TCP_KEEPIDLE", "keepalives_idle"),
            ("TCP_KEEPINTVL", "keepalives_interval"),
            ("TCP_KEEPCNT", "keepalives_count"),
            ("TCP_USER_TIMEOUT", "tcp_user_timeout"),
        ):
            if hasattr(socket, option):
                level = getattr(socket, option)
                endpoint.setsockopt(socket.IPPROTO_TCP, level, values[name])

    async def _pin(self, applies: bool) -> None:
        settings = dict(session_settings.PINNED)
        if applies:
            settings |= session_settings.APPLY
        is_superuser = getattr(self._connection.get_settings(), "is_superuser", None)
        pinned = session_settings.pin_sql(
            settings, version=self.server_version, is_superuser=is_superuser
        )
        await self._connection.execute(pinned)
        # remote_apply is stronger than on, and stays. A weaker setting could lose acknowledged
        # changes.
        self.backend_pid = await self._connection.fetchval(
            "select pg_backend_pid(), case when current_setting('synchronous_commit') <>"
            " 'remote_apply' then set_config('synchronous_commit', 'on', false) end"
        )
        if applies:
            with contextlib.suppress(asyncpg.InsufficientPrivilegeError):
                await self._connection.execute("set session_replication_role = replica")
                self.checks_foreign_keys = False
            await self.set_up_origin()

    async def set_up_origin(self) -> None:
        """Tag the session's later transactions as replicated, if the role may.

        Callers end such transactions with `commit`. A session keeps its origin.
        """
        if self._has_origin:
            return
        with translating():
            await self._connection.execute(replication_origin.SET_UP_SQL)
            row = await self._connection.fetchrow(replication_origin.RESULT_SQL)
        self._has_origin = bool(row["tagged"])
        if not self._has_origin:
            _log_untagged(row["reason"])

    def begin(self, sql: str) -> None:
        """Begin a transaction by *sql*, which the server gets together with the next statement."""
        self._before, self.ended_tags = f"{sql}; ", []

    def send_before_next(self, sql: str) -> None:
        """Send *sql*, a statement without parameters, in the message of the next statement, before
        that statement.
        """
        self._before += f"{sql}; "

    def _pop_before(self) -> str:
        assert not self._rows_before, "`send_commit` must send these rows"
        statements, self._before = self._before, ""
        return statements

    def copy_before_commit(self, copy: str, rows: Iterable[bytes]) -> None:
        """Send the statement *copy* with its *rows* together with the COMMIT, before it."""
        self._before += f"{copy}; "
        self._rows_before.append(copy_data(rows))

    def send_commit(self, last: str = "") -> Callable[[], Awaitable[None]]:
        """Run *last* and commit; return a function that waits for the answer.

        A cancelled caller may wait again, because the server still commits. If no statement of the
        transaction has been sent yet, the server receives the transaction in one message.
        """
        if self.is_closed:
            raise TargetConnectionError("target: the connection is closed")
        if self._connection.is_in_transaction():
            committing = asyncio.ensure_future(self.commit(last))
            return lambda: asyncio.shield(committing)
        message = WholeMessage(self._connection._transport, self._protocol)
        self.ended_tags = message.tags
        rows, self._rows_before = self._rows_before, []
        message.send(self._pop_before() + self._commit_sql(last), rows)
        return partial(self._answer, message)

    async def _answer(self, message: WholeMessage) -> None:
        self._watch.begin()
        try:
            await message.end()
        finally:
            self._watch.end()
        if not message.is_answered:
            reason = (message.error or {}).get("M", "the connection was lost")
            lost = asyncpg.ConnectionDoesNotExistError(reason)
            raise translate(lost) from lost
        if message.error is not None:
            error = asyncpg.PostgresError.new(message.error)
            raise translate(error) from error
        _require_commit(message.tags[-1].decode())

    async def rollback(self, savepoint: str | None = None) -> None:
        """Roll back, to *savepoint* if given. Statements that are not sent yet do not run."""
        self._before, self._rows_before = "", []
        await self.execute(f"rollback to savepoint {savepoint}" if savepoint else "rollback")

    async def commit(self, last: str = "") -> None:
        """Run the statement *last* and commit, in one message.

        Raises TargetError if the server rolled the transaction back instead.
        """
        sql = self._pop_before() + self._commit_sql(last)
        with translating(), self._watch.waiting():
            _require_commit(await self._connection.execute(sql))

    def _commit_sql(self, last: str) -> str:
        stamp = replication_origin.STAMP_SQL if self._has_origin else ""
        return "; ".join(filter(None, [last, stamp, "commit"]))

    @property
    def server_version(self) -> int:
        version = self._connection.get_server_version()
        return int(version.major) * 10000 + int(version.minor)

    @property
    def is_in_transaction(self) -> bool:
        return bool(self._before) or bool(self._connection.is_in_transaction())

    @property
    def is_closed(self) -> bool:
        return self._is_lost or bool(self._connection.is_closed())

    async def execute(self, sql: str, *parameters: Any) -> int:
        """Run a statement, or several without parameters; return the row count of the last."""
        with translating(), self._watch.waiting():
            if parameters:
                await self._send_before()
            else:
                sql = self._pop_before() + sql
            status: str = await self._connection.execute(sql, *parameters)
        return _row_count(status)

    async def _send_before(self) -> None:
        # A message with parameters has a single statement.
        if self._before:
            await self._connection.execute(self._pop_before())

    async def fetch(self, sql: str, *parameters: Any) -> list[Record]:
        """Run a query and return its rows."""
        with translating(), self._watch.waiting():
            await self._send_before()
            rows: list[Record] = await self._connection.fetch(sql, *parameters)
        return rows

    async def fetch_planned_now(self, sql: str, *parameters: Any) -> list[Record]:
        """Run a query by a plan for the current definitions of the tables."""
        with translating(), self._watch.waiting():
            await self._send_before()
            statement = await self._connection.prepare(sql)
            rows: list[Record] = await statement.fetch(*parameters)
        return rows

    async def fetch_value(self, sql: str, *parameters: Any) -> Any:
        """Run a query and return the first column of its first row, or None."""
        with translating(), self._watch.waiting():
            await self._send_before()
            return await self._connection.fetchval(sql, *parameters)

    async def describe(self, sql: str) -> str:
        """Parse a query without running it; return the type of its only column, if any."""
        with translating():
            statement = await self._connection.prepare(sql)
            columns = statement.get_attributes()
            if not columns:
                return ""
            name: str = await self._connection.fetchval(
                "select pg_catalog.format_type($1::int8::oid, -1)", columns[0].type.oid
            )
        return name

    async def copy_in(
        self,
        table: str,
        columns: list[str],
        chunks: AsyncIterator[bytes],
        *,
        namespace: str,
        binary: bool = False,
        then: str = "",
    ) -> int:
        """COPY *chunks* into the named columns of a table, and run the statement *then*.

        Both are one message, so the server does not wait for the client in between. Returns the row
        count of the last statement.
        """

        async def watched() -> AsyncIterator[bytes]:
            async for chunk in chunks:
                if self._is_lost:
                    return  # send no more data; asyncpg raises the error of the connection
                self._watch.progress += 1
                yield chunk

        copy = copy_sql(table, columns, namespace=namespace, binary=binary)
        sql = self._pop_before() + "; ".join(filter(None, [copy, then]))
        with translating(), self._watch.waiting():
            # asyncpg's copy_to_table calls this with one statement, and skips the remaining
            # answers.
            status: str = await self._connection._copy_in(sql, watched(), None)
        return _row_count(status)

    async def listen(self, channel: str, callback: Callable[[str], None]) -> None:
        """Call *callback* with the payload of every notification on *channel*."""
        with translating():
            await self._connection.add_listener(channel, lambda *args: callback(args[-1]))

    def _lost(self) -> None:
        """Wake a COPY that waits for room in the send buffer; asyncpg would let the COPY wait for
        ever.
        """
        self._is_lost = True
        self._protocol.resume_writing()

    def terminate(self) -> None:
        """Close at once, without a message to the server; a statement in progress fails.

        asyncpg's own method takes the transport from a COPY, which then fails with a misleading
        error.
        """
        self._is_lost = True
        transport = self._connection._transport
        if transport is not None:
            transport.abort()

    async def close(self, seconds: float = 5.0) -> None:
        """Close cleanly, or at once if a clean close takes longer than *seconds* or the connection
        is broken.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._connection.close()
        except (*DRIVER_ERRORS, StreamerError):
            self._connection.terminate()


def copy_sql(table: str, columns: list[str], *, namespace: str, binary: bool = False) -> str:
    return _copy_sql(table, tuple(columns), namespace, binary)


@lru_cache(1000)
def _copy_sql(table: str, columns: tuple[str, ...], namespace: str, binary: bool) -> str:
    listed = f" ({', '.join(map(quote_identifier, columns))})" if columns else ""
    options = "format binary" if binary else "format text"
    return f"copy {quote_qualified(namespace, table)}{listed} from stdin ({options})"


def _require_commit(status: str) -> None:
    """Raise TargetError after a COMMIT that the server turned into a rollback.

    After a failed statement, the server answers COMMIT with a rollback, and reports no error.
    """
    if status != "COMMIT":
        raise TargetError(f'target: the answer to COMMIT was "{status}"')


def _row_count(status: str) -> int:
    """Return the number of rows in a command tag; 0 without a number."""
    count = status.rpartition(" ")[2]
    return int(count) if count.isdigit() else 0


@cache
def _log_untagged(reason: str) -> None:
    log.info("transactions at the target carry no replication origin", reason=reason)


async def _log_in(address: TargetAddress, server_settings: dict[str, str]) -> asyncpg.Connection:
    """Connect with the current password. Raises the driver's errors, TargetPasswordError."""

    async def connect() -> asyncpg.Connection:
        try:
            password = await current_password(address.url, goes_first=True)
        except PasswordUnavailableError as exc:
            raise TargetPasswordError(f"target: {exc}", hint=_PASSWORD_HINT) from None
        return await _connect_to_any(address, password, server_settings)

    try:
        return await connect()
    except asyncpg.InvalidAuthorizationSpecificationError as exc:
        is_password = isinstance(exc, asyncpg.InvalidPasswordError)
        is_password = is_password or "authentication failed" in first_line(exc)
        if not (is_password and has_password_source(address.url)):
            raise
        # The server may have revoked the cached password before its lifetime ended.
        if forget_password(address.url):
            with contextlib.suppress(asyncpg.InvalidAuthorizationSpecificationError):
                return await connect()
        raise TargetPasswordError(f"target: {first_line(exc)}", hint=_PASSWORD_HINT) from exc


async def _connect_to_any(
    address: TargetAddress, password: str | None, server_settings: dict[str, str]
) -> asyncpg.Connection:
    """Try each host for as long as `connect_timeout`, as libpq does.

    If all hosts fail, raise a transient error if any. A host that refuses the role may be the
    standby of a lost server. So a refusal has priority only if the password may be outdated.
    """
    refused: Exception | None = None
    passing: Exception | None = None
    for dsn in (address.dsn, *address.further_dsns):
        try:
            return await asyncpg.connect(
                dsn.reveal(),
                password=password,
                timeout=address.connect_seconds,
                server_settings=server_settings,
                connection_class=_DriverConnection,
            )
        except DRIVER_ERRORS as exc:
            if isinstance(translate(exc), TargetRejectedError):
                refused = refused or exc
            else:
                passing = passing or exc
    error = passing or refused
    if refused is not None and has_password_source(address.url):
        error = refused
    assert error is not None
    raise error


_PASSWORD_HINT: Final = (
    "check the role's password, and password_file or password_command of the target; each attempt "
    "reads the password again"
)


async def login_of_target(url: Secret) -> str:
    """Return the target's *url* for a Spark job, as `job_url` does. Raises TargetPasswordError."""
    try:
        return await job_url(url)
    except PasswordUnavailableError as exc:
        raise TargetPasswordError(f"target: {exc}", hint=_PASSWORD_HINT) from None


async def _read_activity(address: TargetAddress, pid: int) -> Activity | None:
    """Return the activity of the session with *pid*, read over a separate connection."""
    try:
        async with asyncio.timeout(address.connect_seconds):
            raw = await _log_in(address, {})
            try:
                await raw.execute(session_settings.HIDE_SCHEMAS_SQL)
                row = await raw.fetchrow(activity_sql(raw.get_server_version().major), pid)
            finally:
                raw.terminate()
    except (TimeoutError, OSError, TargetPasswordError) as exc:
        raise Unreachable("target: no server answers") from exc
    except DRIVER_ERRORS as exc:
        raise translate(exc) from exc
    return None if row is None else Activity(**row)


@asynccontextmanager
async def target_connection(
    address: TargetAddress, application_name: str = "streamer"
) -> AsyncIterator[TargetConnection]:
    """Connect during a block."""
    connection = await TargetConnection.connect(address, application_name)
    try:
        yield connection
    finally:
        await connection.close()


_NESTED: Final = "streamer_nested"


@asynccontextmanager
async def transaction(connection: TargetConnection) -> AsyncIterator[None]:
    """Run a block in a transaction: committed at its end, rolled back if it raises.

    Inside a transaction of the caller, the block is a subtransaction, which the caller commits.
    """
    is_nested = connection.is_in_transaction
    undo = f"rollback to {_NESTED}; release {_NESTED}" if is_nested else "rollback"
    await connection.execute(f"savepoint {_NESTED}" if is_nested else "begin")
    try:
        yield
    except BaseException:
        if not connection.is_closed:
            with contextlib.suppress(StreamerError):
                await connection.execute(undo)
        raise
    if is_nested:
        await connection.execute(f"release {_NESTED}")
    else:
        await connection.commit()


async def may_replace_role(connection: TargetConnection) -> bool:
    """Whether the role may set session_replication_role, tried in a transaction and undone."""
    try:
        async with transaction(connection):
            await connection.execute("set local session_replication_role = replica")
            await connection.execute("set local session_replication_role = origin")
    except TargetRejectedError:
        return False
    return True
