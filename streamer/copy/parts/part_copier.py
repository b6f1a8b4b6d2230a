"""Copies a part: forwards the bytes of the source's COPY to the target's COPY.

The module runs inside a Spark task, blocking, with psycopg. Apart from keyed hashes, a task decodes
no values: the target's server reads the source's bytes, so no value can change in between.
Forwarding also costs a fiftieth of decoding. The task first locks the part's row in
``streamer.sync_partition``, and marks the row in the transaction of the copy. So a part is copied
only once, even if Spark runs the task twice or the task outlives its process.

A task locks the table at the source only while it reads a part, so the application's DDL need not
wait for a whole copy. The task first checks that the table still has the storage and the columns of
the plan. After a rewrite or a renamed column, the table needs a new copy.

An executor on a remote machine has only psycopg, this module and the imported modules of streamer,
which `streamer.copy.spark.job` ships.
"""

import dataclasses
import json
import select
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from streamer.bookkeeping.task_statements import (
    COUNT_TASKS_SQL,
    FAIL_PART_SQL,
    FINISH_PART_SQL,
    IS_PENDING_SQL,
    LOCK_PART_SQL,
)
from streamer.compiled import choice
from streamer.postgres import replication_origin, session_settings
from streamer.postgres.keyed_hash import KeyedHash, hashed_line
from streamer.postgres.password_source import open_job_url
from streamer.postgres.row_values import quote_unrecognized
from streamer.postgres.sqlstate import is_transient
from streamer.source.reached_server import (
    IDENTITY_SQL,
    ServerIdentity,
    find_difference,
    identity_of,
)
from streamer.source.stream.libpq import FUNCTIONS, address_of
from streamer.target.fencing_token import FENCE_SQL
from streamer.util.failpoints import failpoint
from streamer.util.owned_directory import read_private

if TYPE_CHECKING:
    from streamer.compiled._compiled import RowPump as CompiledPump

PACE_ROWS: Final = 1000
"""The number of rows between two checks of the limit on rows per second."""
UNSENT_BYTES: Final = 1024 * 1024
"""The number of bytes after which a task waits for a slow target."""
ROWS_END, TARGET_FAILED = -1, -3
"""Results of `RowPump.pass_rows`."""
THROTTLED_TIMES: Final = 4
"""The factor by which a part takes longer while the source retains too much WAL."""


LOCK_SECONDS: Final = 10
"""The time for which a part waits for a lock at the source. Then the task skips the table's
remaining parts, and a later job of the round copies the parts.
"""
RECORDED: Final = frozenset({"changed", "refused", "not_null"})
"""The kinds of failures that end the copy of a table; tasks store such failures at once."""


@dataclass(frozen=True, slots=True)
class CopyEnds:
    """The source and the target of a copy. ``repr`` shows no secret."""

    source_url: str
    """Both urls come from `streamer.postgres.credentials.job_url`."""
    target_url: str
    snapshot_name: str
    application_name: str
    server: ServerIdentity
    """The source's server with the snapshot."""
    fence: tuple[int, int, int, str]
    """The parameters of `streamer.target.fencing_token.FENCE_SQL`."""
    rows_per_second: float | None = None
    total_rows_per_second: float | None = None
    """This limit and the next hold for the tasks of all sources together."""
    total_bytes_per_second: float | None = None
    hash_keys: dict[str, str] = dataclasses.field(default_factory=dict)
    """The secret keys of hashed columns, by their checks (`key_check`)."""

    def __repr__(self) -> str:
        return f"CopyEnds(snapshot_name={self.snapshot_name!r})"

    @classmethod
    def from_json(cls, ends: dict[str, Any]) -> Self:
        return cls(**ends | {"server": tuple(ends["server"]), "fence": tuple(ends["fence"])})


