"""Reads ranges and keys on both sides: the work of a Spark task, blocking, with psycopg.

No reading holds a snapshot or a lock for longer than its statements. Each server computes the
digests of a range itself, so only sums travel. Of small ranges that differ, hashes of rows travel,
and the text of the rows that differ, one at a time.

A reading of the target takes the table's ACCESS SHARE lock before its snapshot. TRUNCATE is not
MVCC-safe: a snapshot from before it would show an empty table at a position that had rows. The same
snapshot shows position and rows.
"""

import heapq
import itertools
import json
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import psycopg

from streamer.compare.judge import (
    UNKNOWN_COMMIT,
    Difference,
    Judge,
    Row,
    SourceReading,
    TargetReading,
)
from streamer.compare.ranges import (
    BUCKET_ROWS,
    count_parts,
    split_range,
    whole_rate,
)
from streamer.compare.tables import ALL_PAGES, ComparedTable, Pages, Sums, add, cut_pages
from streamer.failpoints import failpoint
from streamer.lsn import Lsn
from streamer.owned_directory import read_private
from streamer.postgres.key_ranges import Key, KeyRange
from streamer.postgres.row_values import quoted_unless_known
from streamer.postgres.sqlstate import is_transient
from streamer.progress.task_statements import FINISH_RANGE_SQL, IS_THROTTLED_SQL, POSITION_SQL
from streamer.source.reached_server import PLACE_SQL, Place, find_difference, place_of
from streamer.source.wal_end import (
    COMMIT_LATER_SQL,
    COMMIT_SQL,
    FLUSH_LSN_SQL,
    INSERT_LSN_SQL,
    WRITER_POLL_SECONDS,
    WRITER_SECONDS,
)
from streamer.sync.copy_parts import Pace, PassingError, connect

Connection = psycopg.Connection[Any]
T = TypeVar("T")

BATCH_KEYS: Final = 2000
"""How many keys a task judges at a time."""
BATCH_BYTES: Final = 4 * 1024 * 1024
HASHED_BYTES: Final = 64
"""A value of a key, as a task holds it."""
ROUND_SECONDS: Final = 0.05
ROUND_SECONDS_MAX: Final = 0.5
NOTIFY_SECONDS: Final = 0.5
SAMPLE_AFTER_ROUNDS: Final = 3
SAMPLE_SECONDS: Final = 1.0
"""Keys that remain after some rounds change often: a task reads the source all this time."""
SAMPLED_KEYS_MAX: Final = 200
LATE_SECONDS: Final = 5.0
"""How long a task waits for a source's changes after it has waited for them in vain before."""

SOURCE, TARGET = 0, 1

ERROR: Final = "error"
"""The kind of a verdict about a failed reading of a table; its key is the message."""

Tables = dict[int, ComparedTable]


@dataclass(frozen=True, slots=True)
class ComparisonEnds:
    """Where tasks read. Secrets: kept out of ``repr``. ``sources``: url and place by source id."""

    target_url: str
    sources: dict[int, tuple[str, Place]]

    def __repr__(self) -> str:
        return "ComparisonEnds(…)"

    def to_json(self) -> dict[str, Any]:
        return {
            "target_url": self.target_url,
            "sources": [[i, url, *place] for i, (url, place) in self.sources.items()],
        }

    @classmethod
    def read(cls, ends: dict[str, Any] | str) -> Self:
        """Take what a job hands to its tasks: the ends, or the file that holds them."""
        found = json.loads(read_private(Path(ends))) if isinstance(ends, str) else ends
        sources = {number: (url, (*place,)) for number, url, *place in found["sources"]}
        return cls(found["target_url"], sources)


class ElsewhereError(Exception):
    """A connection reached another server than the comparison began with."""


class Servers:
    """The connections of one task, opened as they are needed."""

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
        """Return *count* other sets of connections, which end with these."""
        while len(self._more) < count:
            self._more.append(self._stack.enter_context(Servers(self._ends, self._name)))
        return self._more[:count]

    def cancel(self) -> None:
        """Cancel the statements that run. Another thread may call this."""
        for servers in self._more:
            servers.cancel()
        for opened in (*self._sources.values(), self._target):
            if opened is not None:
                with suppress(psycopg.Error):
                    opened.cancel()

    @property
    def target(self) -> Connection:
        if self._target is None:
            self._target = self._open(self._ends.target_url)
        return self._target

    def source(self, source_id: int) -> Connection:
        """Raises ElsewhereError."""
        if source_id not in self._sources:
            url, place = self._ends.sources[source_id]
            connection = self._open(url)
            _check_place(connection, place)
            self._sources[source_id] = connection
        return self._sources[source_id]

    def _open(self, url: str) -> Connection:
        opened: AbstractContextManager[Connection] = connect(url, self._name)
        return self._stack.enter_context(opened)

    def of(self, table: ComparedTable, side: int) -> Connection:
        return self.source(table.source_id) if side == SOURCE else self.target


