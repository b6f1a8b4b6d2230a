"""Real servers: a shared server, on which each test has separate databases, and private servers to
maltreat.
"""

import asyncio
import contextlib
import itertools
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import psycopg
import pytest

from scripts import install_postgres
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import migrate
from streamer.commands.demo.embedded_servers import Server, execute_all, packaged_binaries
from streamer.postgres.quoting import quote_identifier, quote_literal
from streamer.postgres.secret import Secret
from streamer.target.connection import TargetAddress
from tests.support.clusters import CopiedServer
from tests.support.waiting import LOCK_SECONDS, polls

SETTINGS = {
    # Tests do not crash the machine, and killed processes lose no change by this setting.
    "fsync": "off",
    "max_wal_senders": "60",
    "max_replication_slots": "60",
    "max_connections": "300",
    "max_prepared_transactions": "10",
    "track_commit_timestamp": "on",
    # No test waits for autovacuum, whose workers would visit every database every ten seconds.
    "autovacuum_naptime": "1h",
    "max_wal_size": "256MB",
    # PostgreSQL 15 of a distribution compiles queries of tests just in time, because statistics
    # are missing.
    "jit": "off",
    # A killed server leaves dynamic shared memory in the data directory, which the test removes.
    "dynamic_shared_memory_type": "mmap",
    # A session that loads a library itself takes 1 ms more.
    "shared_preload_libraries": "plpgsql,pgoutput",
}

_DROP_SECONDS = 30.0
_MEMORY = "/dev/shm"
_ROOM_BYTES = 2 * 1024**3

_numbers = itertools.count(1)


def _machine_binaries() -> Path | None:
    """Return the machine's own PostgreSQL, if installed."""
    if shutil.which("pg_config") is None:
        return None
    output = subprocess.run(["pg_config", "--bindir"], check=True, capture_output=True, text=True)
    path = Path(output.stdout.strip())
    return path if (path / "initdb").exists() else None


def versions() -> dict[str, Path]:
    """Return the servers that are here, by major version."""
    binaries = {"18": packaged_binaries(18), "16": packaged_binaries(16)}
    if (machine := _machine_binaries()) is not None:
        text = subprocess.run(
            [machine / "postgres", "--version"], check=True, capture_output=True, text=True
        ).stdout
        major = text.split()[2].split(".")[0]
        binaries.setdefault(major, machine)
    return install_postgres.installed() | binaries


def _parent() -> str | None:
    """Return a directory in memory if there is room for the servers of all processes.

    Each test makes and drops two databases of 300 files. ext4 takes half of a server's CPU for
    that, because ext4 skips recently freed inodes.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    try:
        free = min(psutil.disk_usage(_MEMORY).free, psutil.virtual_memory().available)
        is_writable = not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC and os.access(_MEMORY, os.W_OK)
    except OSError:
        return None
    return _MEMORY if is_writable and free > processes * _ROOM_BYTES else None


@pytest.fixture(scope="session")
def server_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(
        prefix="streamer-test-", dir=_parent(), ignore_cleanup_errors=True
    ) as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


def own_directory(directory: Path) -> Path:
    """Make a directory that no server has or had, beside *directory* and named after *directory*.

    With `--dist worksteal`, a process can get tests of a module at several times. pytest then tears
    down and sets up the module's fixtures several times.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{directory.name}-", dir=directory.parent))


@contextlib.contextmanager
def kept_running(server: Server) -> Iterator[None]:
    """Make *server*, run the server during a block, and remove the server. If the block
    fails, the files stay for a search, until the owner of the parent directory removes the files.

    Raises ServerError with the last lines of the log if the server does not start.
    """
    try:
        server.create()
        server.start()
    except BaseException:
        server.remove()
        raise
    try:
        yield
    except BaseException:
        server.stop("immediate")
        raise
    server.remove()


@contextlib.contextmanager
def running(
    directory: Path, binaries: Path, settings: dict[str, str] | None = None
) -> Iterator[CopiedServer]:
    """Run a server during a block, in a new directory beside *directory*."""
    server = CopiedServer(own_directory(directory), binaries, SETTINGS | (settings or {}))
    with kept_running(server):
        yield server


