"""Each kind of target follows a history of migrations under load, and three kills of the program."""

import contextlib
import os
import random
import re
import shlex
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import psycopg
import pytest

from tests.support.dumps import Dump, Sides, of_history, of_tenants
from tests.support.equal_sides import World, assert_equal
from tests.support.postgres import Database
from tests.support.process import Process, caught_up, command, status
from tests.support.streamer import write_config
from tests.support.waiting import eventually

pytestmark = [pytest.mark.timeout(400)]

STEPS = Path(__file__).with_name("migrations.sql")
SCHEMA = """
create table users (id serial primary key, email varchar(254) not null);
create table posts (id serial primary key, title varchar(50) not null default '', body text,
                    views integer, rating text, legacy boolean default true);
create table comments (id serial primary key, post_id integer, text text);
create table tags (id serial primary key, post_id integer not null, name varchar(20));
create table orders (id serial primary key, total numeric not null default 0,
                     created_at timestamptz, closed_at timestamptz);
create table events (id bigserial primary key, payload text);
insert into users (email) select 'user' || g || '@example.org' from generate_series(1, 20) g;
insert into posts (title, body, rating) select 'post ' || g, 'x', g from generate_series(1, 20) g;
insert into comments (post_id, text) select g, 'first' from generate_series(1, 20) g;
insert into tags (post_id, name) select g, 'tag' || g from generate_series(1, 20) g;
insert into orders (total) select g from generate_series(1, 20) g;
insert into events (payload) select 'e' from generate_series(1, 20) g;
create type ticket_state as enum ('open', 'begun', 'closed');
create table tickets (id serial primary key, title text not null default '',
                      kind text not null default 'bug', state ticket_state not null default 'open',
                      notes text, rank text,
                      opened date default current_date, due date default current_date + 7);
create table ledgers (id serial primary key, uid uuid not null default gen_random_uuid(),
                      amount integer);
create table accounts (id serial primary key, name text, city text, zip varchar(10));
create table payments (id serial primary key, amount numeric(12, 2) not null default 0);
create table sessions (id integer primary key, token text not null);
create table readings (id bigserial, at date not null, value integer, primary key (id, at))
    partition by range (at);
create table readings_2023 partition of readings for values from ('2023-01-01') to ('2024-01-01');
create table readings_2024 partition of readings for values from ('2024-01-01') to ('2025-01-01');
insert into tickets (state, notes, rank)
    select (array['open', 'begun', 'closed'])[1 + g % 3]::ticket_state, 'n' || g, g
      from generate_series(1, 20) g;
insert into ledgers (amount) select g from generate_series(1, 20) g;
insert into accounts (name, city, zip) select 'a' || g, 'c' || g, g from generate_series(1, 20) g;
insert into payments (amount) select g from generate_series(1, 20) g;
insert into sessions select g, 't' || g from generate_series(1, 20) g;
insert into readings (at, value) select date '2023-01-01' + g * 30, g from generate_series(1, 20) g;
"""
TABLES = [
    *("users", "posts", "comments", "tags", "orders", "events", "tickets", "ledgers", "accounts"),
    *("payments", "sessions", "readings"),
]
MADE = ["shop_bills", "shop_profiles"]
"""Tables that the migrations create, under the final names."""
LOAD = [
    "insert into users (email) values ('load' || random() || '@example.org')",
    "update users set email = 'was ' || email where id % 7 = 3 and length(email) < 60",
    "insert into posts (title) values ('load')",
    "update posts set title = title || '.' where id % 7 = 1 and length(title) < 20",
    "insert into comments (text) values ('load')",
    "delete from comments where id % 11 = 3",
    "insert into tags (post_id) values ((random() * 1000000)::int)",
    "insert into orders (total) values (5)",
    "update orders set total = total + 1 where id % 9 = 2 and total < 99",
    "insert into events default values",
    "insert into shop_invoices (total) values (1)",
    "insert into shop_bills (total) values (1)",
    "delete from shop_bills where total = 1 and id % 3 = 0",
    "insert into tickets default values",
    "update tickets set due = due + 1 where id % 7 = 2",
    "insert into ledgers (amount) values (1)",
    "update ledgers set amount = amount + 1 where id % 5 = 1",
    "insert into accounts (name) values ('load')",
    "delete from accounts where name = 'load' and id % 4 = 1",
    "insert into payments (amount) values (9)",
    "update payments set amount = amount + 1 where id % 5 = 1",
    "update sessions set token = token || '.' where id % 4 = 1 and length(token) < 20",
    "insert into readings (at, value) values (date '2024-01-01' + (random() * 300)::int, 0)",
    "update readings set value = value + 1 where id % 6 = 1",
]
PAUSE_SECONDS = 0.04
KILLS = 3
SETTLED_SECONDS = 60


