"""The cost of the capture of definitions for the commands of an application.

Each kind of command runs many times in a transaction, with and without the capture, on tables that
streamer publishes and on further tables. If the cost grows with the number of commands, the last
tenth differs from the first. The first command of a session is separate, because it loads PL/pgSQL,
compiles the functions and fills the session's caches. Two further rows show costs that no capture
can avoid: an empty event trigger, and an event trigger that only reads the command's objects. Times
are the CPU times of the backend, so that parallel work of the machine does not count.

    python -m benchmarks.capture_cost --postgres machine --count 1000
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg

from benchmarks.servers import find_binaries, version_of
from streamer.commands.demo.embedded_servers import Server
from streamer.mapping.rules import SourceMapping
from streamer.postgres.secret import Secret
from streamer.source.capture.capture_functions import create_sql

MAPPED_MS: Final = 20.0
OTHER_MS: Final = 2.0
FIRST_COMMANDS: Final = 51
"""The number of sessions whose first commands are measured, alternately with and without the
capture.
"""
SETTINGS: Final = {
    "wal_level": "logical",
    "fsync": "off",
    "max_locks_per_transaction": "4096",
    "autovacuum": "off",
}
_JIT_COSTS: Final = ("jit_above_cost", "jit_inline_above_cost", "jit_optimize_above_cost")
_TABLES: Final = (
    "create table t (id int primary key)",
    "create table u (id int primary key)",
    "create table p (id int primary key) partition by range (id)",
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of command: SQL for each number. ``before``: SQL that runs first, unmeasured.

    ``most_ms``: the limit, which is small for tables that streamer does not publish. ``body``: the
    body of an event trigger that replaces the capture.
    """

    name: str
    run: str
    before: str = ""
    most_ms: float = MAPPED_MS
    body: str | None = None

    @property
    def is_temporary(self) -> bool:
        return "temp" in self.before


