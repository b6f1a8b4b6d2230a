"""`ddl: capture`: names that move between columns, indexes or constraints."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from streamer.schema_changes import definition_builder
from tests.support.definitions import described
from tests.support.postgres import Database, contents
from tests.support.streamer import MakeStreamer, Streamer, write_config

pytestmark = [pytest.mark.usefixtures("without_spark"), pytest.mark.hostile_sessions]

GROUP = "ddl: capture\ncreate: all\non_ddl: {drop_column: apply, change_type: apply}"
CREATE = (
    "create table {0} (id int primary key, a int constraint {0}_x unique, b int,"
    " c int constraint {0}_y unique, e int, constraint {0}_p check (a > 0), constraint {0}_q check (b > 0));"
    "create index {0}_i on {0} (a); create index {0}_j on {0} (b, c);"
    "insert into {0} values (1, 10, 100, 1000), (2, 20, 200, 2000)"
)
MOVES = {
    "swap": "rename a to x; rename b to a; rename x to b",
    "row": "rename c to d; rename b to c; rename a to b",
    "circle": "rename a to x; rename c to a; rename b to c; rename x to b; alter a type bigint",
    "checks": "rename constraint checks_p to x; rename constraint checks_q to checks_p; rename constraint x to checks_q",
    "keys": "rename constraint keys_x to x; rename constraint keys_y to keys_x; rename constraint x to keys_y",
    "new": "drop e; rename b to e; add b int default 7; rename c to x; add c bigint; rename id to number",
}
INDEXES = "alter index {0}_i rename to {0}_k; alter index {0}_j rename to {0}_i; alter index {0}_k rename to {0}_j"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition_builder, "CHECK_SECONDS", 0.1)


def state(db: Database, table: str) -> dict[str, list[str]]:
    found = described(db, f"public.{table}")
    rows = f"select to_jsonb(t)::text from {table} t order by 1"
    return {n: found[n] for n in ("indexes", "constraints")} | {
        "rows": sorted(str(row) for row in db.execute(rows))
    }


async def alike(streamer: Streamer, source: Database, target: Database, table: str) -> None:
    await streamer.caught_up()

    async def is_so() -> bool:
        here, there = [await asyncio.to_thread(state, db, table) for db in (source, target)]
        return here == there

    try:
        await streamer.eventually(is_so)
    except AssertionError as exc:
        raise AssertionError(f"{exc}\n{state(source, table)}\n{state(target, table)}") from exc


@pytest.mark.parametrize("mode", [{}, {"mode": "diff"}], ids=["reload", "diff"])
async def test_names_that_move_in_one_difference_reach_the_target(
    source: Database, target: Database, stream: MakeStreamer, mode: dict[str, str]
) -> None:
    """A due copy makes the changes of several commands as a single difference."""
    for table in MOVES:
        source.execute(CREATE.format(table))
    rules = "\n".join(f"{table}: {{truncate_target: true}}" for table in MOVES)
    async with stream(rules, group=GROUP) as streamer:
        await streamer.caught_up()
        for table in MOVES:
            await alike(streamer, source, target, table)
        for table in MOVES:
            await streamer.ask("pause", f"public.{table}")
        for table in MOVES:
            await streamer.table_state(f"public.{table}", "paused")
        for table, moves in MOVES.items():
            alter = "; ".join(f"alter table {table} {move}" for move in moves.split("; "))
            source.execute(f"{alter}; {INDEXES.format(table)}; update {table} set b = b + 1")
            await streamer.ask("resync", f"public.{table}", **mode)
        for table in MOVES:
            await alike(streamer, source, target, table)


async def test_tenants_exchange_names_and_widen_columns_one_after_the_other(
    source: Database, second: Database, target: Database, tmp_path: Path
) -> None:
    tenants = {"a": source, "b": second}
    for db in tenants.values():
        db.execute(
            "create table t (id int primary key, x int, y int, z int);"
            "insert into t values (1, 10, 100, 1000), (2, 20, 200, 2000)"
        )
    path = tmp_path / "config.yaml"
    write_config(path, source, target, "t:", sid="a", others={"b": second}, group=GROUP)
    streamer = Streamer(path)
    streamer.start()

    async def has_rows(sid: str, db: Database, columns: str) -> bool:
        there = await asyncio.to_thread(
            target.execute, f"select {columns} from t where sid = '{sid}' order by 1"
        )
        return there == db.execute(f"select {columns} from t order by 1")

    async def change(sid: str, statements: str, columns: str) -> None:
        db = tenants[sid]
        await asyncio.to_thread(db.execute, f"begin; {statements}; commit")
        db.execute("insert into t (id) select max(id) + 1 from t")
        await streamer.caught_up()
        await streamer.eventually(partial(has_rows, sid, db, columns))

    swap = "alter table t rename x to m; alter table t rename y to x; alter table t rename m to y"
    try:
        await streamer.caught_up()
        await change("a", swap, "id, x, y, z")
        await change("b", f"{swap}; update t set x = 5 where id = 1", "id, x, y, z")
        # A tenant renames the column; its peer first makes the column wider.
        await change("a", "alter table t rename z to w", "id, x, y, w")
        await change("b", "alter table t alter z type bigint; update t set z = 5000000000", "id, z")
        await change("b", "alter table t rename z to w", "id, x, y, w")
        await change("a", "alter table t alter w type bigint", "id, x, y, w")
        names = "select string_agg(attname, ' ' order by attname) from pg_attribute where attrelid = 't'::regclass and attnum > 0 and not attisdropped"
        assert target.value(names) == "id sid w x y"
        assert contents(second, "t", "w") == contents(
            target, "(select w from t where sid = 'b') s", "w"
        )
    finally:
        await streamer.stop()


async def test_a_column_comes_again_with_a_wider_or_a_narrower_type(
    source: Database, second: Database, target: Database, tmp_path: Path
) -> None:
    """The target has the column already: kept by a history, or added by a second tenant."""
    for db in (source, second):
        db.execute(
            "create table t (id int primary key); create table h (id int primary key, n int, m bigint);"
            "insert into t values (1); insert into h values (1, 10, 10)"
        )
    path = tmp_path / "config.yaml"
    rules = "t:\nh: {type: history, target: 'h_{sid}'}"
    write_config(path, source, target, rules, sid="a", others={"b": second}, group=GROUP)
    streamer = Streamer(path)
    streamer.start()
    try:
        await streamer.caught_up()
        source.execute("alter table t add n int; update t set n = 1; alter table t add m bigint")
        await streamer.caught_up()
        second.execute("alter table t add n bigint, add m int; update t set n = 5000000000, m = 2")
        # A key becomes wider by an added column, and by a column that replaces the key.
        source.execute(
            "alter table h add big bigint; update h set big = n + 5000000000;"
            "alter table h drop n; alter table h rename big to n; insert into h values (2, 7, 8)"
        )
        second.execute(
            "begin; alter table h drop n, drop m; alter table h add n bigint, add m int; commit;"
            "update h set n = 5000000000, m = 5"
        )
        await streamer.caught_up()
        for sid, db in (("a", source), ("b", second)):
            for there in (f"t where sid = '{sid}'", f"h_{sid} where kvsz_end = '9999-01-01'"):
                here = there.partition("_")[0].partition(" ")[0]
                assert target.execute(f"select id, n, m from {there} order by 1") == db.execute(
                    f"select id, n, m from {here} order by 1"
                )
    finally:
        await streamer.stop()


async def test_an_index_that_tenants_rename_one_after_the_other_leaves_no_former_one(
    source: Database, second: Database, target: Database, tmp_path: Path
) -> None:
    for db in (source, second):
        db.execute("create table t (id int primary key, x int); create index i on t (x)")
    path = tmp_path / "config.yaml"
    write_config(path, source, target, "t:", sid="a", others={"b": second}, group=GROUP)
    streamer = Streamer(path)
    streamer.start()

    async def indexes_are(names: str) -> None:
        sql = "select string_agg(indexname, ' ' order by indexname) from pg_indexes where tablename = 't'"

        async def is_so() -> bool:
            return await asyncio.to_thread(target.value, sql) == names

        await streamer.eventually(is_so)

    try:
        await streamer.caught_up()
        await indexes_are("i t_pkey")
        source.execute("alter index i rename to j")
        await indexes_are("i j t_pkey")
        second.execute("alter index i rename to j")
        await indexes_are("j t_pkey")
        source.execute("drop index j")
        second.execute("drop index j")
        await indexes_are("t_pkey")
    finally:
        await streamer.stop()
