"""A column of the target that an operator widens after that of the source takes whole values from
then on.
"""

import asyncio
from typing import Any

import pytest

from streamer.copy.spark.launcher import SparkLauncher
from streamer.postgres.quoting import quote_literal
from tests.support.postgres import assert_same
from tests.support.shared import Shared, streams

pytestmark = pytest.mark.usefixtures("without_spark")

WIDENED = [
    ("numeric(10,2)", "numeric(12,4)", "1.2345"),
    ("timestamp(0)", "timestamp(6)", "2024-01-01 00:00:00.123456"),
    ("interval(0)", "interval(6)", "00:00:01.123456"),
    ("float4", "float8", "1.234567890123"),
    ("date", "timestamp", "2024-01-01 12:34:56"),
    ("char(3)", "text", "a  "),
]
IN_EXACT_ORDER = """
create function note() returns trigger language plpgsql as 'begin return new; end';
create trigger note before insert or update on t for each row execute function note();
alter table t enable always trigger note
"""
T = "create table t (id int primary key, v {})"


@pytest.mark.parametrize(("before", "after", "value"), WIDENED)
@pytest.mark.parametrize("exact", ["", IN_EXACT_ORDER], ids=["as sets", "in exact order"])
@streams(
    "t: {initial: none}", source=T.format("<after>"), target=f"{T.format('<before>')}; <exact>"
)
async def test_updates_do_not_keep_the_former_type(
    shared: Shared, before: str, after: str, value: str, exact: str
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t select generate_series(1, 3)")
    await shared.caught_up()
    source.execute("update t set v = null")  # the plan is in use from now on
    await shared.caught_up()
    target.execute(f"alter table t alter v type {after}")
    source.execute(f"update t set v = {quote_literal(value)} where id < 3")
    await shared.caught_up()
    assert_same(source, target, "t")


@pytest.mark.parametrize(("before", "after", "value"), WIDENED[:2])
@streams(
    "t: {initial: none}",
    source="create table t (v <after> primary key, n int)",
    target="create table t (v <before> primary key, n int)",
)
async def test_keys_do_not_keep_the_former_type(
    shared: Shared, before: str, after: str, value: str
) -> None:
    source, target = shared.source, shared.target
    text = quote_literal(value)
    rounded = f"{text}::{before}::{after}"
    await shared.caught_up()
    source.execute(f"insert into t values ({rounded}, 1); update t set n = 2")
    await shared.caught_up()
    target.execute(f"alter table t alter v type {after}")
    source.execute(f"insert into t values ({text}, 3)")
    await shared.caught_up()
    source.execute(f"update t set n = 4 where v = {text}")
    source.execute(f"delete from t where v = {text}")
    await shared.caught_up()
    assert_same(source, target, "t")


@pytest.mark.parametrize("mode", ["reload", "diff"])
@streams(
    "t:",
    source="create table t (id int primary key, v numeric(12,4)); insert into t values (1, 1.2345)",
    target="create table t (id int primary key, v numeric(10,2))",
)
async def test_a_resync_does_not_bring_values_of_the_former_type(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    submit = SparkLauncher.submit

    async def widened_meanwhile(self: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
        copied = await submit(self, job)
        await asyncio.to_thread(target.execute, "alter table t alter v type numeric(12,4)")
        return copied

    monkeypatch.setattr(SparkLauncher, "submit", widened_meanwhile)
    await shared.ask("resync", mode=mode)
    await shared.caught_up()
    assert_same(source, target, "t")
