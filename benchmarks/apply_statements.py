"""Processor time of the target's backend for statements that write a set of changes.

The benchmark compares only the server's statements, because the client encodes rows beforehand.
Rows come in binary. The variants of a profile take turns, each in a separate transaction. The
figure is the microseconds of processor time that the backend needs for a row
(``/proc/<pid>/schedstat``), as the median of the rounds.
"""

import argparse
import datetime
import decimal
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
from psycopg.types.numeric import Int8

from benchmarks.servers import find_binaries, settings_for
from streamer.commands.demo.embedded_servers import Server

Rows = list[tuple[Any, ...]]
Variant = Callable[[psycopg.Connection, Rows, Rows], None]

ITEMS = (
    "create table items (id bigint primary key, name text, amount numeric(12,2), at timestamptz,"
    " note text) with (fillfactor = 90, autovacuum_enabled = off)"
)
TYPES = ["int8", "text", "numeric", "timestamptz", "text"]
NAMES = ["id", "name", "amount", "at", "note"]
AT = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
STAGE = "create temporary table stage (op smallint, mask text, {}) on commit delete rows".format(
    ", ".join(f"c_{n} {kind}" for n, kind in enumerate(TYPES))
)
SETS = ", ".join(f"{name} = s.c_{n}" for n, name in enumerate(NAMES) if n)
VALUES = ", ".join(f"s.c_{n}" for n in range(5))
UPDATE = f"update items t set {SETS} from pg_temp.stage s where s.op = 2 and t.id = s.c_0"
DELETE = "delete from items t using pg_temp.stage s where s.op = 1 and t.id = s.c_0"
MATCHED = f"when matched then update set {SETS}"
MISSING = f"when not matched then insert values ({VALUES})"
MERGE = "merge into items t using pg_temp.stage s on t.id = s.c_0 "
UPSERT = (
    f"insert into items select {VALUES} from pg_temp.stage s on conflict (id) do update set "
    + ", ".join(f"{name} = excluded.{name}" for name in NAMES[1:])
)
ARRAYS = ", ".join(f"%s::{kind}[]" for kind in TYPES)
COLUMNS = ", ".join(f"c_{n}" for n in range(5))


def row(key: int) -> tuple[Any, ...]:
    """Return a row with *key*, for psycopg's binary dumpers."""
    amount = decimal.Decimal(key) * decimal.Decimal("1.25")
    return (key, f"name of item {key}", amount, AT, random.randbytes(16).hex())


def stage(connection: psycopg.Connection, rows: Rows, op: int) -> None:
    with connection.cursor().copy(
        f"copy pg_temp.stage (op, {COLUMNS}) from stdin (format binary)"
    ) as copy:
        copy.set_types(["int2", *TYPES])
        for row in rows:
            copy.write_row((op, *row))


def copy_items(connection: psycopg.Connection, rows: Rows) -> None:
    with connection.cursor().copy("copy items from stdin (format binary)") as copy:
        copy.set_types(TYPES)
        for row in rows:
            copy.write_row(row)


def arrays(rows: Rows) -> list[list[Any]]:
    columns: list[list[Any]] = [list(column) for column in zip(*rows, strict=True)]
    columns[0] = [Int8(key) for key in columns[0]]
    return columns


def staged(*statements: str, sort: bool = False) -> Variant:
    """Stage updates and inserts together, and run *statements*."""

    def run(connection: psycopg.Connection, updates: Rows, inserts: Rows) -> None:
        stage(connection, sorted(updates) if sort else updates, 2)
        if inserts:
            stage(connection, inserts, 3)
        for statement in statements:
            connection.execute(statement)

    return run


def update_and_copy(connection: psycopg.Connection, updates: Rows, inserts: Rows) -> None:
    stage(connection, updates, 2)
    connection.execute(UPDATE)
    copy_items(connection, inserts)


