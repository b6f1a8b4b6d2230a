"""Partitions that leave a source's table, some of whose rows are in quarantine."""

import pytest

from streamer.commands import ddl_decisions
from streamer.target.connection import TargetAddress
from tests.integration.test_quarantine import retry_like_twins, rows
from tests.support.postgres import Database
from tests.support.remedies import Operator, remedy_of
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer

VERSIONS = """
, kvsz_start timestamptz not null, kvsz_end timestamptz not null, kvsz_deleted bool not null
"""
TABLES = {
    "clone": ("", "primary key (id, at)", "default", ""),
    "parts": ("partitioned: true", "primary key (id, at)", "default", ""),
    "keyed": ("type: history", "primary key (id, at)", "default", VERSIONS),
    "whole": ("type: history", "unique (id, at)", "full", VERSIONS),
    "marked": ("on_delete: mark", "primary key (id, at)", "default", ", deleted_at timestamptz"),
    "appended": ("type: append", "primary key (id, at)", "default", ""),
}
"""Tables: rule, key and replica identity, and columns of the target."""
SETTINGS = "on_error: quarantine"
APPLY = "ddl: capture\non_ddl: {detach_partition: apply}"
COLUMNS = "id int not null, at int not null, v int"
PARTITIONS = "; ".join(
    f"create table {{0}}_{n} partition of {{0}} {bound}"
    for n, bound in enumerate(
        ("for values from (0) to (10)", "for values from (10) to (20)", "default")
    )
)


def twins(*, is_target: bool) -> str:
    """Return statements for each table of `TABLES` and its twin, which refuses no row."""
    made = []
    for name, (rule, key, identity, extra) in TABLES.items():
        for table in (name, f"{name}_twin"):
            by_range = " partition by range (at)" if not is_target or name == "parts" else ""
            check = ", check (v > 0)" if is_target and table == name else ""
            own_key = f", {key}" if not (is_target and "type" in rule) else ""
            more = extra if is_target else ""
            made.append(f"create table {table} ({COLUMNS}{more}{own_key}{check}){by_range}")
            if by_range:
                made.append(PARTITIONS.format(table))
            if not is_target:
                each = (table, *(f"{table}_{n}" for n in range(3)))
                made += [f"alter table {one} replica identity {identity}" for one in each]
    return "; ".join(made)


@streams(
    "\n".join(
        f"{table}: {{{', '.join(filter(None, ('initial: none', rule)))}}}"
        for name, (rule, *_) in TABLES.items()
        for table in (name, f"{name}_twin")
    ),
    source=twins(is_target=False),
    target=twins(is_target=True),
    settings=SETTINGS,
    group=APPLY,
)
async def test_a_retry_writes_no_row_of_a_partition_that_has_left(shared: Shared) -> None:
    source = shared.source
    await shared.caught_up()

    async def work(statement: str) -> None:
        for name in TABLES:
            both = (statement.format(table) for table in (name, f"{name}_twin"))
            source.execute(f"begin; {'; '.join(both)}; commit")
        await shared.caught_up()

    await work("insert into {} values (1, 1, 1), (2, 11, 2), (3, 99, 3)")
    await work("update {} set v = -v")
    await work("insert into {} values (4, 2, -4), (5, 12, -5), (6, 98, -6)")
    await work("update {} set id = id + 10 where id in (4, 5, 6)")
    await work("insert into {0} values (7, 3, -7); alter table {0} detach partition {0}_0")
    # The default partition takes these rows; a key was in the partition that has left.
    await work("insert into {} values (7, 3, 7), (8, 4, -8)")
    await work("insert into {0} values (9, 13, -9); drop table {0}_1; delete from {0} where id = 3")
    await retry_like_twins(shared, TABLES)


UNCLEAR = """
create table u (id int, at {}, v int, primary key (id, at)) partition by range (at);
create table u_0 partition of u for values from (0) to (10);
create table u_1 partition of u default;
create table h (id int primary key, v int{}) partition by hash (id);
create table h_0 partition of h for values with (modulus 1, remainder 0)
"""


@pytest.mark.follows("apply.quarantine.removed_rows:_unclear")
async def test_a_partition_waits_for_changes_that_its_bound_does_not_judge(
    source: Database, target: Database, stream: MakeStreamer, without_spark: None
) -> None:
    source.execute(UNCLEAR.format("int", ""))
    target.execute(UNCLEAR.format("smallint", " check (v > 0)"))
    tables = "u: {initial: none, partitioned: true}\nh: {initial: none, partitioned: true}"
    async with stream(tables, settings=SETTINGS, group=APPLY) as streamer:
        operator = Operator(streamer.path, source, target)
        await streamer.caught_up()
        source.execute(
            "insert into u values (1, 1, 1), (2, 99999, 2); insert into h values (1, -1)"
        )
        await streamer.caught_up()
        source.execute("alter table u detach partition u_0; alter table h detach partition h_0")
        (given_up, applied) = [
            await remedy_of(streamer, f"public.{table}", words)
            for table, words in (("u", "smallint"), ("h", "hash partition"))
        ]
        target.execute("alter table h drop constraint h_v_check")
        await operator.follow(applied, choose=0)
        await operator.follow(given_up, choose=1)
        await streamer.caught_up()
        assert target.value("select count(*) from streamer.quarantine") == 0
        assert target.execute("select * from u") == target.execute("select * from h") == []
        assert target.execute("select * from h_0") == source.execute("select * from h_0")


async def test_changes_in_quarantine_go_with_statements_of_an_operator_and_stay_with_none(
    source: Database, target: Database, stream: MakeStreamer, without_spark: None
) -> None:
    for table in ("edited", "skipped"):
        source.execute(f"create table {table} ({COLUMNS}) partition by range (at)")
        source.execute(PARTITIONS.format(table))
        target.execute(f"create table {table} ({COLUMNS} check (v > 0))")
    tables = "edited: {initial: none}\nskipped: {initial: none}"
    async with stream(tables, settings=SETTINGS, group="ddl: capture") as streamer:
        await streamer.caught_up()
        address = TargetAddress.parse(streamer.settings.target.url)
        for table in ("edited", "skipped"):
            source.execute(f"insert into {table} values (1, 1, 1)")
            source.execute(f"insert into {table} values (2, 2, -2), (3, 11, -3)")
            source.execute(f"drop table {table}_0")
            await streamer.table_state(f"public.{table}", "error")
        await ddl_decisions.store_decision(
            address, "apply", "edited", "shop", None, ["create table kept as table edited"]
        )
        await streamer.decide("skip", "skipped")
        await streamer.caught_up()
        left = [(row.table, row.new) for row in await rows(target)]
        assert [(table, new["id"]) for table, new in left if new is not None] == [
            ("public.edited", "3"),
            ("public.skipped", "2"),
            ("public.skipped", "3"),
        ]
