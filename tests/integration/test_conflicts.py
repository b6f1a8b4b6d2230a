"""streamer.conflict: changes whose row the target lacks, or has already, each noted once."""

import re

import pytest

from streamer.apply.write import conflicts as conflicts_module
from streamer.commands.conflict_log import ConflictRecord, read_conflicts
from streamer.errors.remedies import CONTINUES
from streamer.mapping.scope import Scope
from streamer.postgres.secret import Secret
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database, assert_same
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer

DDL = """
create table keyed (id int primary key, v text);
create table two (a int, b text, v text, primary key (a, b));
create table whole (id int, v text); alter table whole replica identity full;
create table diverted (id int primary key, v text);
create table stopped (id int primary key, v text);
create table hist (id int primary key, v text);
"""
HISTORY = """
alter table hist drop constraint hist_pkey;
alter table hist add kvsz_start timestamptz, add kvsz_end timestamptz, add kvsz_deleted boolean;
create index on hist (id);
"""
TABLES = """
keyed: {initial: none}
two: {initial: none}
whole: {initial: none}
hist: {initial: none, type: history}
diverted: {initial: none, on_error: quarantine}
stopped: {initial: none}
"""
ROWS = """
insert into keyed select n, 'old' from generate_series(1, 20) n;
insert into two select n, 'b', 'old' from generate_series(1, 20) n;
insert into whole select n, 'old' from generate_series(1, 20) n;
"""
HISTORY_ROWS = "insert into hist select n, 'old' from generate_series(1, 4) n"


async def noted(target: Database, table: str) -> list[ConflictRecord]:
    address = TargetAddress.parse(Secret(target.url))
    return (await read_conflicts(address, Scope((table,)), 1000))[::-1]


def brief(conflicts: list[ConflictRecord]) -> list[tuple[object, ...]]:
    return sorted((c.kind, c.resolution, c.operation, *(c.key or {}).values()) for c in conflicts)


@pytest.mark.parametrize("transport", ["text", "binary"])
async def test_each_conflict_is_noted_once_with_the_change_behind_it(
    source: Database, target: Database, stream: MakeStreamer, transport: str
) -> None:
    source.execute(DDL + ROWS + HISTORY_ROWS)
    target.execute(DDL + ROWS + HISTORY)
    target.execute("insert into diverted values (1, 'theirs'); insert into stopped values (1, 'x')")
    for table in ("keyed", "two", "whole"):
        column = "a" if table == "two" else "id"
        missing = "3, 4, 5" if table == "keyed" else "3, 4"
        target.execute(f"delete from {table} where {column} in ({missing})")
    async with stream(TABLES, group=f"transport: {transport}") as s:
        await s.caught_up()
        xids = {}
        for name, column in (("keyed", "id"), ("two", "a"), ("whole", "id")):
            with source.connect() as user:
                user.execute("begin")
                user.execute(f"update {name} set v = 'new' where {column} in (2, 3)")
                xids[name] = user.execute("select txid_current()").fetchall()[0][0]
                user.execute("commit")
                user.execute(f"delete from {name} where {column} in (4, 6)")
        # The key moves away from a row that is missing.
        source.execute("update keyed set id = 105 where id = 5")
        source.execute("update hist set v = 'new' where id = 1; delete from hist where id = 2")
        source.execute("insert into diverted values (1, 'ours'), (2, 'ours')")
        await s.caught_up()
        for table in ("keyed", "two", "whole"):
            assert_same(source, target, table)

        expected = [
            ("delete_missing", "ignored", "delete", "4"),
            ("update_missing", "inserted", "update", "3"),
        ]
        keyed = await noted(target, "keyed")
        assert brief(keyed) == [*expected, ("update_missing", "inserted", "update", "5")]
        assert [c.xid for c in keyed if c.key == {"id": "3"}] == [xids["keyed"]]
        two = await noted(target, "two")
        assert [c.key for c in two if c.kind == "update_missing"] == [{"a": "3", "b": "b"}]
        assert [c.key for c in two if c.kind == "delete_missing"] == [{"a": "4", "b": "b"}]
        whole = await noted(target, "whole")
        assert [(c.kind, c.key) for c in whole] == [
            ("update_missing", {"id": "3", "v": "old"}),
            ("delete_missing", {"id": "4", "v": "old"}),
        ]
        assert whole[0].xid == xids["whole"]
        assert whole[0].lsn < whole[1].lsn
        assert brief(await noted(target, "hist")) == [
            ("delete_missing", "ignored", "delete", "2"),
            ("update_missing", "inserted", "update", "1"),
        ]
        (diverted,) = await noted(target, "diverted")
        assert brief([diverted]) == [("insert_exists", "quarantined", "insert", "1")]
        assert diverted.existing is not None
        assert diverted.existing["xmin"] == target.value(
            "select xmin::text from diverted where id=1"
        )

        source.execute("insert into stopped values (1, 'ours')")
        await s.table_state("public.stopped", "error")
        address = TargetAddress.parse(Secret(target.url))

        async def is_noted() -> bool:
            return bool(await read_conflicts(address, Scope(("stopped",)), 10))

        await s.eventually(is_noted)
        (stopped,) = await noted(target, "stopped")
        assert brief([stopped]) == [("insert_exists", "stopped", "insert", "1")]
        assert stopped.existing is not None
        (counted,) = s.engine.metrics.conflicts.collect()
        found = {
            (c.labels["table"], c.labels["kind"]): c.value
            for c in counted.samples
            if c.name.endswith("_total")
        }
        assert found[("public.whole", "delete_missing")] == 1
        assert found[("public.keyed", "delete_missing")] == 1
        assert found[("public.keyed", "update_missing")] == 2