@pytest.fixture(scope="session")
def servers(server_directory: Path) -> Iterator[Callable[[str], Server]]:
    """Return a function that returns the shared server of a major version, started at the first
    use.
    """
    started: dict[str, Server] = {}
    with contextlib.ExitStack() as stack:

        def close_operators(server: Server) -> None:
            for connection in _operators.pop(server):
                connection.close()

        def server(major: str) -> Server:
            if major not in started:
                server = running(server_directory / f"shared-{major}", versions()[major])
                started[major] = stack.enter_context(server)
                _make_bookkeeping(started[major])
                _operators[started[major]] = []
                stack.callback(close_operators, started[major])
            return started[major]

        yield server


@pytest.fixture
def shared_server(
    request: pytest.FixtureRequest, servers: Callable[[str], Server], combination: None
) -> Server:
    """The server of most tests, for sources and targets alike, in the version of TEST_POSTGRES."""
    return servers(since(request.node, version_of_tests()))


@pytest.fixture
def target_server(
    request: pytest.FixtureRequest,
    shared_server: Server,
    servers: Callable[[str], Server],
    combination: None,
) -> Server:
    """The server of targets, in the version of TEST_TARGET_POSTGRES if the variable is set."""
    if "TEST_TARGET_POSTGRES" not in os.environ:
        return shared_server
    return servers(since(request.node, version_of_targets()))


def version_of_tests() -> str:
    return os.environ.get("TEST_POSTGRES", "18")


def version_of_targets() -> str:
    return os.environ.get("TEST_TARGET_POSTGRES", version_of_tests())


def since(item: pytest.Item, major: str) -> str:
    """Return the version of a server, or the version that the marker `since` of a test names, if
    that is newer.
    """
    marker = item.get_closest_marker("since")
    return str(max(int(major), marker.args[0])) if marker else major


Connection = psycopg.Connection[tuple[object, ...]]
IDLE = psycopg.pq.TransactionStatus.IDLE


_END_WAITING_ENGINE_SQL = """
    select pg_terminate_backend(pid) from pg_stat_activity
    where datname = current_database() and application_name like 'streamer%'
        and state like 'idle in transaction%'
        and state_change < now() - interval '5 seconds'
"""


class Database:
    """A database of a test's own."""

    def __init__(self, server: Server, name: str) -> None:
        self.server = server
        self.name = name
        self.url_user = "postgres"
        """The role of the program's connections; tests themselves are superusers."""
        self.port: int | None = None
        """The port of a proxy for the program; tests themselves use none."""
        self.parameters = ""
        """More libpq parameters for the program's connections."""
        self.keeps_connections = False
        self.schema = "public"
        """The schema of tables without a schema."""
        self.path = "public"
        """The schemas that sessions search after this schema."""
        self._idle: list[Connection] = []

    @property
    def url(self) -> str:
        separator = "?" if self.parameters else ""
        url = self.server.url(self.name, self.url_user)
        if self.port is not None:
            url = url.replace(f":{self.server.port}/", f":{self.port}/")
        return f"{url}{separator}{self.parameters}"

    def connect(self) -> Connection:
        url = self.server.url(self.name)
        return psycopg.connect(url, autocommit=True, prepare_threshold=None)

    def execute(self, sql: str) -> list[tuple[object, ...]]:
        """Run SQL; return the rows of the last statement, if any.

        Each call finds a session like a new session. Calls reuse connections: a test makes some
        twenty calls, and connections cost more than the work.

        A statement that stops the event loop may wait for an engine that needs this loop. Nobody
        would end this deadlock, so the sessions of the engine that wait for the loop end.
        """
        if not _has_event_loop():
            return self._execute(sql)
        seconds = LOCK_SECONDS.get()
        try:
            return self._execute(sql, seconds)
        except psycopg.errors.LockNotAvailable:
            if not self._execute(_END_WAITING_ENGINE_SQL):
                raise
        return self._execute(sql, seconds)

    def _execute(self, sql: str, lock_seconds: float = 0) -> list[tuple[object, ...]]:
        connection = self._reuse() or self.connect()

        def run() -> list[tuple[object, ...]]:
            if lock_seconds:
                connection.execute(f"set lock_timeout = '{lock_seconds}s'".encode())
            return execute_all(connection, sql)

        try:
            try:
                rows = run()
            except psycopg.errors.AdminShutdown:  # a test ended the idle session
                connection.close()
                connection = self.connect()
                rows = run()
            # DISCARD ALL leaves the origin of a session.
            is_clean = connection.info.transaction_status == IDLE and "origin_session" not in sql
            if self.keeps_connections and is_clean:
                connection.execute("discard all")
                self._idle.append(connection)
                return rows
        except BaseException:
            connection.close()
            raise
        connection.close()
        return rows

    def _reuse(self) -> Connection | None:
        """Return a live connection for this thread alone."""
        return _pop_live(self._idle)

    def close(self) -> None:
        self.keeps_connections = False
        self.forget_sessions()

    def forget_sessions(self) -> None:
        """Let the next statement begin a session."""
        while self._idle:
            self._idle.pop().close()

    def value(self, sql: str) -> object:
        return self.execute(sql)[0][0]