RISKY = ("drop_column", "change_type", "drop_attribute", "detach_partition")
"""Kinds of changes that can lose values."""


@dataclass(frozen=True)
class Step:
    """``stops``: the table and the kind for which it can stop.

    ``resync``: the table that stops in any case, until the operator copies it.
    """

    name: str
    statements: str
    alone: bool
    rolls_back: bool
    stops: tuple[str, str] | None
    resync: str | None


def steps() -> list[Step]:
    found = []
    for part in STEPS.read_text().split("\n--- ")[1:]:
        title, _, sql = part.partition("\n")
        name, _, flag = title.partition(" [")
        words = flag.rstrip("]").split()
        stops = (words[1], words[2]) if words[:1] == ["stops"] else None
        resync = words[1] if words[:1] == ["resync"] else None
        found.append(Step(name, sql, words == ["alone"], words == ["rolls", "back"], stops, resync))
    return found


@contextlib.contextmanager
def load(source: Database) -> Iterator[None]:
    """Change rows of all tables in a second thread, during a block."""
    over = threading.Event()
    chosen = random.Random(14)

    def work() -> None:
        with source.connect() as connection:
            while not over.wait(PAUSE_SECONDS):
                # A statement may come in the middle of a migration, as in any application.
                with contextlib.suppress(psycopg.Error):
                    connection.execute(chosen.choice(LOAD).encode())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def migrate(source: Database, step: Step) -> None:
    """Run a step, again after a deadlock with the load."""
    for attempt in range(5):
        try:
            with source.connect() as connection:
                if step.alone:
                    for statement in re.split(r";\n", step.statements.strip()):
                        connection.execute(statement.encode())
                    return
                connection.execute("begin")
                connection.execute(step.statements.encode())
                connection.execute("rollback" if step.rolls_back else "commit")
                return
        except psycopg.errors.DeadlockDetected:
            if attempt == 4:
                raise


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = list(WORLDS) if os.environ.get("TEST_COMBINATIONS") == "all" else ["plain"]
    metafunc.parametrize("name", names)