def _check_place(connection: Connection, expected: Place) -> None:
    if not expected[0]:
        return  # `run` has never reached the source
    try:
        row = connection.execute(PLACE_SQL).fetchone()
    except psycopg.errors.InsufficientPrivilege:
        return
    assert row is not None
    if difference := find_difference(expected, place_of(row[0], row[1], row[2], expected)):
        raise ElsewhereError(difference)


def describe(error: Exception) -> str:
    """Return the message about a failed reading, without values of rows. Raises PassingError for a
    transient error.
    """
    if isinstance(error, psycopg.Error):
        state, diagnostic = error.sqlstate, error.diag
        primary = diagnostic.message_primary
        if state is None or is_transient(state, diagnostic.severity_nonlocalized, str(error)):
            raise PassingError(primary or type(error).__name__) from None
        return quoted_unless_known(str(primary), state, diagnostic.context)
    return str(error).splitlines()[0] if str(error) else type(error).__name__


# ---- digests -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unit:
    """A range of a table, or all of a table that is read by buckets. ``number``: that of the first
    range which it is a part of.
    """

    relation_id: int
    number: int
    range: KeyRange
    rows: int = 0
    """On the side that has more."""
    larger_side: int = SOURCE

    def to_row(self) -> tuple[Any, ...]:
        lower, upper = self.range.lower, self.range.upper
        return (
            self.relation_id,
            self.number,
            None if lower is None else list(lower),
            None if upper is None else list(upper),
            self.rows,
            self.larger_side,
        )

    @classmethod
    def from_row(cls, row: Any) -> Self:
        lower, upper = (None if bound is None else tuple(bound) for bound in row[2:4])
        return cls(row[0], row[1], KeyRange(lower, upper), row[4], row[5])


def _read_size(table: ComparedTable, side: int, connection: Connection) -> tuple[Any, ...]:
    row = connection.execute(table.size_sql(table.side(side)).encode()).fetchone()
    assert row is not None
    return tuple(row)


def _page_parts(
    table: ComparedTable, side: int, connection: Connection, rate: float | None
) -> Iterator[Pages]:
    """Cut the pages of a table that is not read by ranges of its key: no statement takes long.

    A row that moves meanwhile may count twice, or not at all. It differs then, and a task reads its
    key again. A row that stays counts once.
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


Digests = dict[int, tuple[int, str, str]]
"""Rows and the two sums, by bucket."""


class _Shared(Iterator[T]):
    """Items that several threads take, each item once."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._lock = threading.Lock()

    def __next__(self) -> T:
        with self._lock:
            return next(self._items)

    def stop(self) -> None:
        """Leave the remaining items alone."""
        with self._lock:
            self._items = iter(())


DigestRow = tuple[int, int, list[str] | None, list[str] | None, int, int, int, str, str, str | None]
"""A unit's relation, number and bounds; bucket, side, rows and two sums; or an error."""