def update_by_arrays(connection: psycopg.Connection, updates: Rows, inserts: Rows) -> None:
    connection.execute(
        f"update items t set {SETS} from unnest({ARRAYS}) s ({COLUMNS}) where t.id = s.c_0",
        arrays(updates),
        binary=True,
    )
    if inserts:
        insert_by_arrays(connection, [], inserts)


def insert_by_arrays(connection: psycopg.Connection, updates: Rows, inserts: Rows) -> None:
    connection.execute(
        f"insert into items select * from unnest({ARRAYS})", arrays(inserts), binary=True
    )


def update_sets(connection: psycopg.Connection, updates: Rows, inserts: Rows) -> None:
    """Rows lack one of three columns: a statement for each set of columns."""
    for lacking in (1, 3, 4):
        present = [n for n in range(5) if n != lacking]
        listed = ", ".join(f"c_{n}" for n in present)
        with connection.cursor().copy(
            f"copy pg_temp.stage (op, {listed}) from stdin (format binary)"
        ) as copy:
            copy.set_types(["int2", *(TYPES[n] for n in present)])
            for row in updates[lacking % 3 :: 3]:
                copy.write_row((lacking, *(row[n] for n in present)))
        sets = ", ".join(f"{NAMES[n]} = s.c_{n}" for n in present if n)
        connection.execute(
            f"update items t set {sets} from pg_temp.stage s where s.op = {lacking}"
            " and t.id = s.c_0"
        )


def update_masked(connection: psycopg.Connection, updates: Rows, inserts: Rows) -> None:
    """Update all rows with a single statement; a mask shows the columns that a row lacks."""
    with connection.cursor().copy(
        f"copy pg_temp.stage (op, mask, {COLUMNS}) from stdin (format binary)"
    ) as copy:
        copy.set_types(["int2", "text", *TYPES])
        for number, row in enumerate(updates):
            lacking = (3, 1, 4)[number % 3]
            mask = "".join("u" if n == lacking else "." for n in range(5))
            copy.write_row((2, mask, *(None if n == lacking else row[n] for n in range(5))))
    sets = ", ".join(
        f"{name} = case when substr(s.mask, {n + 1}, 1) = 'u' then t.{name} else s.c_{n} end"
        if n in (1, 3, 4)
        else f"{name} = s.c_{n}"
        for n, name in enumerate(NAMES)
        if n
    )
    connection.execute(
        f"update items t set {sets} from pg_temp.stage s where s.op = 2 and t.id = s.c_0"
    )


def delete_in_order(connection: psycopg.Connection, updates: Rows, inserts: Rows) -> None:
    delete_staged(connection, sorted(updates), inserts)


def delete_staged(connection: psycopg.Connection, updates: Rows, inserts: Rows) -> None:
    with connection.cursor().copy(
        "copy pg_temp.stage (op, c_0) from stdin (format binary)"
    ) as copy:
        copy.set_types(["int2", "int8"])
        for row in updates:
            copy.write_row((1, row[0]))
    connection.execute(DELETE)


def delete_by_arrays(connection: psycopg.Connection, updates: Rows, inserts: Rows) -> None:
    connection.execute(
        "delete from items t using unnest(%s::int8[]) s (c_0) where t.id = s.c_0",
        [[Int8(row[0]) for row in updates]],
        binary=True,
    )


def delete_any(connection: psycopg.Connection, updates: Rows, inserts: Rows) -> None:
    connection.execute(
        "delete from items where id = any (%s::int8[])",
        [[Int8(row[0]) for row in updates]],
        binary=True,
    )


