"""`ddl: capture`: the target refuses a change, and the error says what was tried and what helps."""

import asyncio

import pytest

from tests.support.postgres import assert_same
from tests.support.shared import Shared, streams

pytestmark = pytest.mark.usefixtures("without_spark", "short_backoffs")

GROUP = "ddl: capture\non_ddl: {change_type: apply, drop_column: apply}"
T = "t: {initial: none}"
DDL = "create table t (id int primary key, b varchar(5))"
VIEW = "create view report as select b from t"


async def error_of(shared: Shared) -> str:
    await shared.table_state("t", "error")
    return str((await shared.table("t"))["error"])


@pytest.mark.parametrize(
    "command",
    [
        "alter table t alter b type text",
        "alter table t alter b type int using length(b)",
        "alter table t drop b",
    ],
)
@streams(T, both=DDL, target=VIEW, group=GROUP)
async def test_an_object_of_the_target_that_blocks_a_change_is_named(
    shared: Shared, command: str
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute(command)
    source.execute("insert into t (id) values (1)")
    error = await error_of(shared)
    assert f"view {source.schema}.report" in error
    assert f'streamer would run at the target: alter table "{source.schema}"."t"' in error
    assert "drop the objects in parentheses" in error
    assert "(none)" not in error
    assert "alter table" in str(shared.captured("statements"))
    target.execute("drop view report")
    await shared.table_state("t", "ready")
    await shared.caught_up()
    assert_same(source, target, "t")


@streams(
    "t: {initial: none, set: {c: 'b + 1'}}",
    both="create table t (id int primary key, b int)",
    target="alter table t add column c int",
    group=GROUP,
)
async def test_a_change_that_has_no_statement_shows_none(shared: Shared) -> None:
    await shared.caught_up()
    shared.source.execute("alter table t rename column b to d")
    error = await error_of(shared)
    assert "write the new name in the rule" in error
    assert "this would be" not in error
    assert "(none)" not in error


@streams(T, both=DDL, target=VIEW, group=GROUP)
async def test_the_error_of_an_edit_stays_until_the_next_decision(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("alter table t alter b type text")
    source.execute("insert into t values (1, 'letters')")
    await error_of(shared)
    edited = "drop view {0}.report; alter table {0}.t alter b type nothing"
    await shared.decide("apply", "t", [edited.format(target.schema)])

    async def is_refused() -> bool:
        error = str((await shared.table("t"))["error"])
        return 'type "nothing" does not exist' in error

    await shared.eventually(is_refused)
    target.execute("drop view report")  # streamer's own statement would succeed now
    attempts: set[str] = set()

    async def has_tried_again() -> bool:
        attempts.add(str(await asyncio.to_thread(shared.captured, "changed_at")))
        return len(attempts) > 2

    await shared.eventually(has_tried_again)
    error = await error_of(shared)
    assert "the statements of `ddl edit` failed" in error
    assert f'alter table "{source.schema}"."t" alter column "b" type text' in error
    await shared.decide("apply")
    await shared.table_state("t", "ready")
    await shared.caught_up()
    assert_same(source, target, "t")