class RangeReader:
    """Computes digests of ranges on both sides."""

    def __init__(
        self,
        tables: Tables,
        servers: Servers,
        rows_per_second: float | None,
        comparison_id: int,
        page_readers: int = 1,
    ) -> None:
        """*page_readers*: how many statements read a table page by page at a time."""
        self._tables = tables
        self._servers = servers
        self._rows_per_second = rows_per_second
        self._pace = Pace(rows_per_second)
        self._comparison_id = comparison_id
        self._page_readers = page_readers

    def digest(self, unit: Unit, *, is_first: bool) -> Iterator[DigestRow]:
        """Yield the digests of a range on both sides. An equal first range goes into the ledger."""
        table = self._tables[unit.relation_id]
        identity = unit.to_row()[:4]
        found: list[Digests] = []
        try:
            for side in (SOURCE, TARGET):
                found.append(self._digest_side(table, unit, side))
                rows = (
                    (*identity, bucket, side, count, first, second, None)
                    for bucket, (count, first, second) in found[-1].items()
                )
                yield from rows
        except (psycopg.Error, ElsewhereError) as exc:
            yield (*identity, 0, SOURCE, 0, "0", "0", describe(exc))
            return
        if is_first and found[SOURCE] == found[TARGET]:
            self._record(unit, *(sum(d[0] for d in digests.values()) for digests in found))

    def _digest_side(self, table: ComparedTable, unit: Unit, side: int) -> Digests:
        connection = self._servers.of(table, side)
        limit = self._rows_per_second if side == SOURCE else None
        parts = _page_parts(table, side, connection, limit)
        first = next(parts)
        if first == ALL_PAGES:
            found = self._add_up(table, unit, side, iter([first]))
        else:
            files = _read_size(table, side, connection)[-1]
            found = self._add_up_pages(table, unit, side, _Shared(itertools.chain([first], parts)))
            if _read_size(table, side, connection)[-1] != files:
                raise PassingError(
                    f'the pages of "{table.source_name}" were written anew meanwhile'
                )
        return {bucket: (n, str(one), str(two)) for bucket, (n, one, two) in found.items()}

    def _add_up_pages(
        self, table: ComparedTable, unit: Unit, side: int, parts: "_Shared[Pages]"
    ) -> Sums:
        """Let several threads read *parts*, each with connections of its own."""
        others = self._servers.more(self._page_readers - 1)
        rate, of = self._rows_per_second, self._comparison_id
        readers = [self, *(RangeReader(self._tables, each, rate, of) for each in others)]
        with ThreadPoolExecutor(len(readers)) as pool:
            running = [pool.submit(each._add_up, table, unit, side, parts) for each in readers]
            found: Sums = {}
            try:
                for each in running:
                    add(found, each.result())
            finally:
                parts.stop()
        return found

    def _add_up(self, table: ComparedTable, unit: Unit, side: int, parts: Iterator[Pages]) -> Sums:
        connection = self._servers.of(table, side)
        limit = self._rows_per_second if side == SOURCE else None
        found: Sums = {}
        for pages in parts:
            rate = None
            if pages == ALL_PAGES and not table.is_ordered:
                rate = whole_rate(limit, table.buckets)
            if side == SOURCE:
                self._pace.begin(is_throttled=self._is_throttled(table))
            began = time.monotonic()
            sql = table.digest_sql(table.side(side), unit.range, rate, pages=pages)
            with connection.transaction():
                if rate is not None:  # each worker of a parallel plan would have the rate to itself
                    connection.execute("set local max_parallel_workers_per_gather = 0")
                rows = connection.execute(sql.encode()).fetchall()
            add(found, {b: (n, int(one), int(two)) for b, n, one, two in rows})
            if side == SOURCE:
                self._pace.wait(sum(row[1] for row in rows), time.monotonic() - began)
        return found

    def _is_throttled(self, table: ComparedTable) -> bool:
        row = self._servers.target.execute(IS_THROTTLED_SQL, (table.source_id,)).fetchone()
        return row is not None and bool(row[0])

    def _record(self, unit: Unit, source_rows: int, target_rows: int) -> None:
        self._servers.target.execute(
            FINISH_RANGE_SQL,
            (source_rows, target_rows, self._comparison_id, unit.relation_id, unit.number),
        )
        failpoint("compare.range_done")

    def split(self, unit: Unit) -> Iterator[Unit]:
        """Cut a range at keys of the side with more rows; one whose keys are all the same stays."""
        table = self._tables[unit.relation_id]
        side = unit.larger_side
        sql = table.cut_sql(table.side(side), unit.range, count_parts(unit.rows))
        try:
            rows = self._servers.of(table, side).execute(sql.encode()).fetchall()
        except (psycopg.Error, ElsewhereError) as exc:
            describe(exc)  # the fetch of the whole range reports it
            rows = []
        keys: list[Key] = [tuple(row[0]) for row in rows]
        for part in split_range(unit.range, keys):
            yield Unit(unit.relation_id, unit.number, part)


# ---- rows --------------------------------------------------------------------------------------


def fetch_rows(
    table: ComparedTable, unit: Unit, buckets: list[int], side: int, servers: Servers
) -> Iterator[tuple[int, int, str, str]]:
    """Yield relation, side, name of the key and hash of the row of a range, or of buckets."""
    connection = servers.of(table, side)
    for pages in _page_parts(table, side, connection, None):
        sql = table.fetch_sql(table.side(side), unit.range, buckets, pages=pages)
        for name, row in _stream(connection, sql):
            yield table.relation_id, side, name, row


def _stream(connection: Connection, sql: str, parameters: list[Any] | None = None) -> Iterator[Any]:
    """Yield rows as they arrive: memory has one at a time, however wide it is."""
    with connection.cursor() as cursor:
        yield from cursor.stream(sql.encode(), parameters)


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
"""The transactions that may be in the middle of their commit. The state of some is hidden from the
role, some wait for a synchronous standby, and some have a statement of the last ten seconds.
A longer statement is no commit, unless it waits for a standby."""


def read_source_lsn(connection: Connection) -> Lsn:
    """Return a position behind every commit that an earlier statement has seen."""
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


Verdict = tuple[int, str, str, int, int, int, list[str], str | None, str | None, str]
"""Relation, key, kind, rows missing, extra and different, columns, values of the source and of the
target as JSON, position of the source."""


