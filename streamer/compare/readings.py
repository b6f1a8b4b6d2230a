"""Reads ranges and keys on both sides, blocking, with psycopg.

No reading holds a snapshot or a lock for longer than its statements. Each server computes the
digests of a range, so only sums travel. For small differing ranges, servers send hashes of rows,
and the text of differing rows, row by row.

A reading of the target takes the table's ACCESS SHARE lock before its snapshot, which shows both
position and rows. TRUNCATE is not MVCC-safe: an earlier snapshot would show an empty table at a
position that had rows.
"""

import heapq
import itertools
import json
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import psycopg

from streamer.bookkeeping.task_statements import FINISH_RANGE_SQL, IS_THROTTLED_SQL, POSITION_SQL
from streamer.compare.compared_table import ALL_PAGES, ComparedTable, Pages, Sums, add, cut_pages
from streamer.compare.cut_ranges import (
    BUCKET_ROWS,
    count_parts,
    split_range,
    whole_rate,
)
from streamer.compare.judge_keys import (
    UNKNOWN_COMMIT,
    Difference,
    Judge,
    Row,
    SourceReading,
    TargetReading,
)
from streamer.compare.verdicts import ERROR, UNDECIDED, KeyVerdict
from streamer.copy.parts.part_copier import (
    CopyEnds,
    NotCopiedError,
    Pace,
    TransientError,
    begin_reading,
    check_server,
    connect,
    verify_fence,
)
from streamer.postgres.key_ranges import Key, KeyRange
from streamer.postgres.row_values import quote_unrecognized
from streamer.postgres.sqlstate import is_transient
from streamer.source.reached_server import ServerIdentity
from streamer.source.wal_end import (
    COMMIT_LATER_SQL,
    COMMIT_SQL,
    FLUSH_LSN_SQL,
    INSERT_LSN_SQL,
    WRITER_POLL_SECONDS,
    WRITER_SECONDS,
)
from streamer.util.failpoints import failpoint
from streamer.util.lsn import Lsn
from streamer.util.owned_directory import read_private

Connection = psycopg.Connection[Any]
CHUNKS_LIBPQ_MIN: Final = 17_00_00
"""The first version of libpq that returns several rows at a time."""
T = TypeVar("T")

FETCHED_ROWS: Final = 100 if psycopg.pq.version() >= CHUNKS_LIBPQ_MIN else 1
"""The number of keys and hashes that memory holds. Each row alone would take three times as long.
"""
BATCH_KEYS: Final = 2000
"""The number of keys that a task judges at a time."""
BATCH_BYTES: Final = 4 * 1024 * 1024
HASHED_BYTES: Final = 64
"""The bytes of a value of a key in a task's memory."""
ROUND_SECONDS: Final = 0.05
ROUND_SECONDS_MAX: Final = 0.5
NOTIFY_SECONDS: Final = 0.5
SAMPLE_AFTER_ROUNDS: Final = 3
SAMPLE_SECONDS: Final = 1.0
"""The time for which a task repeatedly reads the source for keys that remain after some rounds and
change often.
"""
SAMPLED_KEYS_MAX: Final = 200
LATE_SECONDS: Final = 5.0
"""The time for which a task waits for a source's changes after an unsuccessful wait."""

THROTTLE_SECONDS: Final = 1.0

SOURCE, TARGET = 0, 1

Tables = dict[int, ComparedTable]


@dataclass(frozen=True, slots=True)
class ComparisonEnds:
    """The servers that tasks read. ``repr`` shows no secret. ``sources``: url and server by source
    id. ``copy``: read the source with the snapshot of this copy.
    """

    target_url: str
    sources: dict[int, tuple[str, ServerIdentity]]
    copy: CopyEnds | None = None

    def __repr__(self) -> str:
        return "ComparisonEnds(…)"

    def to_json(self) -> dict[str, Any]:
        return {
            "target_url": self.target_url,
            "sources": [[i, url, *server] for i, (url, server) in self.sources.items()],
            "copy": None if self.copy is None else asdict(self.copy),
        }

    @classmethod
    def read(cls, ends: dict[str, Any] | str) -> Self:
        """Read the ends of a job's tasks, or the file of the ends."""
        fields = json.loads(read_private(Path(ends))) if isinstance(ends, str) else ends
        sources = {number: (url, (*server,)) for number, url, *server in fields["sources"]}
        copy = None if fields["copy"] is None else CopyEnds.from_json(fields["copy"])
        return cls(fields["target_url"], sources, copy)