_PART: Final = "create table p{n} partition of p for values from ({n}) to ({next})"
_TEMPORARY: Final = "create temp table x{n} (a int)"
_OTHER: Final = "alter table u alter id set default {n}"
_LOOK: Final = "perform from pg_catalog.pg_event_trigger_ddl_commands();"
KINDS: Final = (
    Kind("add a column", "alter table m{n} add column c int", "create table m{n} (id int)"),
    Kind("set a default", "alter table t alter id set default {n}"),
    Kind("create an index", "create index i{n} on m{n} (id)", "create table m{n} (id int)"),
    Kind(
        "drop an index",
        "drop index m{n}_pkey",
        "create table m{n} (id int); create index m{n}_pkey on m{n} (id)",
    ),
    Kind("drop a table", "drop table m{n}", "create table m{n} (id int)"),
    Kind("add a partition", _PART),
    Kind("detach a partition", "alter table p detach partition p{n}", _PART),
    Kind("drop a partition", "drop table p{n}", _PART),
    Kind("alter another table", _OTHER, "", OTHER_MS),
    Kind("… with an empty trigger", _OTHER, "", OTHER_MS, ""),
    Kind("… with one that looks", _OTHER, "", OTHER_MS, _LOOK),
    Kind("index another table", "create index i{n} on u (id)", "", OTHER_MS),
    Kind("make a temporary table", _TEMPORARY, "", OTHER_MS),
    Kind("drop a temporary table", "drop table x{n}", _TEMPORARY, OTHER_MS),
    Kind(
        "make a function",
        "create function f{n}() returns int language sql as 'select 1'",
        "",
        OTHER_MS,
    ),
)


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds a command: the first command, the median, and the first and last tenth."""

    first: float
    median: float
    begin: float
    end: float


def times_of(seconds: Sequence[float]) -> Times:
    """Return the distribution of commands in a transaction. Pure."""
    later = [second * 1000 for second in seconds[1:]]
    tenth = max(len(later) // 10, 1)
    return Times(
        seconds[0] * 1000,
        statistics.median(later),
        statistics.median(later[:tenth]),
        statistics.median(later[-tenth:]),
    )


def measure(server: Server, kind: Kind, count: int) -> tuple[Times, Times]:
    """Run a kind of command without and with the capture: a transaction of a new session each.

    The first commands of further new sessions come before.
    """
    urls = [_make_database(server, kind, count, captures=captures) for captures in (False, True)]
    firsts: list[list[float]] = [[], []]
    for _ in range(FIRST_COMMANDS):
        for url, seconds in zip(urls, firsts, strict=True):
            seconds += _run_timed(url, kind, 1, "rollback")
    bare, captured = (
        times_of([statistics.median(seconds), *_run_timed(url, kind, count, "commit")[1:]])
        for url, seconds in zip(urls, firsts, strict=True)
    )
    return bare, captured


def _make_database(server: Server, kind: Kind, count: int, *, captures: bool) -> str:
    name = "captured" if captures else "bare"
    server.execute(f"drop database if exists {name}")
    server.execute(f"create database {name}")
    url = server.url(name)
    source = SourceMapping("shop", None, Secret(url), ())
    with psycopg.connect(url, autocommit=True) as session:
        for sql in _TABLES:
            session.execute(sql.encode())
        _run_all(session, "" if kind.is_temporary else kind.before, count)
        tables = "all tables" if kind.most_ms == MAPPED_MS else "table t, p"
        session.execute(f"create publication {source.publication} for {tables}".encode())
        for sql in _capture_sql(kind, source, session.info.server_version) if captures else ():
            session.execute(sql.encode())
    return url


def _capture_sql(kind: Kind, source: SourceMapping, version: int) -> list[str]:
    if kind.body is None:
        return create_sql(source, "postgres", version)
    function = f"language plpgsql set jit = off as $$ begin {kind.body} end $$"
    return [
        f"create function f() returns event_trigger {function}",
        "create event trigger f on ddl_command_end execute function f()",
    ]


def _run_timed(url: str, kind: Kind, count: int, end: str) -> list[float]:
    """Run commands in a transaction of a new session, and return the seconds of each command."""
    seconds = []
    with psycopg.connect(url, autocommit=True) as session:
        _run_all(session, kind.before if kind.is_temporary else "", count)
        session.execute("begin")
        for number in range(count):
            sql = kind.run.format(n=number, next=number + 1)
            began = _cpu_seconds(session)
            session.execute(sql.encode())
            seconds.append(_cpu_seconds(session) - began)
        session.execute(end.encode())
    return seconds


def _cpu_seconds(session: "psycopg.Connection[tuple[object, ...]]") -> float:
    path = Path(f"/proc/{session.info.backend_pid}/schedstat")
    return int(path.read_text().split()[0]) / 1e9


def _run_all(session: "psycopg.Connection[tuple[object, ...]]", sql: str, count: int) -> None:
    with session.transaction():
        for number in range(count if sql else 0):
            session.execute(sql.format(n=number, next=number + 1).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--postgres", default="machine", help="machine, 16, 18 or a directory")
    parser.add_argument("--count", type=int, default=1000, help="commands in one transaction")
    parser.add_argument("--jit", choices=("on", "off"), default="on", help="with all costs at 0")
    parser.add_argument("--only", default="", help="kinds whose names have this text")
    options = parser.parse_args()
    binaries = find_binaries(options.postgres)
    with tempfile.TemporaryDirectory(prefix="streamer-bench-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        settings = SETTINGS | dict.fromkeys(_JIT_COSTS, "0") | {"jit": options.jit}
        server = Server(directory / "server", binaries, settings)
        server.create()
        server.start()
        try:
            print(f"PostgreSQL {version_of(binaries)}, jit = {options.jit}, milliseconds added")
            print(f"{'command':28} {'first':>8} {'median':>8} {'begin':>8} {'end':>8} {'most':>6}")
            for kind in KINDS:
                if options.only in kind.name:
                    _report(server, kind, options.count)
        finally:
            server.stop("immediate")


def _report(server: Server, kind: Kind, count: int) -> None:
    bare, captured = measure(server, kind, count)
    added = (
        captured.first - bare.first,
        captured.median - bare.median,
        captured.begin - bare.begin,
        captured.end - bare.end,
    )
    figures = " ".join(f"{figure:8.2f}" for figure in added)
    verdict = "" if added[1] <= kind.most_ms else "  too much"
    print(f"{kind.name:28} {figures} {kind.most_ms:6.0f}{verdict}", flush=True)


if __name__ == "__main__":
    main()