def _has_event_loop() -> bool:
    """Return whether this thread's event loop stands still until we return."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def database(server: Server, prefix: str, template: str = "template1") -> Iterator[Database]:
    """Make a database during a block, and drop the database and its slots."""
    name = f"{prefix}_{os.getpid()}_{next(_numbers)}"
    with operator(server) as connection:
        strategy = _CHEAPEST_COPY if connection.execute(_COPIES_CHEAPLY_SQL).fetchone() else ""
        connection.execute(
            f"create database {quote_identifier(name)} template {template} {strategy}".encode()
        )
    made = Database(server, name)
    made.keeps_connections = True
    try:
        yield made
    finally:
        made.close()
        drop_database(server, name)


_BOOKKEEPING = "bookkeeping"
_NEW_INSTALLATION_SQL = "update streamer.installation set id = md5(current_database())"


def _make_bookkeeping(server: Server) -> None:
    """Make a database that has the bookkeeping of streamer, as a template.

    Some 900 tests start an engine on a new target. To create the bookkeeping takes 45 ms of CPU, to
    copy it 3.
    """
    server.execute(f"create database {_BOOKKEEPING}")
    address = TargetAddress.parse(Secret(server.url(_BOOKKEEPING)))

    async def make() -> None:
        bookkeeping = Bookkeeping(address)
        try:
            await migrate(bookkeeping)
        finally:
            await bookkeeping.close()

    # A thread, because the thread of the tests may have an event loop already.
    with ThreadPoolExecutor(1) as threads:
        threads.submit(asyncio.run, make()).result()
    # The first session in a database writes a file for later sessions, which copies have, too.
    for name in ("template1", _BOOKKEEPING):
        server.execute("select", name)


@contextlib.contextmanager
def target_database(server: Server) -> Iterator[Database]:
    """Make a database with bookkeeping during a block, on a server that tests share."""
    with database(server, "target", _BOOKKEEPING) as made:
        made.execute(_NEW_INSTALLATION_SQL)
        yield made


# Copying files takes half the CPU of copying pages through the WAL, with fsync off.
_CHEAPEST_COPY = "strategy file_copy"
_COPIES_CHEAPLY_SQL = """
    select 1 where current_setting('fsync') = 'off'
    and current_setting('server_version_num')::int >= 150000