@contextmanager
def connect(url: str, application_name: str) -> Iterator["psycopg.Connection[Any]"]:
    """Connect with settings pinned, during a block. *url*: made by `job_url`."""
    keepalives = {name: str(value) for name, value in session_settings.KEEPALIVES.items()}
    defaults = {"connect_timeout": "10"} | keepalives
    from_url = {k: str(v) for k, v in conninfo_to_dict(open_job_url(url)).items() if v is not None}
    parameters = defaults | from_url | {"client_encoding": "UTF8"}
    parameters["application_name"] = application_name[:63]
    with psycopg.connect(make_conninfo(**parameters), autocommit=True) as connection:
        info = connection.info
        is_superuser = info.parameter_status("is_superuser")
        pinned = session_settings.pin_sql(version=info.server_version, is_superuser=is_superuser)
        connection.execute(pinned.encode())
        yield connection


class NotCopiedError(Exception):
    """The task cannot copy a part as planned. ``kind``: the reason, for the coordinator.

    ``snapshot``: the snapshot is lost, which ends the round. ``elsewhere``: a connection reached a
    different server, or another process has taken the source over. ``changed``: the table is not
    the table of the snapshot. ``busy``: a session at the source holds a lock on the table.
    ``refused``: a server rejects the part; ``not_null``: because of a null value.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class TransientError(Exception):
    """The copy of a part failed for now; Spark runs the task again.

    The error has only the first line of the server's message. Spark shows errors in the UI and
    event log, and further lines may contain values of rows or a connection string.
    """


def copy_tasks(
    part_lists: Iterable[list[dict[str, Any]]], ends: CopyEnds | str
) -> Iterator[dict[str, Any]]:
    """Copy the parts of tasks; yield the parts that a server rejects. *ends* may be the path of a
    file.
    """
    if isinstance(ends, str):
        ends = CopyEnds.from_json(json.loads(read_private(Path(ends))))
    for parts in part_lists:
        yield from copy_parts(parts, ends)


def copy_parts(parts: list[dict[str, Any]], ends: CopyEnds) -> Iterator[dict[str, Any]]:
    """Copy a task's parts; yield each failed part with the reason: see `NotCopiedError`.

    Raises TransientError, after which Spark runs the task again.
    """
    given_up: set[int] = set()
    remaining = list(parts)
    while remaining:
        part = None
        try:
            with (
                connect(ends.source_url, ends.application_name) as source,
                connect(ends.target_url, ends.application_name) as target,
            ):
                begin_reading(source, ends)
                copier = PartCopier(source, target, ends)
                while remaining:
                    part = remaining[0]
                    if part["relation_id"] not in given_up:
                        copier.copy(part)
                    remaining.pop(0)
        except Exception as exc:  # noqa: BLE001  # a failure ends a single relation
            kind = exc.kind if isinstance(exc, NotCopiedError) else "refused"
            if kind == "refused" and (part is None or _is_transient(exc)):
                raise TransientError(_describe(exc)) from None
            failed = part or remaining[0]
            failure = failure_of(failed, exc)
            yield failure
            if kind in ("snapshot", "elsewhere"):
                return
            remaining.pop(0)
            given_up.add(failed["relation_id"])
            if kind in RECORDED:
                _record_error(failed, ends, failure)


def copy_over(
    source: "psycopg.Connection[Any]",
    parts: list[dict[str, Any]],
    ends: CopyEnds,
    connected: Callable[["psycopg.Connection[Any]"], None],
) -> dict[str, Any] | None:
    """Copy all parts of a table over a session that reads under the snapshot already.

    Return the failure that ended the copy, if any. There is no retry, because only this session has
    the snapshot and the lock. *connected* receives the connection to the target.
    """
    part = parts[0]
    try:
        with connect(ends.target_url, ends.application_name) as target:
            connected(target)
            copier = PartCopier(source, target, ends)
            for part in parts:
                copier.copy(part)
    except Exception as exc:  # noqa: BLE001  # a failure ends a single relation
        failure = failure_of(part, exc)
        if failure["kind"] == "refused" and _is_transient(exc):
            return failure | {"kind": "lost"}
        if failure["kind"] in RECORDED:
            _record_error(part, ends, failure)
        return failure
    return None


def failure_of(part: dict[str, Any], error: Exception) -> dict[str, Any]:
    """Return the report to the coordinator about a failed part.

    ``constraint``: the violated constraint, or the column whose NOT NULL the part violates.
    """
    diagnostic = getattr(error, "diag", None)
    kind = error.kind if isinstance(error, NotCopiedError) else "refused"
    name = getattr(diagnostic, "constraint_name", None)
    column = getattr(diagnostic, "column_name", None)
    if isinstance(error, psycopg.errors.NotNullViolation) and column is not None:
        kind, name = "not_null", column  # a domain that refuses NULL names no column
    return {
        "relation_id": part["relation_id"],
        "kind": kind,
        "error": _describe(error) + _key_of(error),
        "constraint": name,
    }


def _is_transient(error: Exception) -> bool:
    state = getattr(error, "sqlstate", None)
    severity = getattr(getattr(error, "diag", None), "severity_nonlocalized", None)
    return state is None or is_transient(state, severity, str(error))


def _describe(error: Exception) -> str:
    diagnostic = getattr(error, "diag", None)
    if primary := getattr(diagnostic, "message_primary", None):
        state, context = getattr(error, "sqlstate", None), getattr(diagnostic, "context", None)
        message = quote_unrecognized(str(primary), state, context)
        return "; ".join([message, *getattr(error, "__notes__", [])])
    if isinstance(error, psycopg.ProgrammingError):  # the message quotes the connection string
        return "a connection string cannot be read"
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def _key_of(error: Exception) -> str:
    """Return the key that a violated unique, exclusion or foreign key constraint names, to follow
    the message.

    Details of other errors show whole rows.
    """
    detail = getattr(getattr(error, "diag", None), "message_detail", None) or ""
    return f": {detail.rstrip('.')}" if detail.startswith("Key (") else ""


def _add_settings(error: Exception, expressions: Sequence[str]) -> None:
    """Name the settings whose expressions may have failed at the source: its message names none."""
    *others, last = expressions or ("",)
    if last:
        named = f"{', '.join(others)} or {last}" if others else last
        error.add_note(f"at the source, {named} fails for a row: correct the expression or the row")


def _record_error(part: dict[str, Any], ends: CopyEnds, failure: dict[str, Any]) -> None:
    """Report a failed copy to the round at once, because the job returns its result late."""
    source_and_token = ends.fence[1], ends.fence[3]
    facts = failure["error"], failure["kind"], failure["constraint"]
    with suppress(psycopg.Error), connect(ends.target_url, ends.application_name) as target:
        target.execute(
            FAIL_PART_SQL,
            (*facts, part["relation_id"], part["part"], part["attempt"], *source_and_token),
        )


class PartCopier:
    """Copies parts in sequence over one pair of connections."""

    def __init__(
        self,
        source: "psycopg.Connection[Any]",
        target: "psycopg.Connection[Any]",
        ends: CopyEnds,
    ) -> None:
        self._source = source
        self._target = target
        self._token = ends.fence[-1]
        self._hash_keys = ends.hash_keys
        self._pace = Pace(
            ends.rows_per_second, ends.total_rows_per_second, ends.total_bytes_per_second
        )
        verify_fence(target, ends)
        # Without this privilege, the target's triggers and foreign keys fire.
        with suppress(psycopg.errors.InsufficientPrivilege):
            target.execute("set session_replication_role = replica")
        target.execute(replication_origin.SET_UP_SQL.encode())
        row = target.execute(replication_origin.RESULT_SQL).fetchone()
        self._has_origin = row is not None and bool(row[0])
        # A crash loses a part together with its row in the ledger. The commit that ends the copy
        # flushes both.
        target.execute("set synchronous_commit = off")

    def copy(self, part: dict[str, Any]) -> bool:
        """Copy a part, unless the part is already copied or withdrawn; return whether the part was
        copied.

        Raises NotCopiedError.
        """
        key = (part["relation_id"], part["part"], part["attempt"])
        if not self._target.execute(IS_PENDING_SQL, key).fetchone():
            return False
        self._source.execute("savepoint part")
        self._lock_table(part)
        with self._target.transaction():
            row = self._target.execute(LOCK_PART_SQL, (self._token, *key)).fetchone()
            if row is not None and not row[2]:
                raise NotCopiedError("elsewhere", "another process has taken the source over")
            is_pending = row is not None and bool(row[0])
            if row is not None and is_pending:
                self._pace.begin(is_throttled=row[1], rounds=row[3])
                self._count_tasks()
                self._copy_locked(part)
        # End the locks taken since the savepoint. Reading a table needs no commit.
        self._source.execute("rollback to savepoint part")
        return is_pending

    def _copy_locked(self, part: dict[str, Any]) -> None:
        """Copy a part. The caller has locked the table and the part's row in the ledger."""
        key = (part["relation_id"], part["part"], part["attempt"])
        began = time.monotonic()
        self._check_types(part["types_out"], part["types_in"])
        try:
            rows, size = self._pass_through(part)
        except psycopg.errors.CharacterNotInRepertoire as exc:
            if place := self._find_invalid_text(part["locate"]):
                exc.add_note(place)
            raise
        except psycopg.errors.UntranslatableCharacter as exc:
            if part["locate"] and (place := self._find_untranslatable(part["locate"])):
                exc.add_note(place)
            raise
        self._target.execute(
            FINISH_PART_SQL,
            (rows, size, *key),
        )
        self._count_tasks()  # more tasks may have begun meanwhile
        self._pace.wait(rows, time.monotonic() - began, size)
        if self._has_origin:
            self._target.execute(replication_origin.STAMP_SQL)
        failpoint("sync.part_copied")

    def _count_tasks(self) -> None:
        """Count the tasks that share the limits of all sources, by their sessions at the target."""
        if self._pace.has_total:
            # Within a transaction, the view otherwise repeats its first answer.
            self._target.execute("select pg_catalog.pg_stat_clear_snapshot()")
            row = self._target.execute(COUNT_TASKS_SQL).fetchone()
            assert row is not None
            self._pace.share(row[0])

    def _lock_table(self, part: dict[str, Any]) -> None:
        """Lock a part's table, and check that the table is still the planned table.

        Under the snapshot the catalogs show the past, but `pg_relation_filenode`, `to_regclass` and
        the columns of a query show the present. A new table may have the name by now, and the
        snapshot sees no rows of a newer table.
        """
        try:
            self._source.execute(part["lock"].encode())
            stores = part["stores"]
            row = self._source.execute(
                _HAS_NEW_STORAGE_SQL,
                (*part["named"], [oid for oid, _ in stores], [filenode for _, filenode in stores]),
            ).fetchone()
            result = self._source.execute(part["probe"].encode()).pgresult
        except psycopg.errors.LockNotAvailable:
            raise NotCopiedError(
                "busy", f"a session at the source has held a lock for {LOCK_SECONDS} s"
            ) from None
        except GONE as exc:
            raise NotCopiedError("changed", _describe(exc)) from None
        assert result is not None
        numbers = [result.ftablecol(column) for column in range(result.nfields)]
        if row is None or row[0] or numbers != list(part["numbers"]):
            raise NotCopiedError("changed", "the table was rewritten, renamed or altered")

    def _pass_through(self, part: dict[str, Any]) -> tuple[int, int]:
        source, target = self._source.pgconn, self._target.pgconn
        hashes = [
            (number, KeyedHash(self._hash_keys[name].encode()))
            for number, name in part.get("hashes", ())
        ]
        _start(target, part["copy_in"], pq.ExecStatus.COPY_IN)
        try:
            with self._bytes_as_stored():
                _start(source, part["copy_out"], pq.ExecStatus.COPY_OUT)
                size = self._pump(source, target, hashes)
                _finish(source)
        except BaseException as exc:
            if isinstance(exc, psycopg.DataError) and not isinstance(exc, INVALID_TEXT):
                _add_settings(exc, part.get("expressions", ()))
            _end_copy(target, b"the source's part failed")
            while _next_result(target) is not None:
                pass
            raise
        _end_copy(target)
        return _finish(target), size

    @contextmanager
    def _bytes_as_stored(self) -> Iterator[None]:
        """Make a source whose encoding is SQL_ASCII send text unchanged.

        With any other client encoding, the source would validate the text and report an error
        without the row.
        """
        is_sql_ascii = self._source.info.parameter_status("server_encoding") == "SQL_ASCII"
        if is_sql_ascii:
            self._source.execute("set client_encoding to 'SQL_ASCII'")
        yield
        if is_sql_ascii:
            self._source.execute("set client_encoding to 'UTF8'")

    def _find_invalid_text(self, locate: str) -> str | None:
        """Return the source's row and column whose text is invalid in the target's encoding."""
        source = self._source.pgconn
        names = source.exec_(f"{locate} limit 0".encode())
        location = None
        with self._bytes_as_stored():
            _start(source, f"copy ({locate}) to stdout", pq.ExecStatus.COPY_OUT)
            while (row := source.get_copy_data(1))[0] >= 0:
                if row[0] == 0:
                    _await_data(source)
                else:
                    location = location or invalid_text(bytes(row[1]))
            _finish(source)
        if location is None:
            return None
        place, number = location
        name = (names.fname(number) or b"").decode("utf-8", "replace")
        return (
            f'at the source, column "{name}" of the row with ctid {place} is not valid UTF-8: '
            "correct the value, then resync the table"
        )

    def _find_untranslatable(self, locate: str) -> str | None:
        """Return the source's row and column with a character that UTF-8 lacks.

        The source converts the text for the client, and the error names neither row nor column.
        """
        self._source.execute("rollback to savepoint part")
        self._source.execute(_FIND_UNTRANSLATABLE_SQL.replace("{rows}", locate).encode())
        row = self._source.execute("select current_setting('streamer.place')").fetchone()
        place, _, name = str(row[0] if row is not None else "").partition(" ")
        if not place:
            return None
        return (
            f'at the source, column "{name}" of the row with ctid {place} has the character: '
            "replace the character, then resync the table"
        )

    def _check_types(self, types_out: str, types_in: str) -> None:
        """Check that both sides have the same types for binary values.

        Four bytes may be an integer or a float. Both queries lock the tables until the part is
        done, so the types cannot change.
        """
        if types_out and _types(self._source, types_out) != _types(self._target, types_in):
            raise NotCopiedError("changed", "a column has another type since the copy was planned")

    def _pump(
        self,
        source: "pq.abc.PGconn",
        target: "pq.abc.PGconn",
        hashes: "list[tuple[int, KeyedHash]]",
    ) -> int:
        """Forward COPY data, and return the number of bytes.

        libpq gathers rows into packets on both sides. libpq must never wait here, because psycopg
        holds the interpreter's lock meanwhile.
        """
        pump = choose_pump(source, target, hashes)
        began = time.monotonic()
        while (status := pump.pass_rows(PACE_ROWS, UNSENT_BYTES)) >= 0:
            _flush(target)
            if status == 0:
                _await_data(source)
            self._pace.wait(pump.rows, time.monotonic() - began, pump.size)
        if status != ROWS_END:
            failed = "target" if status == TARGET_FAILED else "source"
            raise psycopg.OperationalError(f"the connection to the {failed} failed in a copy")
        return pump.size