async def test_the_log_of_conflicts_is_bounded_and_a_search_for_them_ends(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute("create table t (id int primary key, v int)")
    target.execute("create table t (id int primary key, v int)")
    source.execute("insert into t select n, 0 from generate_series(1, 60) n")
    monkeypatch.setattr("streamer.apply.write.transaction_conflicts.WATCHED_WINDOWS", 2)
    assert conflicts_module.WATCHED_WINDOWS > 2
    async with stream("t: {initial: none}", settings="conflicts_kept: 20") as s:
        await s.caught_up()
        source.execute("update t set v = 1")
        await s.caught_up()
        assert_same(source, target, "t")
        kept = await noted(target, "t")
        assert [int((c.key or {})["id"] or 0) for c in kept] == list(range(41, 61))
        (mapped,) = s.engine.supervisors[0].pipeline.session.relations  # type: ignore[union-attr]
        assert mapped.conflict_watch > 0
        for value in (2, 3):
            source.execute(f"update t set v = {value} where id = 1")
            await s.caught_up()
        assert mapped.conflict_watch == 0
        assert len(await noted(target, "t")) == 20


@pytest.mark.usefixtures("without_spark")
@streams(
    "t: {initial: none}",
    source="create table t (id int primary key, v text)",
    target="create table t (id int primary key, v text)",
)
async def test_a_unique_index_of_the_target_alone_goes_as_the_message_says(shared: Shared) -> None:
    """The index came after the stream had begun, and no constraint belongs to the index."""
    await shared.caught_up()
    shared.target.execute("create unique index by_v on t (v); insert into t values (9, 'theirs')")
    shared.source.execute("insert into t values (1, 'theirs')")
    await shared.table_state("t", "error")
    error = (await shared.table("t"))["error"]
    (statement,) = re.findall("run at the target: ([^;]*);", error)
    assert f"{statement}; {CONTINUES}; or " in error
    shared.target.execute(statement)
    await shared.caught_up()
    assert shared.target.execute("select id from t order by id") == [(1,), (9,)]