@dataclass(slots=True)
class Judged:
    """Keys of one table, and their judge. ``keys``: names (`ComparedTable.is_named_by_hash`).
    ``shown``: the numbers of those whose verdict has been given.
    """

    table: ComparedTable
    keys: list[str]
    judge: Judge
    error: str | None = None
    shown: set[int] = field(default_factory=set)

    @property
    def wanted(self) -> dict[int, str]:
        """The keys without a judgement, by their numbers."""
        if self.error is not None:
            return {}
        return {n: self.keys[n] for n in self.judge.pending}


class KeyJudging:
    """Reads keys on both sides until each has a judgement, or time is up."""

    def __init__(self, servers: Servers, *, seconds: float, with_values: bool) -> None:
        self._servers = servers
        self._seconds = seconds
        self._with_values = with_values
        self._is_late = False
        """The changes of a source did not reach the target in time."""

    def judge(self, tables: Tables, keys: dict[int, list[str]]) -> list[Judged]:
        """Read the keys of tables until each is judged, or time is up.

        All tables have their rounds at the same time, because rounds mostly wait.
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
                self._sample([b for b in active if len(b.wanted) <= SAMPLED_KEYS_MAX])
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
        """Read one table; its failure is not the others'. Raises PassingError."""
        if batch.error is None:
            try:
                read(batch)
            except (psycopg.Error, ElsewhereError) as exc:
                batch.error = describe(exc)

    def show(self, batch: Judged) -> Iterator[Verdict]:
        """Yield the verdicts about keys that are not equal, one row at a time.

        After a PassingError, another call yields the verdicts that are left.
        """
        table, different = batch.table, batch.judge.different
        left = {*different, *batch.judge.pending} - batch.shown
        try:
            if batch.error is None:
                lsn = str(batch.judge.newest_lsn)
                for n, text, values in self._shown(table, {n: batch.keys[n] for n in sorted(left)}):
                    batch.shown.add(n)
                    if n in different:
                        yield _verdict(table, text, different[n], values, lsn)
                    else:
                        yield table.relation_id, text, "undecided", 0, 0, 0, [], None, None, lsn
        except (psycopg.Error, ElsewhereError) as exc:
            batch.error = describe(exc)
        if batch.error is not None:
            yield error_verdict(table.relation_id, batch.error)

    def _read_source(self, batch: Judged) -> None:
        connection = self._servers.source(batch.table.source_id)
        # Before the rows: a transaction that the rows do not show is still running now.
        row = connection.execute(_COMMITTING_SQL).fetchone()
        assert row is not None
        rows = self._read(batch.table, SOURCE, batch.wanted)
        lsn = read_source_lsn(connection)
        batch.judge.read_source(SourceReading(lsn, frozenset(row[0]), rows))

    def _sample(self, batches: list[Judged]) -> None:
        """Read keys at the source again and again for a while."""
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
        found: dict[int, list[Row]] = {}
        for n, place, values in self._servers.of(table, side).execute(sql.encode(), parameters):
            found.setdefault(n, []).append((place, tuple(values)))
        return found

    def _shown(
        self, table: ComparedTable, keys: dict[int, str]
    ) -> Iterator[tuple[int, str, tuple[str | None, str | None]]]:
        """Yield number, text and, if wanted, rows of both sides as JSON, key by key.

        A key that a hash names has no text any more if its rows are gone from both sides. They are
        equal then.
        """
        named = [] if table.is_named_by_hash else [(n, -1, text, None) for n, text in keys.items()]
        sides = (SOURCE, TARGET) if table.is_named_by_hash or self._with_values else ()
        with ExitStack() as stack:
            found = [
                stack.enter_context(closing(self._stream_shown(table, side, keys)))
                for side in sides
                if keys
            ]
            rows = heapq.merge(named, *found, key=itemgetter(0))
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
        for n, text, values in _stream(self._servers.of(table, side), sql, parameters):
            yield n, side, text, values


def _as_json(table: ComparedTable, rows: list[list[str]]) -> str | None:
    if not rows:
        return None
    return json.dumps([dict(zip(table.columns, values, strict=True)) for values in rows])


def _verdict(
    table: ComparedTable,
    key: str,
    found: Difference,
    values: tuple[str | None, str | None],
    lsn: str,
) -> Verdict:
    columns = [table.columns[n] for n in found.columns]
    counts = found.missing, found.extra, found.different
    return table.relation_id, key, found.kind, *counts, columns, *values, lsn


def error_verdict(relation_id: int, message: str) -> Verdict:
    """Return the verdict about a failed reading of a table. Pure."""
    return relation_id, message, ERROR, 0, 0, 0, [], None, None, "0/0"


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
