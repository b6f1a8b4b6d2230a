"""Simpler designs, measured beside the present designs: `results/measurements.md`.

``journal``: segment files, or a SQLite file. ``wide``: staged rows of typed columns, or of two
arrays. ``partitions``: the catalog query about attached partitions. Times are processor seconds of
the process or session that does the work; rounds are interleaved.
"""

import argparse
import os
import resource
import sqlite3
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import psycopg

from benchmarks.servers import source_and_target
from streamer.source.journal.journal_files import Journal, read_record
from streamer.source.journal.journal_records import JournalIdentity, Kind, Record
from streamer.source.tables.attached_partitions import _LEAVES_SQL
from streamer.source.timeline_branches import Branch
from streamer.util.lsn import Lsn

ROUNDS: Final = 3
RECORD_BYTES: Final = 1024 * 1024
JOURNAL_BYTES: Final = 192 * 1024 * 1024
CHANGED_ROWS: Final = 20_000


@contextmanager
def measured(timings: list[tuple[float, float]]) -> Iterator[None]:
    """Add seconds of processor and of the clock to *timings*."""
    cpu, began = _cpu(), time.monotonic()
    yield
    timings.append((_cpu() - cpu, time.monotonic() - began))


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def show(name: str, timings: list[tuple[float, float]], count: float, unit: str) -> None:
    cpu, clock = (statistics.median(column) for column in zip(*timings, strict=True))
    print(f"{name:40} {cpu / count:10.3f} cpu {clock / count:10.3f} clock  per {unit}")


# ---- the journal -------------------------------------------------------------------------------


def journal() -> None:
    body = os.urandom(RECORD_BYTES)
    count = JOURNAL_BYTES // RECORD_BYTES
    records = [Record(Kind.COMMITS, body, Lsn(n + 1), n, 0) for n in range(count)]
    times: dict[str, list[tuple[float, float]]] = {}
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory(prefix="streamer-bench-") as directory:
            _files(Path(directory), records, times)
            _sqlite(Path(directory), records, times)
    for name, timings in times.items():
        show(name, timings, JOURNAL_BYTES / 1e9, "GB")


def _files(
    directory: Path, records: list[Record], times: dict[str, list[tuple[float, float]]]
) -> None:
    written = Journal.create(directory / "files", JournalIdentity("1", "slot"), Lsn(0), Branch(1))
    with measured(times.setdefault("files, write", [])):
        for record in records:
            written.write([record])
    segment = written.segment_at(Lsn(0))
    with measured(times.setdefault("files, read", [])):
        descriptor, offset = os.open(segment.path, os.O_RDONLY), 0
        while (result := read_record(descriptor, offset, segment.size)) is not None:
            offset = result[1]
        os.close(descriptor)
    with measured(times.setdefault("files, delete", [])):
        written.remove()


def _sqlite(
    directory: Path, records: list[Record], times: dict[str, list[tuple[float, float]]]
) -> None:
    path = directory / "journal.sqlite"
    base = sqlite3.connect(path, isolation_level=None)
    base.executescript(
        "pragma page_size = 65536; pragma journal_mode = wal; pragma synchronous = full;"
        "pragma locking_mode = exclusive;"
        "create table record (seq integer primary key, kind int, lsn int, crc int, body blob)"
    )
    insert = "insert into record (kind, lsn, crc, body) values (?, ?, ?, ?)"
    with measured(times.setdefault("sqlite, write", [])):
        for record in records:
            crc = zlib.crc32(record.body)
            base.execute(insert, (int(record.kind), int(record.lsn), crc, record.body))
    with measured(times.setdefault("sqlite, read", [])):
        for _, _, crc, body in base.execute("select kind, lsn, crc, body from record order by seq"):
            assert zlib.crc32(body) == crc
    with measured(times.setdefault("sqlite, delete", [])):
        for lsn in range(64, len(records) + 64, 64):
            base.execute("delete from record where lsn <= ?", (lsn,))
    size = sum(file.stat().st_size for file in directory.glob("journal.sqlite*"))
    print(f"sqlite keeps {size / 1e6:.0f} MB of disk after the deletion of {len(records)} MB")
    base.close()


# ---- staging of wide rows ----------------------------------------------------------------------


def wide() -> None:
    with source_and_target() as (server, _):
        server.execute("create database bench")
        with psycopg.connect(server.url("bench"), autocommit=True) as connection:
            for width in (10, 100, 300):
                _wide(connection, width)