class RowPump:
    """Passes rows of a COPY on, like `streamer.compiled`, and puts hashes into columns."""

    def __init__(
        self,
        source: "pq.abc.PGconn",
        target: "pq.abc.PGconn",
        hashes: "list[tuple[int, KeyedHash]]",
    ) -> None:
        self._get, self._put = source.get_copy_data, target.put_copy_data
        self._hashes = hashes
        self.rows = self.size = 0

    def pass_rows(self, rows_max: int, bytes_max: int) -> int:
        """Pass rows on until a limit is reached or the source has sent no more.

        Return 1 at the limit, 0 to wait for the source, -1 at the end of the rows. Raises
        psycopg.Error.
        """
        get, put, hashes = self._get, self._put, self._hashes
        size_max = self.size + bytes_max
        for _ in range(rows_max):
            length, row = get(1)
            if length <= 0:
                return length
            put(hashed_line(bytes(row), hashes) if hashes else row)
            self.rows += 1
            self.size += length
            if self.size >= size_max:
                break
        return 1


def choose_pump(
    source: "pq.abc.PGconn", target: "pq.abc.PGconn", hashes: "list[tuple[int, KeyedHash]]"
) -> "RowPump | CompiledPump":
    """Return the compiled pump, unless a row must change or this process lacks the pump."""
    addresses = address_of(source), address_of(target)
    if hashes or choice.compiled is None or FUNCTIONS is None or None in addresses:
        return RowPump(source, target, hashes)
    pump: CompiledPump = choice.compiled.RowPump(*addresses, *astuple(FUNCTIONS))
    return pump