class TableError(Exception):
    """The reason why a table has no result: a line without values of rows."""


class Servers:
    """The connections of a task, opened on demand."""

    def __init__(self, ends: ComparisonEnds, application_name: str = "streamer compare") -> None:
        self._ends = ends
        self._name = application_name
        self._stack = ExitStack()
        self._sources: dict[int, Connection] = {}
        self._target: Connection | None = None
        self._more: list[Servers] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    def more(self, count: int) -> "list[Servers]":
        """Return *count* further sets of connections, which close with this set."""
        while len(self._more) < count:
            self._more.append(self._stack.enter_context(Servers(self._ends, self._name)))
        return self._more[:count]

    def cancel(self) -> None:
        """Cancel the statements that run. Any thread may call this."""
        for servers in self._more:
            servers.cancel()
        for opened in (*self._sources.values(), self._target):
            if opened is not None:
                with suppress(psycopg.Error):
                    opened.cancel()

    @property
    def target(self) -> Connection:
        """Raises TableError."""
        if self._target is None:
            self._target = self._open(self._ends.target_url, verify_fence)
        return self._target

    def source(self, source_id: int) -> Connection:
        """Raises TableError."""
        if source_id not in self._sources:
            url, server = self._ends.sources[source_id]
            self._sources[source_id] = self._open(url, begin_reading, server)
        return self._sources[source_id]

    def _open(
        self,
        url: str,
        join_copy: Callable[[Connection, CopyEnds], None],
        server: ServerIdentity | None = None,
    ) -> Connection:
        """Connect. *server*: the expected server; its system identifier is empty if unknown."""
        opened: AbstractContextManager[Connection] = connect(url, self._name)
        connection = self._stack.enter_context(opened)
        try:
            if self._ends.copy is not None:
                join_copy(connection, self._ends.copy)
            elif server is not None and server[0]:
                check_server(connection, server)
        except NotCopiedError as exc:
            raise TableError(str(exc)) from None
        return connection

    def session(self, table: ComparedTable, side: int) -> Connection:
        return self.source(table.source_id) if side == SOURCE else self.target


def describe(error: psycopg.Error) -> str:
    """Return the message about a failed reading, without values of rows. Raises TransientError."""
    state, diagnostic = error.sqlstate, error.diag
    primary = diagnostic.message_primary
    if state is None or is_transient(state, diagnostic.severity_nonlocalized, str(error)):
        raise TransientError(primary or type(error).__name__) from None
    return quote_unrecognized(str(primary), state, diagnostic.context)


@contextmanager
def reading() -> Iterator[None]:
    """Translate errors of a server to TransientError, if transient, or TableError."""
    try:
        yield
    except psycopg.Error as exc:
        raise TableError(describe(exc)) from None


# ---- digests -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unit:
    """A range of a table, or all of a table that is read by buckets. ``number``: the number of the
    first range that contains the unit. ``cuts``: the keys that cut the range into parts, whose sums
    a statement computes. ``buckets``: the buckets whose rows belong to the unit.
    """

    relation_id: int
    number: int
    range: KeyRange
    cuts: tuple[Key, ...] = ()
    buckets: tuple[int, ...] = ()

    def parts(self) -> list[KeyRange]:
        return split_range(self.range, self.cuts)

    def to_row(self) -> tuple[Any, ...]:
        bounds = self.range.lower, self.range.upper
        return self.relation_id, self.number, *bounds, self.cuts, self.buckets

    @classmethod
    def from_row(cls, row: Any) -> Self:
        lower, upper = (None if bound is None else tuple(bound) for bound in row[2:4])
        return cls(row[0], row[1], KeyRange(lower, upper), tuple(map(tuple, row[4])), tuple(row[5]))


def _read_size(table: ComparedTable, side: int, connection: Connection) -> tuple[Any, ...]:
    row = connection.execute(table.size_sql(table.side(side)).encode()).fetchone()
    assert row is not None
    return tuple(row)