"""


_operators: dict[Server, list[Connection]] = {}
"""Idle connections to the servers that tests share: each test makes and drops two databases."""


@contextlib.contextmanager
def operator(server: Server) -> Iterator[Connection]:
    """Connect as superuser during a block; each statement commits."""
    idle = _operators.get(server)
    connection = None if idle is None else _pop_live(idle)
    if connection is None:
        connection = psycopg.connect(server.url(), autocommit=True)
    try:
        yield connection
    except BaseException:
        connection.close()
        raise
    if idle is None:
        connection.close()
    else:
        idle.append(connection)


def _pop_live(idle: list[Connection]) -> Connection | None:
    """Take a live connection out of *idle*, for this thread alone."""
    while idle:
        try:
            connection = idle.pop()
        except IndexError:
            return None
        says_something, _, _ = select.select([connection.fileno()], [], [], 0)
        if not says_something:
            return connection
        connection.close()  # an idle server only reports the end of the session
    return None


def drop_database(server: Server, name: str) -> None:
    with operator(server) as connection:
        prepared = "select gid from pg_prepared_xacts where database = %s"
        for (gid,) in connection.execute(prepared, (name,)).fetchall():
            server.execute(f"rollback prepared {quote_literal(str(gid))}", name)
        _drop_slots(connection, name)
        oids = connection.execute("select oid from pg_database where datname = %s", (name,))
        origins = [f"streamer\\_{oid}\\_%" for (oid,) in oids.fetchall()]
        dropped = f"drop database if exists {quote_identifier(name)} with (force)"
        connection.execute(dropped.encode())
        # Each origin takes a place of the server, which later tests may need.
        connection.execute(
            "select pg_replication_origin_drop(roname) from pg_replication_origin"
            " where roname like any (%s)",
            (origins,),
        )


def _drop_slots(connection: Connection, database: str) -> None:
    """Drop a database's slots, and end the walsenders of the slots."""
    listed = "select slot_name, active_pid from pg_replication_slots where database = %s"
    for _ in polls(_DROP_SECONDS):
        slots = connection.execute(listed, (database,)).fetchall()
        for slot, pid in slots:
            if pid is not None:
                connection.execute("select pg_terminate_backend(%s)", (pid,))
                continue
            with contextlib.suppress(psycopg.errors.UndefinedObject, psycopg.errors.ObjectInUse):
                connection.execute("select pg_drop_replication_slot(%s)", (slot,))
        if not slots:
            return


@pytest.fixture
def second(shared_server: Server) -> Iterator[Database]:
    """A second source."""
    with database(shared_server, "second") as made:
        yield made


@pytest.fixture
def source(shared_server: Server) -> Iterator[Database]:
    with database(shared_server, "source") as made:
        yield made


@pytest.fixture
def target(target_server: Server) -> Iterator[Database]:
    """A target with bookkeeping, as after a run without sources. A test that needs a bare target
    drops the schema.
    """
    with target_database(target_server) as made:
        yield made


@contextlib.contextmanager
def role_at(servers: set[Server], prefix: str, attributes: str) -> Iterator[str]:
    """Make a role at each server for the length of a block. A fixture that does so comes before the
    databases, so that the drop comes after.
    """
    name = f"{prefix}_{os.getpid()}_{next(_numbers)}"
    for server in servers:
        server.execute(f"create role {name} login {attributes}")
    yield name
    for server in servers:
        server.execute(f"drop owned by {name}; drop role {name}")


@contextlib.contextmanager
def ordinary_role(target: Database) -> Iterator[str]:
    """Let the program connect to the target as a role whose only privilege is the ownership of the
    database.
    """
    role = f"owner_{target.name}"
    if not target.value("select exists (select from streamer.source)"):
        target.execute("drop schema streamer cascade")  # the role makes its own schema
    target.execute(
        f"create role {role} login;"
        f"alter database {target.name} owner to {role};"
        f"grant all on schema public to {role}"
    )
    target.url_user = role
    try:
        yield role
    finally:
        target.execute(
            f"reassign owned by {role} to postgres; drop owned by {role}; drop role {role}"
        )


def contents(
    db: Database, table: str, columns: str = "*", order: str = "1"
) -> list[tuple[object, ...]]:
    """Return a table's rows, each as text."""
    if columns == "*":
        return db.execute(f"select t::text from {table} t order by 1")
    return db.execute(f"select ({columns})::text from {table} order by {order}")


def waits_for_lock(db: Database, name: str = "streamer") -> bool:
    """Whether a session of the program, or a session named *name*, waits for a lock in *db*."""
    return bool(
        db.value(
            "select exists (select from pg_stat_activity where datname = current_database()"
            f" and wait_event_type = 'Lock' and application_name like '{name}%')"
        )
    )


def assert_same(source: Database, target: Database, table: str, other: str | None = None) -> None:
    """Two tables hold the same rows, as text."""
    assert contents(source, table) == contents(target, other or table)