def test_migrations_arrive_at_each_kind_of_target(
    name: str, source: Database, second: Database, target: Database, tmp_path: Path
) -> None:
    world, stopping, left_out = WORLDS[name]
    sources = dict(zip(world.sids, (source, second), strict=False))
    config = configure(world, sources, target, tmp_path / "config.yaml", stopping)
    history = [step for step in steps() if step.name not in left_out]
    assert len(history) >= 50
    kills = {len(history) * (n + 1) // (KILLS + 1) for n in range(KILLS)}
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(Process(config, spark=False))
        caught_up(process)
        writers = stack.enter_context(contextlib.ExitStack())
        for db in sources.values():
            writers.enter_context(load(db))
        for number, step in enumerate(history):
            for sid, db in sources.items():
                table, kind = step.stops or ("", "")
                before = columns(db, table) if kind in stopping else []
                migrate(db, step)
                if step.resync is not None:
                    follow(config, sid, step.resync, "resync")
                if kind in stopping:
                    assert f"on_ddl is stop for {kind}" in error_of(config, sid, table)
                    assert columns(target, table) == before
                    follow(config, sid, table, "ddl apply")
            if number in kills:
                process.kill()
                process = stack.enter_context(Process(config, spark=False))
            if len(sources) > 1:  # the next step finds both tenants at this step
                caught_up(process, SETTLED_SECONDS)
        writers.close()
        assert_equal(world, sources, target, process)


def of_partitions(source: Dump, target: Dump) -> Sides:
    """A partitioned target keeps the partition that the migrations detach."""
    kept = "readings_2024"
    return source, {name: text for name, text in target.items() if kept not in name + text}


def of_shared(source: Dump, target: Dump) -> Sides:
    """The servers lack the extension for an exclusion constraint that has `sid`. A shared table
    keeps the former label of an enum, because a peer may still have rows with the label.
    """
    kept = re.compile(r"(?<=\n)    'published',?\n|,\n    'published'(?=\n)")
    wanted, found = of_tenants(source, target)
    wanted = {name: text for name, text in wanted.items() if "EXCLUDE USING" not in text}
    return wanted, found | {
        name: kept.sub("", text) for name, text in found.items() if name.endswith(".status_of_post")
    }


def follow(config: Path, sid: str | None, table: str, action: str) -> None:
    """Run the command that the error of a table names, until the table streams again.

    Each command of a step can stop the table.
    """
    error: str | None = error_of(config, sid, table)
    while error is not None:
        named = re.search(f"streamer ({action} [^;,`]*)", error)
        assert named is not None, error
        done = command(config, *shlex.split(named[1]))
        assert done.returncode == 0, done.stderr
        error = next_error(config, sid, table, error)


def next_error(config: Path, sid: str | None, table: str, former: str) -> str | None:
    """Wait until a table is ready, or has a new error; return that error."""

    def find() -> list[str | None]:
        if table_of(config, sid, table, "ready"):
            return [None]
        stopped = table_of(config, sid, table, "error")
        return [str(stopped["error"])] if stopped and stopped["error"] != former else []

    return cast("str | None", eventually(find, what=former)[0])


def error_of(config: Path, sid: str | None, table: str) -> str:
    """Wait until a table stops, and return the error."""
    stopped = eventually(lambda: table_of(config, sid, table, "error"), what=f"{table} stops")
    return str(stopped["error"])


def columns(database: Database, table: str) -> list[tuple[object, ...]]:
    """Return names and types of a table's columns; NOT NULL waits for the values of new columns."""
    return database.execute(
        "select attname, format_type(atttypid, atttypmod) from pg_attribute"
        f" where attrelid = to_regclass('{table}') and attnum > 0 and not attisdropped"
        " order by attnum"
    )


def table_of(config: Path, sid: str | None, table: str, state: str) -> dict[str, object] | None:
    """Return the status of a table in *state*; None in a different state."""
    return next(
        (
            of_table
            for source in status(config)
            for of_table in source["tables"]
            if (source["sid"], of_table["source"], of_table["state"])
            == (sid, f"public.{table}", state)
        ),
        None,
    )


def configure(
    world: World,
    sources: dict[str | None, Database],
    target: Database,
    path: Path,
    stopping: tuple[str, ...],
) -> Path:
    for db in sources.values():
        db.execute(SCHEMA)
        db.parameters = "options=-c%20logical_decoding_work_mem%3D64kB"
    actions = ", ".join(f"{k}: {'stop' if k in stopping else 'apply'}" for k in RISKY)
    rules = [f"{table}: {world.rules.get(table, '')}" for table in [*TABLES, '"shop_*"']]
    (sid, first), *others = sources.items()
    write_config(
        path,
        first,
        target,
        "\n".join(rules),
        group=f"ddl: capture\ncreate: all\non_ddl: {{{actions}}}",
        sid=sid,
        others={str(other): db for other, db in others},
    )
    return path


Changes = tuple[str, ...]
WORLDS: dict[str, tuple[World, Changes, Changes]] = {
    "plain": (World(), ("drop_column", "drop_attribute"), ()),
    "stop": (World(), RISKY, ()),
    "partitioned": (World(rules={"readings": "{partitioned: true}"}, sides=of_partitions), (), ()),
    "tenants": (
        World(sides=of_shared, sids=("a", "b"), failed=("exclusion",)),
        (),
        ("rename_table", "add_index of the renamed table"),
    ),
    "history": (
        World(
            rules=dict.fromkeys([*TABLES, '"shop_*"'], "{type: history}"),
            sides=of_history,
            unmade=("foreign key",),
            current="kvsz_end = '9999-01-01' and not kvsz_deleted",
        ),
        (),
        (
            "change_column using an expression, not null in the same command",
            "RemoveField, AddField: a column comes again under its name",
        ),
    ),
}
"""Kinds of targets, the changes that wait for a command of the operator there, and the steps that
stop such a table by design.
"""
