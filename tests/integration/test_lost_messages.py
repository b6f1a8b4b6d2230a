"""A message about a definition is lost, and no other follows: rows still arrive."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from streamer.runtime.session import source_checks
from streamer.source.capture import ddl_capture
from tests.support.postgres import Database, assert_same
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer

pytestmark = pytest.mark.usefixtures("without_spark", "short_backoffs")

GROUP = "ddl: capture\ncreate: all\non_ddl: {drop_column: apply}"
T = "t: {initial: none}"
DDL = """
create type mood as enum ('sad', 'happy');
create domain few as int constraint below check (value < 10);
create type place as (street text, number int);
create table t (id int primary key, name varchar(3) not null, m mood, list mood[], n few,
                p place, ps place[], constraint positive check (id > 0));
create unique index t_name on t (name);
insert into t values (1, 'a', 'sad', '{sad}', 1, row('x', 1), array[row('y', 2)::place])
"""


@contextlib.contextmanager
def unheard(source: Database) -> Iterator[None]:
    """Commands inside leave no message."""
    names = "select evtname from pg_event_trigger where evtname ~"
    triggers = [
        name
        for (name,) in source.execute(
            f"{names} '^streamer_.*_(changed|indexed|related|cut|rewritten)$' order by 1"
        )
    ]
    assert len(triggers) == 5
    source.execute(";".join(f"alter event trigger {name} disable" for name in triggers))
    yield
    source.execute(";".join(f"alter event trigger {name} enable always" for name in triggers))


LOST = {
    "label": (
        "alter type mood add value 'calm' before 'happy'",
        "insert into t values (2, 'b', 'calm', '{sad,calm}')",
    ),
    "label in an array, with quotes": (
        """alter type mood add value 'so "so" \\ ü'""",
        """insert into t values (2, 'b', 'sad', array['so "so" \\ ü'::mood])""",
    ),
    "renamed label": (
        "alter type mood rename value 'happy' to 'glad'",
        "insert into t values (2, 'b', 'glad')",
    ),
    "column": (
        "alter table t add column c text",
        "insert into t (id, name, c) values (2, 'b', 'c')",
    ),
    "column with values of its own": (
        "alter table t add column c uuid not null default gen_random_uuid()",
        "insert into t (id, name) values (2, 'b')",
    ),
    "column of a new type": (
        "create type size as enum ('s', 'm'); alter table t add column c size default 's'",
        "insert into t (id, name, c) values (2, 'b', 'm')",
    ),
    "renamed column": (
        "alter table t rename column m to feeling",
        "insert into t (id, name, feeling) values (2, 'b', 'sad')",
    ),
    "columns that swap their names": (
        (
            "alter table t add column c varchar(3) default 'z'; alter table t rename name to x;"
            "alter table t rename c to name; alter table t rename x to c"
        ),
        "insert into t (id, name, c) values (2, 'b', 'c')",
    ),
    "dropped column": (
        "alter table t drop column name",
        "insert into t (id, m) values (2, 'sad')",
    ),
    "wider type": (
        "alter table t alter name type text",
        "insert into t (id, name) values (2, 'many letters')",
    ),
    "NOT NULL": (
        "alter table t alter name drop not null",
        "insert into t (id) values (2)",
    ),
    "check": ("alter table t drop constraint positive", "insert into t values (-2, 'b')"),
    "unique index": ("drop index t_name", "insert into t values (2, 'a')"),
    "column, and a command of the row's own transaction": (
        "alter table t add column c text",
        "alter table t rename m to feeling; insert into t (id, name, c) values (2, 'b', 'c')",
    ),
    "label, and a command of the row's own transaction": (
        "alter type mood add value 'calm'",
        "alter table t rename n to few; insert into t (id, name, m) values (2, 'b', 'calm')",
    ),
    "attribute": (
        "alter type place add attribute zip int",
        """insert into t (id, name, p) values (2, 'b', row('x, "\\y") ', 1, 2))""",
    ),
    "attributes in an array": (
        "alter type place add attribute zip int, add attribute more text",
        """insert into t (id, name, ps) values (2, 'b', array[row('("a,', 1, 2, null)::place])""",
    ),
    "domain": (
        "alter domain few drop constraint below",
        "insert into t (id, name, n) values (2, 'b', 12)",
    ),
}


OWN = "label, and a command of the row's own transaction"


@pytest.mark.parametrize(
    ("name", "on_error"),
    [
        *((name, "stop") for name in LOST),
        ("label", "quarantine"),
        ("check", "quarantine"),
        (OWN, "quarantine"),
    ],
)
@streams("t: {initial: none, on_error: <on_error>}", both=DDL, group=GROUP)
async def test_a_row_that_the_stored_definition_does_not_explain_arrives(
    shared: Shared, name: str, on_error: str
) -> None:
    source, target = shared.source, shared.target
    command, row = LOST[name]
    await shared.caught_up()
    with unheard(source):
        source.execute(command)
    source.execute("update t set id = id where id = 1")
    source.execute(row)

    async def is_equal() -> bool:
        rows = "select to_jsonb(t) from t order by id"
        return await asyncio.to_thread(target.execute, rows) == source.execute(rows)

    await shared.eventually(is_equal, seconds=30)
    await shared.table_state("t", "ready")
    assert target.value("select count(*) from streamer.quarantine") == 0


@streams(T, both=DDL, group=GROUP)
async def test_the_lock_of_another_session_costs_no_row(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    with source.connect() as session:
        session.execute("begin; lock table t in access exclusive mode")
        source.execute("alter type mood add value 'calm'")
        session.execute("commit")
    source.execute("insert into t values (2, 'b', 'calm')")
    await shared.caught_up()
    assert_same(source, target, "t")


async def test_the_definition_of_a_locked_table_is_requested_again(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row needs the lost change, so only the request brings the change to the target."""
    monkeypatch.setattr(source_checks, "CHECK_SECONDS", 0.1)
    for db in (source, target):
        db.execute(DDL)
    constraint = "select count(*) from pg_constraint where conname = 'positive'"
    attempts: list[bool] = []
    request = ddl_capture.send_baseline

    async def record(*args: Any) -> Any:
        unsent = await request(*args)
        attempts.append(unsent is None or bool(unsent))
        return unsent

    async with stream(T, group=GROUP) as streamer:
        await streamer.caught_up()
        monkeypatch.setattr(source_checks, "send_baseline", record)
        with unheard(source):
            source.execute("alter table t drop constraint positive")
        with source.connect() as session:
            session.execute("begin; lock table t in access exclusive mode")
            (mapped,) = streamer.engine.supervisors[0].pipeline.session.relations  # type: ignore[union-attr]
            mapped.is_doubtful = True
            await streamer.eventually(has_ended(attempts))
            session.execute("rollback")
        await streamer.eventually(is_gone(target, constraint))


