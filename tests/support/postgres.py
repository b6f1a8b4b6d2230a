"""Real servers: one that most tests share, each with databases of its own, and private ones to maltreat."""

import contextlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from streamer.commands.embedded import Server, packaged_binaries
from streamer.postgres.quoting import quote_identifier, quote_literal

SETTINGS = {
    # Tests do not pull the plug of the machine; killed processes lose nothing by this.
    "fsync": "off",
    "max_wal_senders": "60",
    "max_replication_slots": "60",
    "max_connections": "300",
    "max_prepared_transactions": "10",
    "track_commit_timestamp": "on",
}

_numbers = itertools.count(1)


def _machine_binaries() -> Path | None:
    """Return the machine's own PostgreSQL, if it has one."""
    if shutil.which("pg_config") is None:
        return None
    found = subprocess.run(["pg_config", "--bindir"], check=True, capture_output=True, text=True)
    path = Path(found.stdout.strip())
    return path if (path / "initdb").exists() else None


def versions() -> dict[str, Path]:
    """Return the servers that are here, by major version."""
    found = {"18": packaged_binaries(18), "16": packaged_binaries(16)}
    if (own := _machine_binaries()) is not None:
        text = subprocess.run(
            [own / "postgres", "--version"], check=True, capture_output=True, text=True
        ).stdout
        major = text.split()[2].split(".")[0]
        found.setdefault(major, own)
    return found


@pytest.fixture(scope="session")
def server_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="streamer-test-", ignore_cleanup_errors=True) as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


@contextlib.contextmanager
def running(
    directory: Path, binaries: Path, settings: dict[str, str] | None = None
) -> Iterator[Server]:
    """Run a server for the length of a block."""
    server = Server(directory, binaries, SETTINGS | (settings or {}))
    try:
        server.create()
        server.start()
    except Exception as exc:  # noqa: BLE001  # no test can run without it
        pytest.exit(f"PostgreSQL does not start: {exc}", 3)
    try:
        yield server
    finally:
        server.stop("immediate")


@pytest.fixture(scope="session")
def servers(server_directory: Path) -> Iterator[Callable[[str], Server]]:
    """Return what gives the shared server of a major version, started when it is first wanted."""
    started: dict[str, Server] = {}
    with contextlib.ExitStack() as stack:

        def server(major: str) -> Server:
            if major not in started:
                server = running(server_directory / f"shared-{major}", versions()[major])
                started[major] = stack.enter_context(server)
            return started[major]

        yield server


@pytest.fixture
def shared_server(servers: Callable[[str], Server], combination: None) -> Server:
    """The server that most tests use, for sources and targets alike: TEST_POSTGRES says which."""
    return servers(os.environ.get("TEST_POSTGRES", "18"))


class Database:
    """A database of a test's own."""

    def __init__(self, server: Server, name: str) -> None:
        self.server = server
        self.name = name
        self.url_user = "postgres"
        """Who the program connects as; tests themselves are superusers."""
        self.port: int | None = None
        """Of a proxy that the program goes through; tests themselves do not."""
        self.parameters = ""
        """More libpq parameters for the program's connections."""

    @property
    def url(self) -> str:
        separator = "?" if self.parameters else ""
        url = self.server.url(self.name, self.url_user)
        if self.port is not None:
            url = url.replace(f":{self.server.port}/", f":{self.port}/")
        return f"{url}{separator}{self.parameters}"

    def connect(self) -> "psycopg.Connection[tuple[object, ...]]":
        return psycopg.connect(self.server.url(self.name), autocommit=True)

    def execute(self, sql: str) -> list[tuple[object, ...]]:
        """Run SQL; return the rows of the last statement if it has any."""
        return self.server.execute(sql, self.name)

    def value(self, sql: str) -> object:
        return self.execute(sql)[0][0]


@contextlib.contextmanager
def database(server: Server, prefix: str) -> Iterator[Database]:
    """Make a database for the length of a block, and drop it with its slots."""
    name = f"{prefix}_{os.getpid()}_{next(_numbers)}"
    server.execute(f"create database {quote_identifier(name)}")
    try:
        yield Database(server, name)
    finally:
        drop_database(server, name)


def drop_database(server: Server, name: str) -> None:
    server.execute(
        "select pg_terminate_backend(active_pid) from pg_replication_slots"
        f" where database = '{name}' and active_pid is not null"
    )
    for (gid,) in server.execute(f"select gid from pg_prepared_xacts where database = '{name}'"):
        server.execute(f"rollback prepared {quote_literal(str(gid))}", name)
    for _ in range(100):
        server.execute(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots"
            f" where database = '{name}' and not active"
        )
        left = f"select 1 from pg_replication_slots where database = '{name}'"
        if not server.execute(left):
            break
    oids = server.execute(f"select oid from pg_database where datname = '{name}'")
    server.execute(f"drop database if exists {quote_identifier(name)} with (force)")
    for (oid,) in oids:
        # Each takes one of the server's places for origins, which other tests may be in want of.
        server.execute(
            "select pg_replication_origin_drop(roname) from pg_replication_origin"
            f" where roname like 'streamer\\_{oid}\\_%'"
        )


@pytest.fixture
def source(shared_server: Server) -> Iterator[Database]:
    with database(shared_server, "source") as made:
        yield made


@pytest.fixture
def target(shared_server: Server) -> Iterator[Database]:
    with database(shared_server, "target") as made:
        yield made


@contextlib.contextmanager
def ordinary_role(target: Database) -> Iterator[str]:
    """Let the program connect to the target as a role that owns its database, and no more."""
    role = f"owner_{target.name}"
    target.execute(
        f"create role {role} login; alter database {target.name} owner to {role};"
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


def assert_same(source: Database, target: Database, table: str, other: str | None = None) -> None:
    """Two tables hold the same rows, as text."""
    assert contents(source, table) == contents(target, other or table)
