"""A shared table takes the rows of all tenants, despite different definitions of the table."""

import asyncio
from pathlib import Path

import pytest

from streamer.commands.demo.embedded_servers import Server
from tests.support.checking import ERROR, INFO, Checker, matching
from tests.support.postgres import Database, database, ordinary_role
from tests.support.process import command
from tests.support.remedies import Operator, remedy_of
from tests.support.streamer import Streamer, write_config

pytestmark = pytest.mark.usefixtures("without_spark")

DEFINITIONS = {
    "a": ("id int primary key, n int not null, m timestamp(0) not null", "1, 1, '2026-01-01'"),
    "b": ("id int primary key, n bigint", "1, 3000000000"),
    "c": ("id bigint primary key, note text", "3000000000, 'n'"),
    "d": ("id int primary key, n smallint, m timestamp(3)", "1, 4, '2026-01-01 00:00:00.123'"),
}
ROWS = "select sid, id, n, m::text, note from t order by sid, id"
SAME = [
    ("a", 1, 1, "2026-01-01 00:00:00", None),
    ("b", 1, 3000000000, None, None),
    ("c", 3000000000, None, None, "n"),
    ("d", 1, 4, "2026-01-01 00:00:00.123", None),
]


@pytest.mark.parametrize("order", ["abcd", "cdba"])
async def test_the_order_in_which_tenants_join_does_not_matter(
    order: str, shared_server: Server, target: Database, tmp_path: Path
) -> None:
    """The first tenant makes the table; later tenants widen the table before their copies."""
    with (
        database(shared_server, "a") as a,
        database(shared_server, "b") as b,
        database(shared_server, "c") as c,
        database(shared_server, "d") as d,
    ):
        tenants = dict(zip("abcd", (a, b, c, d), strict=True))
        for sid, (columns, row) in DEFINITIONS.items():
            tenants[sid].execute(f"create table t ({columns}); insert into t values ({row})")
        path = tmp_path / "config.yaml"
        checker = Checker(path, tenants[order[0]], target)
        first, later = order[0], order[1:]
        others = {sid: tenants[sid] for sid in later}
        checker.configure("t:", sid=first, others=others)
        assert await checker.findings() == []

        checker.configure("t:", sid=first)
        streamer = Streamer(path)
        streamer.start()
        try:
            await streamer.caught_up()
            checker.configure("t:", sid=first, others=others)
            await checker.is_gone(ERROR, "t")
            assert matching(await checker.findings(), INFO, "narrower than this tenant's", "`run`")
            await streamer.apply()
            await streamer.caught_up()
            assert target.execute(ROWS) == SAME
            # The streams of the tenants that joined before write to the widened table, too.
            for db in tenants.values():
                db.execute("update t set id = id + 1")
            await streamer.caught_up()
            assert target.execute(ROWS) == [(sid, id_ + 1, *rest) for sid, id_, *rest in SAME]
        finally:
            await streamer.stop()
        assert await checker.findings() == []


@pytest.mark.follows("schema_changes.widen_shared_table:widen_shared_table")
async def test_a_table_that_streamer_cannot_widen_goes_on_by_its_remedy(
    source: Database, second: Database, target: Database, tmp_path: Path
) -> None:
    """First a view uses the column, then the table belongs to another role."""
    source.execute("create table t (id int primary key, n int); insert into t values (1, 1)")
    second.execute("create table t (id int primary key, n bigint); insert into t values (1, 2)")
    path = tmp_path / "config.yaml"
    with ordinary_role(target) as role:
        write_config(path, source, target, "t:", sid="a")
        streamer = Streamer(path)
        operator = Operator(path, source, target)
        streamer.start()
        try:
            await streamer.caught_up()
            target.execute("create view v as select n from t")
            write_config(path, source, target, "t:", sid="a", others={"b": second})
            await streamer.apply()
            remedy = await remedy_of(streamer, "public.t", "used by a view", "b")
            target.execute("drop view v; alter table t owner to postgres")
            target.execute(f"grant all on t to {role}")
            await operator.follow(remedy)
            await operator.follow(await remedy_of(streamer, "public.t", "must be owner", "b"))
            await streamer.caught_up()
            assert target.execute("select sid, id, n from t order by 1") == [
                ("a", 1, 1),
                ("b", 1, 2),
            ]
        finally:
            await streamer.stop()


@pytest.mark.follows("apply.rows.refuse_shared_rows:refuse_shared_rows")
async def test_a_second_source_of_a_table_without_a_sid_goes_on_by_its_remedy(
    source: Database, second: Database, target: Database, tmp_path: Path
) -> None:
    for number, db in enumerate((source, second)):
        db.execute(
            f"create table t (id int primary key, n int); insert into t values (1, {number})"
        )
    target.execute("create table t (id int primary key, n int)")
    path = tmp_path / "config.yaml"
    write_config(path, source, target, "t:", sid="a")
    streamer = Streamer(path)
    streamer.start()
    try:
        await streamer.caught_up()
        write_config(path, source, target, "t:", sid="a", others={"b": second})
        await streamer.apply()
        remedy = await remedy_of(streamer, "public.t", "because it has no column sid", "b")
        await Operator(path, source, target).follow(remedy)
        for sid in "ab":
            resync = ("resync", "t", "--database", "shop", "--sid", sid)
            assert (await asyncio.to_thread(command, path, *resync)).returncode == 0
        await streamer.caught_up()
        assert target.execute("select sid, id, n from t order by 1") == [("a", 1, 0), ("b", 1, 1)]
    finally:
        await streamer.stop()


async def test_a_column_lost_after_the_copy_is_an_error_with_the_statement_that_adds_the_column(
    source: Database, target: Database, tmp_path: Path
) -> None:
    """Streamer widens a shared table before a copy only, so no check may promise that here."""
    source.execute("create table t (id int primary key, n int)")
    checker = Checker(tmp_path / "config.yaml", source, target)
    checker.configure("t:", sid="a")
    streamer = Streamer(checker.path)
    streamer.start()
    try:
        await streamer.caught_up()
    finally:
        await streamer.stop()
    target.execute("alter table t drop column n")

    finding = await checker.finds(ERROR, "t", 'no column "n"')

    assert not matching(await checker.findings(), INFO, "narrower")
    assert finding.fix is not None
    for statement in finding.fix.sql:
        target.execute(statement)
    assert await checker.findings() == []


async def test_types_of_which_no_type_holds_all_values_are_named_beforehand(
    shared_server: Server, source: Database, second: Database, target: Database, tmp_path: Path
) -> None:
    source.execute("create table t (id int primary key, n int)")
    second.execute("create table t (id int primary key, n uuid)")
    checker = Checker(tmp_path / "config.yaml", source, target)
    checker.configure("t:", sid="a", others={"b": second})
    await checker.finds(
        ERROR, 'column "n" has type uuid', "integer in the table of shop:a", "exclude"
    )