class Pace:
    """Limits rows and bytes per second, and slows down while the source's backlog is large."""

    def __init__(
        self,
        rows_per_second: float | None,
        total_rows_per_second: float | None = None,
        total_bytes_per_second: float | None = None,
    ) -> None:
        """The totals are for the tasks of all sources: see `share`."""
        self._is_throttled = False
        self._rows_per_second = rows_per_second
        self._totals = total_rows_per_second, total_bytes_per_second
        self._rounds = 1
        self._tasks = 1
        self._slept = 0.0

    @property
    def has_total(self) -> bool:
        return self._totals != (None, None)

    def begin(self, *, is_throttled: bool, rounds: int = 1) -> None:
        """Begin a part. *rounds*: the number of rounds that share the limit on rows per second."""
        self._is_throttled = is_throttled
        self._rounds = rounds
        self._tasks = 1
        self._slept = 0.0

    def share(self, tasks: int) -> None:
        """Share the totals among *tasks*, the highest number since the part began."""
        self._tasks = max(self._tasks, tasks)

    def wait(self, rows: int, seconds: float, size: int = 0) -> None:
        """Sleep if the part's *rows* and *size* in bytes took too few *seconds*, including earlier
        sleep.
        """
        pause = max(0.0, self._least_seconds(rows, size) - seconds)
        if self._is_throttled:
            worked = seconds - self._slept
            pause = max(pause, THROTTLED_TIMES * worked - seconds)
        if pause > 0:
            self._slept += pause
            time.sleep(pause)

    def _least_seconds(self, rows: int, size: int) -> float:
        total_rows, total_bytes = self._totals
        shares = (
            (self._rounds * rows, self._rows_per_second),
            (self._tasks * rows, total_rows),
            (self._tasks * size, total_bytes),
        )
        return max((count / rate for count, rate in shares if rate is not None), default=0.0)