def _page_parts(
    table: ComparedTable, side: int, connection: Connection, rate: float | None
) -> Iterator[Pages]:
    """Cut the pages of a table that tasks do not read by ranges of keys, so that no statement takes
    long.

    A row that moves meanwhile may be counted twice or not at all. Such a row differs, and a task
    reads the key again.
    """
    if table.is_ordered:
        yield ALL_PAGES
        return
    _, pages, size, version, _ = _read_size(table, side, connection)
    parts = cut_pages(pages, size, version, table.buckets * BUCKET_ROWS, rate)
    yield from parts
    lists = parts[-1].lists_places
    while lists and (now := _read_size(table, side, connection)[1]) > pages:
        yield Pages(pages, now, lists)
        pages = now


class SharedItems(Iterator[T]):
    """Items that several threads take, each item once."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._lock = threading.Lock()

    def __next__(self) -> T:
        with self._lock:
            return next(self._items)

    def stop(self) -> None:
        """Return no further items."""
        with self._lock:
            self._items = iter(())


class BacklogThrottle:
    """Whether to read more slowly because of the source's backlog, as last read from the target.

    A thread with a connection to the target reads this fact, also for the threads of the source.
    """

    def __init__(self) -> None:
        self.is_on = False

    def read(self, target: Connection, table: ComparedTable) -> None:
        row = target.execute(IS_THROTTLED_SQL, (table.source_id,)).fetchone()
        self.is_on = row is not None and bool(row[0])


class RangeReader:
    """Computes digests of ranges, on both sides at the same time."""

    def __init__(
        self,
        tables: Tables,
        servers: Servers,
        rows_per_second: float | None,
        comparison_id: int | None,
        page_readers: int = 1,
        *,
        throttle: BacklogThrottle | None = None,
    ) -> None:
        """*page_readers*: the number of concurrent statements that read a side of a table page by
        page.
        *comparison_id*: the id of the comparison; None without a ledger.
        """
        self._tables = tables
        self._servers = servers
        self._rows_per_second = rows_per_second
        self._pace = Pace(rows_per_second)
        self._comparison_id = comparison_id
        self._page_readers = page_readers
        self._throttle = throttle or BacklogThrottle()

    def digest(self, unit: Unit, *, is_first: bool) -> tuple[Sums, Sums]:
        """Return the checksums of a range at source and target. An equal first range goes into the
        ledger.

        Raises TableError, TransientError.
        """
        table = self._tables[unit.relation_id]
        readers = self._readers(table)
        with reading(), ThreadPoolExecutor(1) as thread:
            self._throttle.read(self._servers.target, table)
            at_source = thread.submit(self._digest_side, table, unit, SOURCE, readers)
            target = self._digest_side(table, unit, TARGET, readers)
            while not wait([at_source], THROTTLE_SECONDS).done:
                self._throttle.read(self._servers.target, table)
            source = at_source.result()
            if is_first and source == target and self._comparison_id is not None:
                self._record(unit, sum(rows for rows, _, _ in source.values()))
        return source, target

    def _readers(self, table: ComparedTable) -> "list[RangeReader]":
        """Return the readers of a table, each with separate connections."""
        if table.is_ordered:
            return [self]
        connections = self._servers.more(self._page_readers - 1)
        rate, of, throttle = self._rows_per_second, self._comparison_id, self._throttle
        return [
            self,
            *(
                RangeReader(self._tables, reader, rate, of, throttle=throttle)
                for reader in connections
            ),
        ]

    def _digest_side(
        self, table: ComparedTable, unit: Unit, side: int, readers: "list[RangeReader]"
    ) -> Sums:
        connection = self._servers.session(table, side)
        limit = self._rows_per_second if side == SOURCE else None
        parts = _page_parts(table, side, connection, limit)
        first = next(parts)
        if first == ALL_PAGES:
            return self._add_up(table, unit, side, iter([first]))
        files = _read_size(table, side, connection)[-1]
        shared = SharedItems(itertools.chain([first], parts))
        sums: Sums = {}
        with ThreadPoolExecutor(len(readers)) as pool:
            running = [pool.submit(reader._add_up, table, unit, side, shared) for reader in readers]
            try:
                for reader in running:
                    add(sums, reader.result())
            finally:
                shared.stop()
        if _read_size(table, side, connection)[-1] != files:
            raise TransientError(f'a session has rewritten the pages of "{table.source_name}"')
        return sums

    def _add_up(self, table: ComparedTable, unit: Unit, side: int, parts: Iterator[Pages]) -> Sums:
        connection = self._servers.session(table, side)
        limit = self._rows_per_second if side == SOURCE else None
        sums: Sums = {}
        for pages in parts:
            rate = None
            if pages == ALL_PAGES and not table.is_ordered:
                rate = whole_rate(limit, table.buckets)
            if side == SOURCE:
                self._pace.begin(is_throttled=self._throttle.is_on)
            else:
                self._throttle.read(connection, table)
            began = time.monotonic()
            sql = table.digest_sql(table.side(side), unit.parts(), rate, pages=pages)
            with connection.transaction():
                if rate is not None:  # each parallel worker would apply the whole rate
                    connection.execute("set local max_parallel_workers_per_gather = 0")
                rows = connection.execute(sql.encode()).fetchall()
            add(sums, {b: (n, int(first), int(second)) for b, n, first, second in rows})
            if side == SOURCE:
                self._pace.wait(sum(row[1] for row in rows), time.monotonic() - began)
        return sums

    def _record(self, unit: Unit, rows: int) -> None:
        self._servers.target.execute(
            FINISH_RANGE_SQL, (rows, rows, self._comparison_id, unit.relation_id, unit.number)
        )
        failpoint("compare.range_done")

    def cut(self, unit: Unit, side: int, rows: int) -> Unit:
        """Cut a range into parts at keys of *side*, which has more *rows*. A range of equal keys
        stays whole. Raises TransientError.
        """
        table = self._tables[unit.relation_id]
        sql = table.cut_sql(table.side(side), unit.range, max(2, count_parts(rows)))
        keys: list[Key] = []
        with suppress(TableError), reading():  # a later fetch of the whole range reports the error
            keys = [
                tuple(row[0]) for row in self._servers.session(table, side).execute(sql.encode())
            ]
        return replace(unit, cuts=tuple(keys))


# ---- rows --------------------------------------------------------------------------------------


def fetch_rows(
    table: ComparedTable, unit: Unit, side: int, servers: Servers
) -> Iterator[tuple[str, int, int]]:
    """Yield the name of the key and two hashes of the row, for rows of a range or of buckets."""
    connection = servers.session(table, side)
    for pages in _page_parts(table, side, connection, None):
        sql = table.fetch_sql(table.side(side), unit.range, unit.buckets, pages=pages)
        yield from _stream(connection, sql, size=FETCHED_ROWS)


def _stream(
    connection: Connection, sql: str, parameters: list[Any] | None = None, *, size: int = 1
) -> Iterator[Any]:
    """Yield rows on arrival, so that memory holds at most *size* rows, however wide."""
    with connection.cursor() as cursor:
        yield from cursor.stream(sql.encode(), parameters, size=size)


# ---- keys --------------------------------------------------------------------------------------

_COMMITTING_SQL: Final = f"""
select coalesce(pg_catalog.array_agg(coalesce(a.backend_xid::text, '{UNKNOWN_COMMIT}')), '{{}}')
from pg_catalog.pg_stat_activity a
where (a.backend_xid is not null or a.wait_event = 'SyncRep')
  and a.pid <> pg_catalog.pg_backend_pid()
  and (a.state is null or a.wait_event = 'SyncRep'
       or a.state not like 'idle in transaction%' and a.state_change > pg_catalog.clock_timestamp()
                                                      - interval '10 seconds')
