"""Sessions that run random statements at a source, and record the commits.

Every committed transaction of a session leaves a number in two ledger tables. The session records
the position of the source's WAL after the commit. Once the program acknowledges that position, the
target must have these numbers.
"""

import contextlib
import threading
import time
from random import Random

import psycopg

from streamer.commands.demo.embedded_servers import Server, execute_all
from streamer.util.lsn import Lsn
from tests.torture.tables import Kind

BEHIND_BYTES_MAX = 200_000_000
"""A slot with a greater lag slows down the sessions of the source.

Without the limit, a machine on which the program applies less than the sessions write never comes
to rest.
"""
SLOW_SECONDS = 0.5
HOSTED = "hosted"
"""The databases with a schema for each tenant."""
SPLIT = "split"
"""The databases that are shards without a sid."""

Connection = psycopg.Connection[tuple[object, ...]]

_PREPARED_SQL = "select gid from pg_prepared_xacts where database = current_database()"
_APPLICATION_ERRORS = (
    psycopg.errors.IntegrityError,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.LockNotAvailable,
    psycopg.errors.ConfigurationLimitExceeded,  # too many prepared transactions
)


class Ledger:
    """The commits of a source: number → a position after the commit."""

    def __init__(self, tables: tuple[str, str], first: int = 0) -> None:
        self.tables = tables
        self._lock = threading.Lock()
        self._last = first
        self._committed: dict[int, Lsn] = {}

    def next(self) -> int:
        with self._lock:
            self._last += 1
            return self._last

    def commit(self, number: int, lsn: Lsn) -> None:
        with self._lock:
            self._committed[number] = lsn

    def keep_only(self, numbers: set[int]) -> None:
        with self._lock:
            self._committed = {n: lsn for n, lsn in self._committed.items() if n in numbers}

    def through(self, lsn: Lsn) -> set[int]:
        """Return the numbers that were committed before *lsn*."""
        with self._lock:
            return {number for number, end in self._committed.items() if end <= lsn}