_HAS_NEW_STORAGE_SQL: Final = """
select pg_catalog.to_regclass(%s)::oid is distinct from %s::int8::oid
    or coalesce(pg_catalog.bool_or(
        pg_catalog.pg_relation_filenode(s.oid) is distinct from s.filenode::oid), false)
from rows from (pg_catalog.unnest(%s::oid[]), pg_catalog.unnest(%s::int8[])) as s (oid, filenode)
"""
# Only a PL/pgSQL block can continue after a conversion error; a setting returns the result.
_FIND_UNTRANSLATABLE_SQL: Final = """
do $streamer$
declare
    streamer_row record;
    streamer_field record;
begin
    perform pg_catalog.set_config('streamer.place', '', false);
    for streamer_row in {rows} loop
        for streamer_field in
            select key, value from pg_catalog.json_each_text(pg_catalog.row_to_json(streamer_row))
        loop
            begin
                perform pg_catalog.convert_to(streamer_field.value, 'UTF8');
            exception when untranslatable_character or character_not_in_repertoire then
                perform pg_catalog.set_config('streamer.place',
                    streamer_row.ctid::text || ' ' || streamer_field.key, false);
                return;
            end;
        end loop;
    end loop;
end $streamer$
"""
INVALID_TEXT: Final = (
    psycopg.errors.CharacterNotInRepertoire,
    psycopg.errors.UntranslatableCharacter,
)
GONE: Final = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedColumn,
    psycopg.errors.InvalidSchemaName,
    psycopg.errors.WrongObjectType,
)