PROFILES: dict[str, tuple[int, int, dict[str, Variant]]] = {
    "insert": (
        0,
        1,
        {
            "COPY": lambda connection, _, inserts: copy_items(connection, inserts),
            "INSERT from unnest": insert_by_arrays,
            "stage, INSERT ON CONFLICT": staged(UPSERT),
            "stage, MERGE": staged(MERGE + MATCHED + " " + MISSING),
        },
    ),
    "update": (
        1,
        0,
        {
            "stage, UPDATE": staged(UPDATE),
            "stage in key order, UPDATE": staged(UPDATE, sort=True),
            "stage, UPDATE from a sort of it": staged(
                f"update items t set {SETS} from (select * from pg_temp.stage where op = 2"
                " order by c_0) s where t.id = s.c_0"
            ),
            "UPDATE from unnest": update_by_arrays,
            "stage, MERGE": staged(MERGE + MATCHED),
            "stage, INSERT ON CONFLICT": staged(UPSERT),
        },
    ),
    "mix": (
        4,
        1,
        {
            "stage, UPDATE; COPY": update_and_copy,
            "UPDATE, INSERT from unnest": update_by_arrays,
            "stage, MERGE": staged(MERGE + MATCHED + " " + MISSING),
            "stage, INSERT ON CONFLICT": staged(UPSERT),
        },
    ),
    "unchanged columns": (
        1,
        0,
        {"one UPDATE for each set": update_sets, "one UPDATE with a mask": update_masked},
    ),
    "delete": (
        1,
        0,
        {
            "stage, DELETE": delete_staged,
            "stage in key order, DELETE": delete_in_order,
            "DELETE from unnest": delete_by_arrays,
            "DELETE = any": delete_any,
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=int, default=300_000, help="rows of the table")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=int, action="append", help="changes of a transaction")
    parser.add_argument("--postgres", default="machine", help="as `find_binaries` takes it")
    options = parser.parse_args()
    binaries = find_binaries(options.postgres)
    with tempfile.TemporaryDirectory(prefix="streamer-bench-") as directory:
        Path(directory).chmod(0o755)
        server = Server(Path(directory) / "target", binaries, settings_for(binaries))
        server.create()
        server.start()
        try:
            with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
                print(f"PostgreSQL {connection.info.server_version // 10000}")
                prepare(connection, options.table)
                for window in options.window or [10_000, 100]:
                    for profile in PROFILES:
                        report(connection, profile, window, options)
        finally:
            server.stop("immediate")


def prepare(connection: psycopg.Connection, size: int) -> None:
    connection.execute(ITEMS)
    copy_items(connection, [row(key) for key in range(1, size + 1)])
    connection.execute("vacuum analyze items")
    connection.execute(STAGE)
    for setting in ("enable_hashjoin", "enable_mergejoin", "jit"):
        connection.execute(f"set {setting} = off")


def report(
    connection: psycopg.Connection, profile: str, window: int, options: argparse.Namespace
) -> None:
    updated, inserted, variants = PROFILES[profile]
    times: dict[str, list[float]] = {name: [] for name in variants}
    update_count = window * updated // (updated + inserted)
    repeats = max(1, 2000 // window)
    for number in range(options.rounds + 1):
        for name, variant in variants.items():
            used = 0.0
            for _ in range(repeats):
                updates = [row(k) for k in random.sample(range(1, options.table + 1), update_count)]
                inserts = [row(options.table + n) for n in range(1, window - update_count + 1)]
                used += measure(connection, variant, updates, inserts)
            if number:  # the first round warms up
                times[name].append(used / repeats / window * 1e6)
        connection.execute("vacuum items")
    print(f"{profile}, {window} changes:")
    for name, us in times.items():
        print(f"  {name}: {statistics.median(us):.2f} µs ({min(us):.2f} to {max(us):.2f})")


def measure(
    connection: psycopg.Connection, variant: Variant, updates: Rows, inserts: Rows
) -> float:
    """Run *variant* and roll back, so that the next variant has the same table; return seconds."""
    connection.execute("begin")
    start = _cpu_seconds(connection)
    variant(connection, updates, inserts)
    used = _cpu_seconds(connection) - start
    connection.execute("rollback")
    connection.execute("truncate pg_temp.stage")
    return used


def _cpu_seconds(connection: psycopg.Connection) -> float:
    text = Path(f"/proc/{connection.info.backend_pid}/schedstat").read_text()
    return int(text.split()[0]) / 1e9


if __name__ == "__main__":
    main()
