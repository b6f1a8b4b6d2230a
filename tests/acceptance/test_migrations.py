"""Fifty steps of a web application's schema run at a source under load, and the target follows."""

import asyncio
import contextlib
import random
import re
import shlex
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from streamer.commands import compare as compare_command
from streamer.commands import ddl
from streamer.compare.comparison import ComparisonScope, Options
from streamer.runtime import definition_maker as definition_builder
from streamer.target.connection import TargetAddress
from tests.support.definitions import everything
from tests.support.postgres import Database, contents
from tests.support.process import command
from tests.support.streamer import MakeStreamer, Streamer

pytestmark = [
    pytest.mark.usefixtures("without_spark", "deferred_indexes", "short_backoffs"),
    pytest.mark.timeout(240),
]

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
"""
TABLES = ["users", "posts", "comments", "tags", "orders", "events"]
MADE = "shop_bills"
"""A table that the migrations create, under another name."""
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
]
PAUSE_SECONDS = 0.02


@dataclass(frozen=True)
class Step:
    """``stops``: the table and the kind for which it can stop."""

    name: str
    statements: str
    alone: bool
    rolls_back: bool
    stops: tuple[str, str] | None


def steps() -> list[Step]:
    found = []
    for part in STEPS.read_text().split("\n--- ")[1:]:
        title, _, sql = part.partition("\n")
        name, _, flag = title.partition(" [")
        words = flag.rstrip("]").split()
        stops = (words[1], words[2]) if words[:1] == ["stops"] else None
        found.append(Step(name, sql, words == ["alone"], words == ["rolls", "back"], stops))
    return found


@contextlib.contextmanager
def load(source: Database) -> Iterator[None]:
    """Change rows of all tables in another thread, for the length of a block."""
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


@pytest.mark.parametrize("risky", ["apply", "stop"])
async def test_the_target_follows_a_history_of_migrations(
    risky: str,
    source: Database,
    target: Database,
    stream: MakeStreamer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(definition_builder, "LOOK_SECONDS", 0.2)
    source.execute(SCHEMA)
    source.parameters = "options=-c%20logical_decoding_work_mem%3D64kB"
    stopping = ("drop_column", "change_type", "drop_attribute")
    group = f"ddl: capture\ncreate: all\non_ddl: {{{', '.join(f'{k}: {risky}' for k in stopping)}}}"
    history = steps()
    assert len(history) >= 50
    rules = [*TABLES, '"shop_*"']
    async with stream("\n".join(f"{rule}:" for rule in rules), group=group) as streamer:
        await streamer.caught_up()
        with load(source):
            for step in history:
                stops = step.stops if risky == "stop" else None
                before = columns_and_types(source, stops[0]) if stops else {}
                await asyncio.to_thread(migrate, source, step)
                if stops is not None:
                    await decide(streamer, target, stops, before)
        await streamer.caught_up()
        await equal(streamer, source, target)
        await compared_as_equal(streamer)
        waiting = target.execute("select query from streamer.ddl where state = 'waiting'")
        assert waiting == []


def columns_and_types(database: Database, table: str) -> dict[str, list[str]]:
    found = everything(database, [table])
    return {name: found[name] for name in ("columns", "types")}


async def decide(
    streamer: Streamer,
    target: Database,
    stops: tuple[str, str],
    before: dict[str, list[str]],
) -> None:
    """Wait until a table stops at a change, and run the command that its error names.

    The target then has the definition *before* that step.
    """
    table, kind = stops
    await streamer.table_state(f"public.{table}", "error")
    error = str((await streamer.table(f"public.{table}"))["error"])
    assert f"on_ddl is stop for {kind}" in error
    address = TargetAddress.parse(streamer.settings.target.url)
    (waiting,) = await ddl.read_records(address, None, None, with_done=False)
    assert waiting.changes[0].startswith(kind)
    assert await asyncio.to_thread(columns_and_types, target, table) == before
    named = re.search(r"streamer (ddl apply [^;,`]*)", error)
    assert named is not None, error
    done = await asyncio.to_thread(command, streamer.path, *shlex.split(named[1]))
    assert done.returncode == 0, done.stderr
    await streamer.table_state(f"public.{table}", "ready")


def difference(source: Database, target: Database, table: str) -> str:
    """Return some rows that only one side has."""
    here, there = (set(map(str, contents(db, table))) for db in (source, target))
    return f"{sorted(here - there)[:3]} {sorted(there - here)[:3]}" if here != there else ""


async def equal(streamer: Streamer, source: Database, target: Database) -> None:
    """Wait until the target has the rows and definitions of the source."""
    differing: list[str] = []

    def differ() -> bool:
        try:
            here, there = (everything(db, [*TABLES, MADE]) for db in (source, target))
        except (psycopg.errors.UndefinedTable, psycopg.errors.InternalError_) as exc:
            # The table has still to join, or is dropped at this moment.
            differing[:] = [str(exc)]
            return True
        differing[:] = [f"{n}: {here[n]}\n     {there[n]}" for n in here if here[n] != there[n]]
        differing.extend(
            f"rows of {table}: {unequal}"
            for table in [*TABLES, MADE]
            if (unequal := difference(source, target, table))
        )
        return bool(differing)

    async def is_so() -> bool:
        return not await asyncio.to_thread(differ)

    try:
        await streamer.eventually(is_so)
    except AssertionError as exc:
        plans = target.execute("select kind, name, state, reason from streamer.definition")
        left = [plan for plan in plans if plan[2] != "made"]
        raise AssertionError("\n".join([*differing, *map(str, left), str(exc)])) from exc


async def compared_as_equal(streamer: Streamer) -> None:
    """`streamer compare --definitions` finds no difference, neither in rows nor in definitions."""

    results = await compare_command.compare(
        streamer.settings, streamer.mapping, ComparisonScope(), Options(jobs=2, seconds=60)
    )
    assert {result.source for result in results} == {f"public.{t}" for t in [*TABLES, MADE]}
    found = [(r.source, r.definitions) for r in results if r.definitions]
    assert compare_command.summarize(results, strict=True) is None, found
