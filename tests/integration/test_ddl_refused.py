"""`ddl: capture`: the target refuses a change, and the error says what was tried and what helps."""

import asyncio

import pytest

from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer, Streamer

pytestmark = pytest.mark.usefixtures("without_spark", "short_backoffs")

T = "t: {initial: none}"
VIEW = "create view report as select b from t"


async def error_of(streamer: Streamer) -> str:
    await streamer.table_state("public.t", "error")
    return str((await streamer.table("public.t"))["error"])


@pytest.mark.parametrize(
    ("on_ddl", "command", "dependant"),
    [
        ("apply", "alter table t alter b type text", "view public.report"),
        (
            "change_type: apply",
            "alter table t alter b type int using length(b)",
            "view public.report",
        ),
        ("drop_column: apply", "alter table t drop b", "view public.report"),
    ],
)
async def test_an_object_of_the_target_that_blocks_a_change_is_named(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    on_ddl: str,
    command: str,
    dependant: str,
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key, b varchar(5))")
    target.execute(VIEW)
    reaction = on_ddl if ":" not in on_ddl else f"{{{on_ddl}}}"
    async with stream(T, group=f"ddl: capture\non_ddl: {reaction}") as streamer:
        await streamer.caught_up()
        source.execute(command)
        source.execute("insert into t (id) values (1)")
        error = await error_of(streamer)
        assert dependant in error
        assert 'at the target this would be: alter table "public"."t"' in error
        assert "drop the objects in parentheses" in error
        assert "(none)" not in error
        assert "alter table" in str(target.value("select statements from streamer.ddl"))
        target.execute("drop view report")
        await streamer.table_state("public.t", "ready")
        await streamer.caught_up()
        assert_same(source, target, "t")


async def test_a_change_that_has_no_statement_shows_none(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key, b int)")
    rule = "t: {initial: none, set: {c: 'b + 1'}}"
    target.execute("alter table t add column c int")
    async with stream(rule, group="ddl: capture") as streamer:
        await streamer.caught_up()
        source.execute("alter table t rename column b to d")
        error = await error_of(streamer)
        assert "write the new name in the rule" in error
        assert "this would be" not in error
        assert "(none)" not in error


async def test_the_error_of_an_edit_stays_until_the_next_decision(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key, b varchar(5))")
    target.execute(VIEW)
    async with stream(T, group="ddl: capture") as streamer:
        await streamer.caught_up()
        source.execute("alter table t alter b type text")
        source.execute("insert into t values (1, 'letters')")
        await error_of(streamer)
        edited = ["drop view report; alter table t alter b type nothing"]
        await streamer.decide("apply", statements=edited)

        async def is_refused() -> bool:
            error = str((await streamer.table("public.t"))["error"])
            return 'type "nothing" does not exist' in error

        await streamer.eventually(is_refused)
        target.execute("drop view report")  # streamer's own statement would succeed now
        attempts: set[object] = set()

        async def has_tried_again() -> bool:
            found = "select changed_at from streamer.ddl"
            attempts.add(await asyncio.to_thread(target.value, found))
            return len(attempts) > 2

        await streamer.eventually(has_tried_again)
        error = await error_of(streamer)
        assert "the statements of `ddl edit` failed" in error
        assert 'alter table "public"."t" alter column "b" type text' in error
        await streamer.decide("apply")
        await streamer.table_state("public.t", "ready")
        await streamer.caught_up()
        assert_same(source, target, "t")