"""
"""The transactions that may be committing. Their state is hidden from the role, they wait for a
synchronous standby, or their statement began in the last ten seconds. A longer statement is not a
commit, unless it waits for a standby.
"""


def read_source_lsn(connection: Connection) -> Lsn:
    """Return a position after every commit that an earlier statement has seen."""
    if connection.info.parameter_status("in_hot_standby") != "on":
        try:
            connection.execute(COMMIT_SQL)
        except psycopg.errors.InsufficientPrivilege:
            connection.execute(COMMIT_LATER_SQL)
            inserted = _read_lsn(connection, INSERT_LSN_SQL)
            until = time.monotonic() + WRITER_SECONDS
            while time.monotonic() < until and _read_lsn(connection, FLUSH_LSN_SQL) < inserted:
                time.sleep(WRITER_POLL_SECONDS)
    return _read_lsn(connection, FLUSH_LSN_SQL)


def _read_lsn(connection: Connection, expression: str) -> Lsn:
    row = connection.execute(f"select ({expression})::text".encode()).fetchone()
    assert row is not None
    return Lsn.parse(row[0])


@dataclass(slots=True)
class Judged:
    """Keys of a table, and the judge. ``keys``: names (`ComparedTable.is_named_by_hash`).
    ``shown``: the numbers of keys whose verdicts were returned already.
    """

    table: ComparedTable
    keys: list[str]
    judge: Judge
    error: str | None = None
    shown: set[int] = field(default_factory=set)

    @property
    def wanted(self) -> dict[int, str]:
        """The keys without a judgement, by number."""
        if self.error is not None:
            return {}
        return {n: self.keys[n] for n in self.judge.pending}


class KeyJudging:
    """Reads keys on both sides until each key has a judgement, or the time is up."""

    def __init__(self, servers: Servers, *, seconds: float, with_values: bool) -> None:
        self._servers = servers
        self._seconds = seconds
        self._with_values = with_values
        self._is_late = False
        """Whether the changes of a source did not reach the target in time."""

    def judge(self, tables: Tables, keys: dict[int, list[str]]) -> list[Judged]:
        """Read the keys of tables until each key has a judgement, or the time is up.

        The rounds of all tables run at the same time, because rounds mostly wait.
        """
        batches = [
            Judged(table, texts, Judge(range(len(texts)), keeps_more=table.keeps_more))
            for relation_id, texts in keys.items()
            for table in (tables[relation_id],)
        ]
        deadline = time.monotonic() + (LATE_SECONDS if self._is_late else self._seconds)
        notify_at = pause = 0.0
        for number in itertools.count():
            active = [batch for batch in batches if batch.wanted]
            if not active:
                break
            for batch in active:
                self._attempt(batch, self._read_source)
            if number >= SAMPLE_AFTER_ROUNDS:
                self._sample(
                    [
                        b
                        for b in active
                        if b.judge.has_changing and len(b.wanted) <= SAMPLED_KEYS_MAX
                    ]
                )
            failpoint("compare.keys_read")
            if time.monotonic() >= notify_at:
                self._servers.target.execute("notify streamer, 'wait tables'")
                notify_at = time.monotonic() + NOTIFY_SECONDS
            for batch in active:
                self._attempt(batch, self._read_target)
            if time.monotonic() >= deadline:
                break
            pause = min(max(ROUND_SECONDS, pause * 1.5), ROUND_SECONDS_MAX)
            time.sleep(pause if any(batch.wanted for batch in active) else 0)
        self._is_late = self._is_late or any(
            batch.wanted and not batch.judge.has_caught_up for batch in batches
        )
        return batches

    def _attempt(self, batch: Judged, read: Callable[[Judged], None]) -> None:
        """Read a table; store a TableError as the result of the table. Raises TransientError."""
        if batch.error is None:
            try:
                with reading():
                    read(batch)
            except TableError as exc:
                batch.error = str(exc)

    def show(self, batch: Judged) -> Iterator[KeyVerdict]:
        """Yield the verdicts about keys that are not equal, row by row.

        After a TransientError, another call yields the remaining verdicts.
        """
        table, judge = batch.table, batch.judge
        keys = {n: batch.keys[n] for n in sorted({*judge.different, *judge.pending} - batch.shown)}
        if batch.error is None:
            try:
                with reading():
                    for n, text, values in self._shown(table, keys):
                        batch.shown.add(n)
                        yield _verdict(
                            table, text, judge.different.get(n), values, judge.newest_lsn
                        )
            except TableError as exc:
                batch.error = str(exc)
        if batch.error is not None:
            yield KeyVerdict(table.relation_id, batch.error, ERROR)

    def _read_source(self, batch: Judged) -> None:
        connection = self._servers.source(batch.table.source_id)
        # Read the transactions before the rows, so that the list contains each transaction whose
        # changes the rows do not show.
        row = connection.execute(_COMMITTING_SQL).fetchone()
        assert row is not None
        rows = self._read(batch.table, SOURCE, batch.wanted)
        lsn = read_source_lsn(connection)
        batch.judge.read_source(SourceReading(lsn, frozenset(row[0]), rows))

    def _sample(self, batches: list[Judged]) -> None:
        """Read keys at the source repeatedly for a while."""
        until = time.monotonic() + SAMPLE_SECONDS
        while batches and time.monotonic() < until:
            for batch in batches:
                self._attempt(batch, self._sample_once)

    def _sample_once(self, batch: Judged) -> None:
        rows = self._read(batch.table, SOURCE, batch.wanted)
        lsn = _read_lsn(self._servers.source(batch.table.source_id), INSERT_LSN_SQL)
        batch.judge.sample_source(lsn, rows)

    def _read_target(self, batch: Judged) -> None:
        connection, table = self._servers.target, batch.table
        connection.execute("begin isolation level repeatable read read only")
        try:
            connection.execute(f"lock table {table.target.table} in access share mode".encode())
            row = connection.execute(POSITION_SQL, (table.relation_id,)).fetchone()
            rows = self._read(table, TARGET, batch.wanted)
        finally:
            connection.execute("rollback")
        lsn = None if row is None or row[0] is None else Lsn.parse(row[0])
        batch.judge.read_target(TargetReading(lsn, rows))

    def _read(self, table: ComparedTable, side: int, keys: dict[int, str]) -> dict[int, list[Row]]:
        sql = table.read_sql(table.side(side))
        parameters = table.read_parameters(keys)
        rows_by_key: dict[int, list[Row]] = {}
        for n, place, values in self._servers.session(table, side).execute(
            sql.encode(), parameters
        ):
            rows_by_key.setdefault(n, []).append((place, tuple(values)))
        return rows_by_key

    def _shown(
        self, table: ComparedTable, keys: dict[int, str]
    ) -> Iterator[tuple[int, str, tuple[str | None, str | None]]]:
        """Yield number, text and, if requested, rows of both sides as JSON, key by key.

        Omit a key named by a hash if both sides lack its rows by now. Without a row such a key has
        no text, and both sides are equal.
        """
        named = [] if table.is_named_by_hash else [(n, -1, text, None) for n, text in keys.items()]
        sides = (SOURCE, TARGET) if table.is_named_by_hash or self._with_values else ()
        with ExitStack() as stack:
            streams = [
                stack.enter_context(closing(self._stream_shown(table, side, keys)))
                for side in sides
                if keys
            ]
            rows = heapq.merge(named, *streams, key=itemgetter(0))
            for n, group in itertools.groupby(rows, key=itemgetter(0)):
                shown: tuple[list[list[str]], list[list[str]]] = ([], [])
                for _, side, key, values in group:
                    text = key
                    if values is not None:
                        shown[side].append(values)
                yield n, text, (_as_json(table, shown[SOURCE]), _as_json(table, shown[TARGET]))

    def _stream_shown(
        self, table: ComparedTable, side: int, keys: dict[int, str]
    ) -> Generator[tuple[int, int, str, list[str] | None]]:
        sql = table.show_sql(table.side(side), with_values=self._with_values)
        parameters = table.read_parameters(keys)
        for n, text, values in _stream(self._servers.session(table, side), sql, parameters):
            yield n, side, text, values


def _as_json(table: ComparedTable, rows: list[list[str]]) -> str | None:
    if not rows:
        return None
    return json.dumps([dict(zip(table.columns, values, strict=True)) for values in rows])


def _verdict(
    table: ComparedTable,
    key: str,
    difference: Difference | None,
    values: tuple[str | None, str | None],
    lsn: Lsn,
) -> KeyVerdict:
    if difference is None:
        return KeyVerdict(table.relation_id, key, UNDECIDED, lsn=str(lsn))
    columns = [table.columns[n] for n in difference.columns]
    counts = difference.missing, difference.extra, difference.different
    return KeyVerdict(table.relation_id, key, difference.kind, *counts, columns, *values, str(lsn))


def batches(keys: Iterable[tuple[int, str]], tables: Tables) -> Iterator[dict[int, list[str]]]:
    """Group keys by relation, into batches of a bounded size. Pure."""
    waiting: dict[int, list[str]] = {}
    count = size = 0
    for relation_id, key in keys:
        waiting.setdefault(relation_id, []).append(key)
        count, size = count + 1, size + len(key) + HASHED_BYTES * len(tables[relation_id].columns)
        if count >= BATCH_KEYS or size >= BATCH_BYTES:
            yield waiting
            waiting, count, size = {}, 0, 0
    if waiting:
        yield waiting