class Source:
    """A database under load."""

    def __init__(self, database: str, sid: str | None, kinds: tuple[Kind, ...], url: str) -> None:
        self.database = database
        self.sid = sid
        self.kinds = kinds
        self.url = url
        self.hosts_schemas = database == HOSTED
        """Whether schemas of the database are tenants, which come and go."""
        self.is_shard = database == SPLIT
        """Whether the rows have no sid, and like-named tables come and go."""
        ledger, keyless = (kind for kind in kinds if "ledger" in kind.name)
        self.ledger = Ledger((ledger.name, keyless.name), ledger.keys or 0)
        self.transactions = 0
        self._tolerant_until = 0.0

    @property
    def slot(self) -> str:
        return f"streamer_{self.database}_{self.sid}" if self.sid else f"streamer_{self.database}"

    @property
    def schemas(self) -> list[str]:
        """The schemas that are tenants now."""
        return sorted({kind.name.partition(".")[0] for kind in self.kinds if "." in kind.name})

    def kind(self, table: str) -> Kind:
        """Return the table with this name."""
        return next(kind for kind in self.kinds if kind.name == table)

    def tolerate_missing_identity(self, seconds: float) -> None:
        """Let PostgreSQL refuse updates for that long because a table has no replica identity."""
        self._tolerant_until = time.monotonic() + seconds

    @property
    def is_tolerant(self) -> bool:
        return time.monotonic() < self._tolerant_until

    def move_to(self, server: Server) -> None:
        """Continue at a promoted standby. Commits that the standby lacks never happened."""
        self.url = server.url(self.url.rpartition("/")[2])
        rows = self.execute(f"select id from {self.ledger.tables[1]}")
        self.ledger.keep_only({int(str(number)) for (number,) in rows})

    def is_behind(self, connection: Connection) -> bool:
        """Whether the slot has confirmed much less than the sessions have written."""
        rows = connection.execute(
            "select 1 from pg_replication_slots where slot_name = %s"
            " and pg_current_wal_insert_lsn() - confirmed_flush_lsn > %s",
            (self.slot, BEHIND_BYTES_MAX),
        ).fetchall()
        return bool(rows)

    def execute(self, sql: str) -> list[tuple[object, ...]]:
        """Run SQL; return the rows of the last statement, if any."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            return execute_all(connection, sql)


class Session(threading.Thread):
    """A connection of an application without restraint."""

    def __init__(self, source: Source, seed: str) -> None:
        super().__init__(name=seed, daemon=True)
        self._source = source
        self._random = Random(seed)
        self._ended = threading.Event()
        self._count = 0
        self.failure: BaseException | None = None

    def end(self) -> None:
        self._ended.set()

    def check(self) -> None:
        """Raise the error that has ended this session: the application was harmed."""
        if self.failure is not None:
            raise self.failure

    def run(self) -> None:
        while not self._ended.is_set():
            try:
                with psycopg.connect(self._source.url, autocommit=True) as connection:
                    # Prepared transactions hold locks, some for long.
                    connection.execute("set lock_timeout = '500ms'")
                    is_behind = False
                    while not self._ended.is_set():
                        self._transaction(connection)
                        if self._count % 10 == 0:
                            is_behind = self._source.is_behind(connection)
                        self._ended.wait(
                            SLOW_SECONDS if is_behind else self._random.random() * 0.03
                        )
            except psycopg.OperationalError:
                self._ended.wait(0.2)  # the server restarts, or a fault ended this backend
            except BaseException as exc:  # noqa: BLE001  # seen by whoever ends the session
                self.failure = exc
                return

    def _transaction(self, connection: Connection) -> None:
        """Run a few statements and end the transaction in a random way; errors of an application
        are fine.
        """
        random, ledger = self._random, self._source.ledger
        self._count += 1
        if random.random() < 0.1:
            self._settle_prepared(connection)
        number = ledger.next() if random.random() < 0.7 else None
        connection.execute("begin")
        try:
            if number is not None:
                for table in ledger.tables:
                    connection.execute(f"insert into {table} values ({number})".encode())
            for _ in range(random.choice((0, 1, 1, 2, 3, 6))):
                self._step(connection)
            if random.random() < 0.1:
                connection.execute("rollback")
                return
            if random.random() < 0.05:
                connection.execute(f"prepare transaction '{self.name}/{self._count}'".encode())
                return
            connection.execute("commit")
        except _APPLICATION_ERRORS:
            connection.execute("rollback")
            return
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
            if not (self._source.hosts_schemas or self._source.is_shard):
                raise
            connection.execute("rollback")
            return
        except psycopg.errors.ObjectNotInPrerequisiteState:
            if not self._source.is_tolerant:
                raise
            connection.execute("rollback")
            return
        self._source.transactions += 1
        if number is not None:
            rows = connection.execute("select pg_current_wal_insert_lsn()::text").fetchall()
            ledger.commit(number, Lsn.parse(str(rows[0][0])))

    def _settle_prepared(self, connection: Connection) -> None:
        for (gid,) in connection.execute(_PREPARED_SQL).fetchall():
            how = "rollback" if self._random.random() < 0.3 else "commit"
            with contextlib.suppress(
                psycopg.errors.UndefinedObject, psycopg.errors.ObjectNotInPrerequisiteState
            ):  # a different session was faster
                connection.execute(f"{how} prepared '{gid}'".encode())

    def _step(self, connection: Connection) -> None:
        random = self._random
        kind = random.choice([kind for kind in self._source.kinds if kind.operations])
        statements = random.choice(kind.operations)(random)
        chance = random.random()
        if chance < 0.05:
            size = random.choice((1, 100, 100_000))
            connection.execute(
                f"select pg_logical_emit_message({random.random() < 0.5}, 'torture', repeat('m', {size}))".encode()
            )
        if chance > 0.7:
            self._nested(connection, statements, depth=random.randrange(1, 4))
            return
        for statement in statements:
            connection.execute(statement.encode())

    def _nested(self, connection: Connection, statements: list[str], depth: int) -> None:
        """Sub-transactions, some of which fail or are rolled back."""
        connection.execute(f"savepoint s{depth}".encode())
        try:
            if depth > 1:
                self._nested(connection, statements, depth - 1)
            for statement in statements:
                connection.execute(statement.encode())
        except psycopg.errors.IntegrityError:
            connection.execute(f"rollback to savepoint s{depth}".encode())
            return
        how = "rollback to" if self._random.random() < 0.4 else "release"
        connection.execute(f"{how} savepoint s{depth}".encode())


def settle_all_prepared(source: Source) -> None:
    """Commit the transactions that are still prepared, in the end."""
    for (gid,) in source.execute(_PREPARED_SQL):
        source.execute(f"commit prepared '{gid}'")