def _wide(connection: "psycopg.Connection[tuple[object, ...]]", width: int) -> None:
    rows = max(200, CHANGED_ROWS // width)
    names = [f"c_{n}" for n in range(width)]
    connection.execute("drop table if exists t")
    connection.execute(
        f"create table t (id int primary key, {', '.join(f'{n} int' for n in names)})"
    )
    connection.execute(
        f"insert into t select g, {', '.join('g' for _ in names)} from generate_series(1, {rows}) g"
    )
    connection.execute(
        f"create temporary table typed (seq int, id int, {', '.join(f'{n} int' for n in names)})"
    )
    connection.execute("create temporary table arrays (seq int, new text[])")
    listed = ", ".join("g" for _ in names)
    connection.execute(f"insert into typed select g, g, {listed} from generate_series(1, {rows}) g")
    connection.execute(
        f"insert into arrays select g, array[g, {listed}]::text[] from generate_series(1, {rows}) g"
    )
    by_name = ", ".join(f"{n} = s.{n} + 1" for n in names)
    by_number = ", ".join(f"{n} = s.new[{i}]::int + 1" for i, n in enumerate(names, 2))
    block = (
        "do $$ declare s record; begin for s in select * from {stage} order by seq loop"
        " update t set {values} where id = {key}; end loop; end $$"
    )
    forms = {
        "columns": block.format(stage="typed", values=by_name, key="s.id"),
        "parts": _in_parts(connection, names, rows),
        "arrays": block.format(stage="arrays", values=by_number, key="s.new[1]::int"),
    }
    for name, statement in forms.items():
        timings = [_timed(partial(connection.execute, statement)) for _ in range(ROUNDS)]
        micros = [(seconds * 1e6, seconds * 1e6) for seconds in timings]
        show(f"{width} values, staged as {name}", micros, rows, "row, µs")
    connection.execute("drop table typed, arrays")


def _in_parts(
    connection: "psycopg.Connection[tuple[object, ...]]", names: list[str], rows: int
) -> str:
    """Stage the values in tables of at most 120, as `streamer.apply.sql.wide_rows` does; return the
    block.
    """
    parts = [names[start : start + 120] for start in range(0, len(names), 120)]
    for n, some in enumerate(parts):
        columns, listed = ", ".join(f"{c} int" for c in some), ", ".join("g" for _ in some)
        connection.execute(f"drop table if exists pg_temp.part_{n}")
        connection.execute(f"create temporary table part_{n} (seq int, {columns})")
        series = f"from generate_series(1, {rows}) g"
        connection.execute(f"insert into part_{n} select g, {listed} {series}")
    numbers = range(len(parts))
    values = ", ".join(f"{c} = s.p{n}.{c} + 1" for n, some in enumerate(parts) for c in some)
    cursors = "".join(f"c{n} cursor for select * from part_{n} order by seq; " for n in numbers)
    return f"""do $$ declare s0 record; {cursors} begin
        {" ".join(f"open c{n};" for n in numbers)}
        for s0 in select seq from part_0 order by seq loop
            <<s>> declare {" ".join(f"p{n} record;" for n in numbers)} begin
                {" ".join(f"fetch c{n} into p{n};" for n in numbers)}
                update t set {values} where id = s0.seq;
            end;
        end loop; end $$"""


def _timed(act: Callable[[], object]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


# ---- attached partitions -----------------------------------------------------------------------


_OIDS_SQL: Final = """
select i.inhrelid from unnest(%s::text[], %s::text[]) w (s, n),
     pg_partition_tree(format('%%I.%%I', w.s, w.n)::regclass) t
join pg_inherits i on i.inhrelid = t.relid
"""


def partitions() -> None:
    with source_and_target() as (server, _):
        server.execute("create database bench")
        with psycopg.connect(server.url("bench"), autocommit=True) as connection:
            connection.execute("create table plain (id int)")
            connection.execute("create table parted (id int) partition by range (id)")
            for count in (10, 100, 1000):
                have = connection.execute("select count(*) from pg_inherits").fetchone()
                assert have is not None
                for n in range(int(have[0]), count):
                    connection.execute(
                        f"create table p{n} partition of parted for values from ({n}) to ({n + 1})"
                    )
                for name, sql in (("all facts", _LEAVES_SQL), ("OIDs alone", _OIDS_SQL)):
                    query = partial(connection.execute, sql, (["public"], ["parted"]))
                    middle = statistics.median(_timed(query) for _ in range(5 * ROUNDS)) * 1e3
                    print(f"{count:5} partitions, {name:12} {middle:8.2f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["journal", "wide", "partitions"], nargs="*")
    forms = {"journal": journal, "wide": wide, "partitions": partitions}
    for form in parser.parse_args().what or list(forms):
        forms[form]()