def begin_reading(source: "psycopg.Connection[Any]", ends: CopyEnds) -> None:
    """Begin the transaction that reads under the snapshot. Raises NotCopiedError."""
    check_server(source, ends.server)
    source.execute(f"set lock_timeout = '{LOCK_SECONDS}s'".encode())
    source.execute("begin isolation level repeatable read read only")
    _import(source, ends.snapshot_name)


def check_server(source: "psycopg.Connection[Any]", expected: ServerIdentity) -> None:
    """Refuse any server but *expected*. Raises NotCopiedError."""
    try:
        row = source.execute(IDENTITY_SQL).fetchone()
    except psycopg.errors.InsufficientPrivilege:
        return  # only the expected server has the snapshot
    assert row is not None
    if difference := find_difference(expected, identity_of(row[0], row[1], row[2], expected)):
        raise NotCopiedError("elsewhere", difference)


def verify_fence(target: "psycopg.Connection[Any]", ends: CopyEnds) -> None:
    """Refuse a target where the source's lock is not held by the process that planned the copy.

    A session stays on its server, so one check is enough. Each part checks the token again in the
    transaction that writes, because another process may have taken over the source on this server.
    """
    try:
        row = psycopg.RawCursor(target).execute(FENCE_SQL, ends.fence).fetchone()
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn):
        row = None  # the target has no bookkeeping
    if row is None or not row[0]:
        raise NotCopiedError(
            "elsewhere",
            "the target is not the server on which the source's lock is held",
        )