def has_ended(attempts: list[bool]) -> Callable[[], Awaitable[bool]]:
    async def ask() -> bool:
        return any(attempts)

    return ask


def is_gone(db: Database, count: str) -> Callable[[], Awaitable[bool]]:
    async def ask() -> bool:
        return await asyncio.to_thread(db.value, count) == 0

    return ask


async def test_a_kind_that_stops_waits_for_its_decision(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute(DDL)
    group = "ddl: capture\non_ddl: {add_column: stop}"
    async with stream(T, group=group) as streamer:
        await streamer.caught_up()
        with unheard(source):
            source.execute("alter table t add column c text")
        source.execute("insert into t (id, name, c) values (2, 'b', 'c')")
        await streamer.table_state("public.t", "error")
        error = str((await streamer.table("public.t"))["error"])
        assert 'on_ddl is stop for add_column "c"' in error
        assert "the source sent no message" in error
        await streamer.decide("apply")
        await streamer.table_state("public.t", "ready")
        await streamer.caught_up()
        assert_same(source, target, "t")


@streams(
    "t: {partitioned: true}",
    source="create table t (id int primary key) partition by range (id);"
    "create table t_1 partition of t for values from (0) to (10)",
    group=GROUP,
)
async def test_a_row_of_a_partition_that_the_target_lacks_arrives(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    with unheard(source):
        source.execute("create table t_2 partition of t for values from (10) to (20)")
    source.execute("insert into t values (1), (11)")
    await shared.caught_up()
    assert_same(source, target, "t")


@streams(
    T,
    both=DDL,
    target="alter table t add constraint own check (name <> 'b')",
    group=GROUP,
)
async def test_a_row_that_the_target_alone_refuses_changes_nothing(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    stored = f"select definition::text from streamer.relation where source = '{shared.own('t')}'"
    definition = target.value(stored)
    source.execute("insert into t (id, name) values (2, 'b')")
    await shared.table_state("t", "error")
    assert target.value(stored) == definition
    assert shared.captured() == []
    error = str((await shared.table("t"))["error"])
    assert "own" in error