def _import(source: "psycopg.Connection[Any]", snapshot_name: str) -> None:
    """Import a snapshot. The error of a lost snapshot has one of several SQLSTATEs, so every
    permanent error means that the snapshot is lost.
    """
    try:
        source.execute(f"set transaction snapshot '{snapshot_name}'".encode())
    except psycopg.Error as exc:
        if exc.sqlstate is None or exc.sqlstate[:2] in ("08", "53", "57", "58"):
            raise
        raise NotCopiedError("snapshot", _describe(exc)) from None


def _types(connection: "psycopg.Connection[Any]", query: str) -> list[int]:
    """Return the OIDs of the types of a query's columns."""
    description = connection.execute(query.encode()).description
    return [column.type_code for column in description or ()]


def _start(pgconn: "pq.abc.PGconn", command: str, expected: pq.ExecStatus) -> None:
    pgconn.nonblocking = 1
    result = pgconn.exec_(command.encode())
    if result.status != expected:
        raise psycopg.errors.error_from_result(result)


def _await_data(pgconn: "pq.abc.PGconn") -> None:
    """Wait until the server has sent data, and read the data."""
    waiting = select.poll()
    waiting.register(pgconn.socket, select.POLLIN)
    waiting.poll()
    pgconn.consume_input()


def _flush(pgconn: "pq.abc.PGconn") -> None:
    """Wait until libpq has sent all data. Read the server's data meanwhile, because the server may
    wait for a reader.
    """
    while pgconn.flush():
        waiting = select.poll()
        waiting.register(pgconn.socket, select.POLLIN | select.POLLOUT)
        if any(event & ~select.POLLOUT for _, event in waiting.poll()):
            pgconn.consume_input()


def _end_copy(pgconn: "pq.abc.PGconn", error: bytes | None = None) -> None:
    _flush(pgconn)
    pgconn.put_copy_end(error)
    _flush(pgconn)


def _next_result(pgconn: "pq.abc.PGconn") -> "pq.abc.PGresult | None":
    while pgconn.is_busy():
        _await_data(pgconn)
    return pgconn.get_result()


def invalid_text(row: bytes) -> tuple[str, int] | None:
    """Return the first field of COPY's text format and the number of the first field that is not
    valid UTF-8; None without such a field.
    """
    fields = row.rstrip(b"\n").split(b"\t")
    for number, field in enumerate(fields):
        try:
            field.decode()
        except UnicodeDecodeError:
            return fields[0].decode(), number
    return None


def _finish(pgconn: "pq.abc.PGconn") -> int:
    """Read the end of a COPY; return the number of rows."""
    count = 0
    error: psycopg.Error | None = None
    while (result := _next_result(pgconn)) is not None:  # otherwise the connection stays busy
        if result.status != pq.ExecStatus.COMMAND_OK:
            error = error or psycopg.errors.error_from_result(result)
        count = result.command_tuples or 0
    if error is not None:
        raise error
    return count
