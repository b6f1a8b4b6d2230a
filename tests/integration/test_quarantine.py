"""`on_error: quarantine`: rejected changes and later changes of the same keys are put aside, and
the rest of the table continues. After a fix, a retry applies the changes, and the tables are equal.
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from streamer.commands import quarantined_rows as command
from streamer.commands import table_requests
from streamer.commands.quarantined_rows import Choice, QuarantinedRow
from streamer.postgres.secret import Secret
from streamer.target.connection import TargetAddress
from tests.support.kills import Kills
from tests.support.postgres import Database, assert_same, contents
from tests.support.runbooks import run_block
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer, Streamer
from tests.support.values import ROWS, TYPES, UPDATES
from tests.support.waiting import until

DDL = "create table t (id int primary key, v int, big text)"
CHECK = "alter table t add constraint positive check (v > 0)"
MEND = "alter table t drop constraint positive"
QUARANTINE = "on_error: quarantine"
T = "t: {initial: none}"
IN_BINARY = {"sid": "eu", "group": "transport: binary"}


def address(target: Database) -> TargetAddress:
    return TargetAddress.parse(Secret(target.url))


async def rows(target: Database, table: str = "*") -> list[QuarantinedRow]:
    """Return the changes of the tables of this test that are in quarantine."""
    return await command.read_rows(address(target), Choice(f"{target.schema}.{table}"), 10_000)


async def short(target: Database) -> list[tuple[str, Any]]:
    return [(row.operation, (row.key or {}).get("id")) for row in await rows(target)]


async def ask(streamer: Streamer, target: Database, action: str, *ids: int) -> None:
    """Make a request, and wait for the outcome."""
    await command.request_action(address(target), action, Choice(f"{target.schema}.*", ids=ids))

    async def is_done() -> bool:
        return target.value("select count(*) from streamer.request where ended_at is null") == 0

    await streamer.eventually(is_done)


async def retry_like_twins(shared: Shared, names: Iterable[str]) -> None:
    """Retry all rows; then each table has the rows of its twin, which refused no row."""
    target, names = shared.target, list(names)
    for name in names:
        assert await rows(target, name), "nothing to try again"
        target.execute(f"alter table {name} drop constraint {name}_v_check")
    await ask(shared, target, "retry")
    assert await rows(target) == []
    for name in names:
        kept, expected = (
            target.execute(f"select t.* from {table} t order by t")
            for table in (name, f"{name}_twin")
        )
        assert kept == expected, name


async def apply(streamer: Streamer, source: Database, *statements: str) -> None:
    """Wait for each statement: a window would fold rejected changes away."""
    for statement in statements:
        source.execute(statement)
        await streamer.caught_up()


def make(source: Database, target: Database, ddl: str = DDL) -> None:
    source.execute(ddl)
    target.execute(ddl)


@streams(T, source=DDL, target=f"{DDL}; {CHECK}", settings=QUARANTINE)
@pytest.mark.follows("runbooks:rows-in-quarantine#1")
@pytest.mark.follows("runbooks:rows-in-quarantine#2")
async def test_refused_rows_wait_with_all_that_follows_and_are_applied_when_mended(
    shared: Shared,
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    await apply(
        shared,
        source,
        "insert into t values (1, 1), (2, -2), (3, 3)",
        "update t set v = 20 where id = 2; insert into t values (4, 4)",
        # The key is handed on: 9 follows too, and so does the row that gets 2 now.
        "update t set id = 9 where id = 2",
        "insert into t values (2, 2)",
        "update t set v = -3 where id = 3",
        "update t set v = 30 where id = 3",
        "delete from t where id = 9; insert into t values (9, 9), (5, 5)",
    )
    there = "select id, v from t order by 1"
    assert target.execute(there) == [(1, 1), (3, 3), (4, 4), (5, 5)]
    assert await short(target) == [
        ("insert", "2"),
        ("update", "2"),
        ("update", "9"),
        ("insert", "2"),
        ("update", "3"),
        ("update", "3"),
        ("delete", "9"),
        ("insert", "9"),
    ]
    first, second, *_ = await rows(target)
    assert first.new == {"id": "2", "v": "-2", "big": None}
    assert (first.code, second.code) == ("23514", None)
    assert "positive" in first.error
    status = await shared.table("t")
    assert (status["state"], status["quarantined"], status["error"]) == ("ready", 8, None)
    assert sample(shared, "streamer_quarantined_rows") == 8

    # Refused again, the change stays, with the reason.
    await ask(shared, target, "retry")
    again = await rows(target)
    assert len(again) == 8
    assert all(row.retried_at for row in again)

    target.execute(MEND)
    source.execute("update t set v = v + 1")
    names = {"orders": shared.own("t")}
    shown = await asyncio.to_thread(run_block, shared.path, "rows-in-quarantine#1", names)
    assert "positive" in shown
    await asyncio.to_thread(run_block, shared.path, "rows-in-quarantine#2", names)
    await shared.caught_up()
    assert_same(source, target, "t")
    assert (await shared.table("t"))["quarantined"] == 0
    assert sample(shared, "streamer_quarantined_rows") == 0
    # As fast as before: quarantine holds no change any more.
    (supervisor,) = shared.engine.supervisors
    assert supervisor.pipeline is not None
    assert supervisor.pipeline.session is not None
    relations = supervisor.pipeline.session.relations
    own = {
        lane
        for lane in relations.lanes()
        for each in relations.in_lane(lane)
        if str(each.mapping.source) == shared.own("t")
    }
    assert [lane.is_held for lane in own] == [False]
    source.execute("insert into t select g, g from generate_series(100, 200) g")
    await shared.caught_up()
    assert_same(source, target, "t")


def sample(shared: Shared, name: str) -> float:
    found = [
        sample.value
        for metric in shared.engine.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == name and sample.labels["table"] == shared.own("t")
    ]
    return found[0]


@streams(
    T,
    source=DDL,
    target="create table t (id int primary key, v smallint, big varchar(3))",
    settings=QUARANTINE,
)
async def test_values_that_the_type_refuses_and_many_of_them(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    # Every second row, then a block of 3,000, then alternating causes; a transaction each.
    source.execute("insert into t select g, 70000 * (g % 2), 'x' from generate_series(1, 60) g")
    source.execute("insert into t select g, 70000, 'x' from generate_series(1001, 4000) g")
    source.execute("insert into t select g, 1, repeat('x', g % 5) from generate_series(61, 99) g")
    await shared.caught_up(180)
    await apply(shared, source, "update t set v = 1 where id between 20 and 40")
    bad = "(v > 32767 or length(big) > 3 or (id between 20 and 40 and id % 2 = 1))"
    good = source.execute(f"select id, v, big from t where not {bad} order by 1")
    assert target.execute("select id, v, big from t order by 1") == good
    assert {row.code for row in await rows(target)} == {"22001", "22003", None}

    target.execute("alter table t alter v type int, alter big type text")
    await ask(shared, target, "retry")
    await shared.caught_up()
    assert_same(source, target, "t")


@streams(T, source=DDL, target=f"{DDL}; {CHECK}", settings=QUARANTINE)
@pytest.mark.follows("runbooks:rows-in-quarantine#3")
async def test_single_changes_are_retried_in_order_and_dropped(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    await apply(
        shared,
        source,
        "insert into t values (1, -1), (2, -2), (3, -3)",
        "update t set v = 10 * id",
    )
    found = await rows(target)
    assert len(found) == 6

    # A change brings the remaining changes of its row along; different rows stay.
    target.execute(MEND)
    await ask(shared, target, "retry", found[3].id)
    assert target.execute("select id, v from t") == [(1, 10)]
    target.execute(CHECK)

    # Without the rejected change, the rest of a row can go.
    number = {"17": str(found[1].id)}
    await asyncio.to_thread(run_block, shared.path, "rows-in-quarantine#3", number)
    await ask(shared, target, "retry")
    assert target.execute("select id, v from t order by 1") == [(1, 10), (2, 20)]
    assert await short(target) == [("insert", "3"), ("update", "3")]

    # Dropped: the next update of the row is complete, and brings the row.
    await ask(shared, target, "drop")
    source.execute("update t set v = 33 where id = 3")
    await shared.caught_up()
    assert_same(source, target, "t")


AT_COMMIT = """
create function refuse() returns trigger language plpgsql as $$ begin if new.v < 0 then
  raise exception 'negative' using errcode = 'check_violation'; end if; return null; end $$;
create constraint trigger refuse after insert or update on t deferrable initially deferred
  for each row execute function refuse();
alter table t enable always trigger refuse
"""


@streams(T, source=DDL, target=f"{DDL}; {AT_COMMIT}", settings=QUARANTINE)
async def test_a_deferred_constraint_is_settled_row_by_row(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    await apply(
        shared,
        source,
        "insert into t values (1, 1), (2, -2), (3, 3)",
        "update t set v = 22 where id = 2; insert into t values (4, 4)",
    )
    # The same in a transaction that comes in pieces.
    source.execute(
        "insert into t select g, case when g = 777 then -1 else g end, repeat(g::text, 3000)"
        " from generate_series(100, 1100) g"
    )
    await shared.caught_up()
    assert await short(target) == [("insert", "2"), ("update", "2"), ("insert", "777")]
    assert target.value("select count(*) from t") == 3 + 1000

    await ask(shared, target, "retry")
    assert len(await rows(target)) == 3
    target.execute("drop trigger refuse on t")
    await ask(shared, target, "retry")
    assert_same(source, target, "t")


@streams(T, source=DDL, target=f"{DDL}; {CHECK}", settings=QUARANTINE)
async def test_a_transaction_larger_than_memory(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute(
        "begin; insert into t select g, case when g % 500 = 0 then -g else g end,"
        "   repeat(g::text, 4000) from generate_series(1, 2500) g;"
        " update t set v = v + 1 where id % 250 = 0; commit"
    )
    await shared.caught_up()
    assert target.value("select count(*) from t") == 2495
    assert len(await rows(target)) == 10
    source.execute("truncate t")
    await shared.caught_up()
    assert await rows(target) == []
    source.execute("insert into t values (500, 5)")
    await shared.caught_up()
    assert_same(source, target, "t")


@streams(T, source=DDL, target=f"{DDL}; {CHECK}", settings=QUARANTINE)
async def test_truncate_and_resync_supersede_the_rows_in_quarantine(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, -1)")
    await shared.caught_up()
    await apply(
        shared,
        source,
        "begin; update t set v = 1; truncate t; insert into t values (1, 11), (2, -2); commit",
        "update t set v = 5 where id = 2",
    )
    assert await short(target) == [("insert", "2"), ("update", "2")]
    assert target.execute("select id, v from t") == [(1, 11)]

    end = (await shared.table("t"))["end_lsn"]
    own = f"streamer.relation where source = '{shared.own('t')}'"
    target.execute(
        f"{MEND}; update streamer.relation set target_created = true"
        f" where source = '{shared.own('t')}'"
    )
    await table_requests.request(
        address(target), "resync", shared.own("t"), database=None, sid=None
    )

    async def is_copied() -> bool:
        return target.value(f"select snapshot_lsn > '{end}' from {own}") is True

    await shared.eventually(is_copied)
    await shared.caught_up()
    assert await rows(target) == []
    assert_same(source, target, "t")
    source.execute("update t set v = 6")
    await shared.caught_up()
    assert_same(source, target, "t")


KINDS = """
hist: {initial: none, type: history}
added: {initial: none, type: append}
keyless: {initial: none}
whole: {initial: none}
"""


def tables(check: str) -> str:
    """Return the statements for the tables of `KINDS`; with a *check*, for those of the target."""
    history = (
        ", kvsz_start timestamptz not null, kvsz_end timestamptz not null,"
        " kvsz_deleted bool not null"
    )
    keys = {"hist": "primary key", "added": "primary key", "keyless": "", "whole": ""}
    return "; ".join(
        f"create table {name} (id int, v int{check}{history if name == 'hist' else ''})"
        if check
        else f"create table {name} (id int {key}, v int)"
        for name, key in keys.items()
    )


@streams(
    KINDS,
    source=f"{tables('')}; alter table whole replica identity full",
    target=tables(" check (v > 0)"),
    settings=QUARANTINE,
)
async def test_history_append_keyless_and_whole_rows(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    for name in ("hist", "added", "whole"):
        await apply(
            shared,
            source,
            f"insert into {name} values (1, 1), (2, -2)",
            f"update {name} set v = 20 where id = 2",
            f"update {name} set v = 2",
            f"delete from {name} where id = 1",
        )
    source.execute("insert into keyless values (1, 1), (2, -2), (2, 2)")
    # A truncated history also ends the versions in quarantine.
    source.execute("insert into hist values (3, -3)")
    source.execute("truncate hist; insert into hist values (3, 3), (4, 4)")
    await shared.caught_up()
    assert target.execute("select id, v from added order by 1") == [(1, 2)]
    assert target.execute("select id, v from keyless order by 2") == [(1, 1), (2, 2)]
    assert target.execute("select * from whole") == []
    assert [row.operation for row in await rows(target, "whole")] == ["insert"] + 2 * ["update"]
    assert [row.operation for row in await rows(target, "added")] == ["insert"] + 2 * ["update"]
    assert len(await rows(target, "keyless")) == 1

    for name in ("hist", "added", "keyless", "whole"):
        target.execute(f"alter table {name} drop constraint {name}_v_check")
    await ask(shared, target, "retry")
    assert await rows(target) == []
    for name in ("keyless", "whole"):
        assert_same(source, target, name)
    assert target.execute("select id, v from added order by 1") == [(1, 2), (2, 2)]
    versions = target.execute(
        "select id, v, kvsz_deleted, kvsz_end = '9999-01-01' from hist order by id, kvsz_start,"
        " kvsz_end"
    )
    assert [row for row in versions if row[3]] == [(3, 3, False, True), (4, 4, False, True)]
    assert sorted(row[:2] for row in versions) == sorted(
        [(1, 1), (1, 2), (2, -2), (2, 20), (2, 2), (3, -3), (3, 3), (4, 4)]
    )
    overlapping = """
        select count(*) from hist a join hist b on a.id = b.id and a.ctid <> b.ctid
        where (a.kvsz_start, a.kvsz_end) overlaps (b.kvsz_start, b.kvsz_end)
    """
    assert target.value(overlapping) == 0


@streams(
    T,
    source=DDL,
    target="create table t"
    " (id int, v int check (v > 0), big text, sid text, primary key (sid, id));"
    " insert into t values (2, 7, null, 'us')",
    settings=QUARANTINE,
    **IN_BINARY,
)
async def test_each_source_has_its_own(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 1), (2, -2)")
    await shared.caught_up()
    assert [(row.sid, row.key) for row in await rows(target)] == [("eu", {"id": "2"})]
    source.execute("truncate t; insert into t values (2, 2)")
    await shared.caught_up()
    assert target.execute("select sid, id, v from t order by 1") == [("eu", 2, 2), ("us", 2, 7)]
    assert await rows(target) == []


@streams(T, both=DDL, settings=QUARANTINE)
async def test_no_row_is_at_fault_when_the_table_is(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    target.execute("alter table t rename to away")
    source.execute("insert into t values (1, 1)")
    await shared.table_state("t", "error")
    target.execute("alter table away rename to t; alter table t drop column big")
    await shared.table_state("t", "error")
    target.execute("alter table t add column big text")
    await shared.caught_up()
    assert_same(source, target, "t")
    assert await rows(target) == []


NAME = '"Ta""b; drop table t; --\\ $streamer$ 😀"'
ODD = TYPES + f"create table {NAME} ({NAME} text primary key, v int, id int)"


@streams(
    "'*': {initial: none}",
    source=ODD,
    target="; ".join(
        [
            ODD,
            *(
                f"alter table {name} add constraint refuse check (id is null)"
                for name in ("every", NAME)
            ),
        ]
    ),
    settings=QUARANTINE,
)
async def test_any_value_and_any_name_survives(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute(ROWS)
    source.execute(UPDATES)
    source.execute(f"insert into {NAME} values (E'a\\tb\\n\\\\.''$1', 1, 1)")
    source.execute(f"update {NAME} set v = 2, {NAME} = {NAME} || {NAME}")
    await shared.caught_up()
    assert target.value("select count(*) from every") == 0
    assert len(await rows(target)) == 5 + 3 + 2 + 1 + 2
    for table in ("every", NAME):
        target.execute(f"alter table {table} drop constraint refuse")
    await ask(shared, target, "retry")
    assert await rows(target) == []
    for table in ("every", NAME):
        assert_same(source, target, table)


@streams(T, source=DDL, target=f"{DDL}; {CHECK}", settings=QUARANTINE)
async def test_the_target_was_altered_meanwhile(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    big = "(select string_agg(md5(g::text), '') from generate_series(1, 400) g)"
    source.execute("alter table t alter big set storage external")
    source.execute(f"insert into t values (1, 1, {big}), (2, 2, 'x')")
    # An unchanged value is not in the stream, and not in quarantine.
    source.execute("update t set v = -1 where id = 1; update t set v = -2 where id = 2")
    await shared.caught_up()
    found = await rows(target)
    assert [row.new for row in found] == [
        {"id": "1", "v": "-1"},
        {"id": "2", "v": "-2", "big": "x"},
    ]
    for db in (source, target):
        db.execute("alter table t add column more int, alter v type bigint")
    target.execute(MEND)
    source.execute("update t set more = 5 where id = 2")
    await shared.caught_up()
    await ask(shared, target, "retry")
    assert_same(source, target, "t")


async def test_with_one_lane_for_all(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    make(source, target)
    make(source, target, "create table other (id int primary key, v int)")
    target.execute(CHECK)
    tables = "t: {initial: none, on_error: quarantine}\nother: {initial: none}"
    async with stream(tables, settings="consistency: transaction") as streamer:
        await streamer.caught_up()
        for n in range(1, 20):
            source.execute(
                f"begin; insert into t values ({n}, {n % 5}); insert into other values ({n}, 1); commit"
            )
        await streamer.caught_up()
        await apply(streamer, source, "update t set v = v + 1")
        assert len(await rows(target)) == 6
        assert_same(source, target, "other")
        # The rule of the second table still stops, at the same transaction for both.
        target.execute("alter table other add constraint c check (v > 0)")
        source.execute(
            "begin; insert into t values (50, -1); insert into other values (50, -1); commit"
        )
        await streamer.table_state("public.other", "error")
        assert len(await rows(target)) == 6
        target.execute("alter table other drop constraint c")
        await streamer.caught_up()
        assert len(await rows(target)) == 7
        target.execute(MEND)
        await ask(streamer, target, "retry")
        assert_same(source, target, "t")


WIDE = (
    "create table t (id int primary key, v int, " + ", ".join(f"c{n} int" for n in range(700)) + ")"
)


@streams(
    T,
    source=f"{WIDE}; alter table t replica identity full",
    target=f"{WIDE}; {CHECK}; alter table t alter c699 type smallint",
    settings=QUARANTINE,
)
async def test_rows_too_wide_to_be_staged_in_one_table(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    await apply(
        shared,
        source,
        "insert into t (id, v, c1, c699)"
        " select g, g % 7, g, 10000 * (g % 5) from generate_series(1, 60) g",
        "update t set v = 5 where id % 10 = 0",
    )
    good = "select id, v, c1, c699 from t where {} order by 1"
    there = target.execute(good.format(True))
    # In a set, COPY writes to the table itself; row by row, the rows are staged in parts.
    assert there == source.execute(good.format("id % 7 <> 0 and id % 5 <> 4"))
    target.execute(f"{MEND}; alter table t alter c699 type int")
    await ask(shared, target, "retry")
    assert_same(source, target, "t")


BINARY_COLUMNS = "id int primary key, v int, at timestamptz, n numeric, raw bytea, name"


@streams(
    T,
    source=f"create table t ({BINARY_COLUMNS} varchar(9))",
    target=f"create table t ({BINARY_COLUMNS} varchar(3), sid text); {CHECK}",
    settings=QUARANTINE,
    **IN_BINARY,
)
async def test_binary_values_are_kept_as_text(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    await apply(
        shared,
        source,
        "insert into t values (1, 1, 'infinity', 'NaN', '\\x00ff', 'abc'),"
        " (2, -2, '2020-01-01 00:00:00+00', 1.50, '\\x', null), (3, 3, null, 0, '\\x', 'long')",
        "update t set v = v + 1; update t set id = id + 10",
        "insert into t values (3, 4, null, null, null, null), (4, 4, null, null, null, null)",
    )
    assert target.execute("select id from t order by 1") == [(4,), (11,)]
    found = await rows(target)
    assert [row.code for row in found[:2]] == ["23514", "22001"]
    assert found[0].new == {
        "id": "2",
        "v": "-2",
        "at": "2020-01-01 00:00:00+00",
        "n": "1.50",
        "raw": "\\x",
        "name": None,
    }
    target.execute(f"{MEND}; alter table t alter name type varchar(9)")
    await ask(shared, target, "retry")
    columns = "id, v, at, n, raw, name"
    assert contents(source, "t", columns) == contents(target, "t", columns)


KILLS = ["apply.before_commit", "apply.after_commit"]


@pytest.mark.parametrize("failpoint", KILLS)
async def test_killed_between(
    failpoint: str, tmp_path: Path, source: Database, target: Database, stream: MakeStreamer
) -> None:
    """Exactly once, into and out of quarantine, also without a key."""
    make(source, target, "create table keyless (v int)")
    make(source, target)
    target.execute(f"{CHECK}; alter table keyless add constraint positive check (v > 0)")
    rules = "t: {initial: none}\nkeyless: {initial: none}"

    def write(n: int) -> None:
        source.execute(f"insert into keyless values ({n}), (-{n})")
        source.execute(f"insert into t values ({n}, -{n}), (-{n}, {n})")
        source.execute(f"update t set id = {n + 1000} where id = {n}")

    async with stream(rules, settings=QUARANTINE) as streamer:
        await streamer.caught_up()
    for n in range(1, 10):
        write(n)
    kills = Kills(tmp_path, source, target, rules, settings=QUARANTINE)
    kills.die(f"{failpoint}@4", lambda: write(10 + kills.acts))
    n = 10 + kills.acts
    async with stream(rules, settings=QUARANTINE) as streamer:
        await streamer.caught_up()
        assert target.value("select count(*) from streamer.quarantine") == 3 * (n - 1)
        assert target.value("select count(*) from keyless") == n - 1
        assert target.value("select count(*) from t") == n - 1
        await streamer.kill()

    # A retry that an operator requests while no process runs, and that is killed in the middle.
    target.execute(f"{MEND}; alter table keyless drop constraint positive")
    assert len(await command.request_action(address(target), "retry", Choice())) == 2
    kills.die(failpoint)
    async with stream(rules, settings=QUARANTINE) as streamer:

        async def is_empty() -> bool:
            return target.value("select count(*) from streamer.quarantine") == 0

        await streamer.eventually(is_empty)
        await streamer.caught_up()
    for table in ("t", "keyless"):
        assert_same(source, target, table)


@pytest.mark.parametrize(("identity", "key"), [("default", "primary key"), ("full", "")])
@streams(
    "t: {initial: none, exclude: [region, v, note], filter: \"region = 'EU'\","
    " set: {twice: 'v * 2'}}",
    source="create table t (id int <key>, v int, region text, note text default 'hidden');"
    " alter table t replica identity <identity>",
    target="create table t (id int <key>, twice int check (twice > 0))",
    settings=QUARANTINE,
)
async def test_rows_behind_a_filter_with_computed_columns(
    shared: Shared, identity: str, key: str
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    found = "select id, twice from t order by id"
    await apply(
        shared,
        source,
        "insert into t values (1, 1, 'EU'), (2, -2, 'EU'), (3, -3, 'US'), (4, -4, 'EU')",
    )
    assert target.execute(found) == [(1, 2)]
    assert await short(target) == [("insert", "2"), ("insert", "4")]
    await apply(
        shared,
        source,
        "update t set region = 'EU', v = 3 where id = 3",
        "update t set region = 'US' where id = 4",  # follows, and leaves
        "update t set v = 20 where id = 2",
    )
    assert target.execute(found) == [(1, 2), (3, 6)]
    needed = {"id", "v", "region"}  # the last two only because of `filter` and `set`
    for row in await rows(target):
        for values in filter(None, (row.old, row.new)):
            assert set(values) == needed
    columns = target.value("select string_agg(definition::text, '') from streamer.quarantine")
    assert "note" not in str(columns)
    target.execute("alter table t drop constraint t_twice_check")
    await ask(shared, target, "retry")
    assert target.execute(found) == [(1, 2), (2, 40), (3, 6)]
    assert await rows(target) == []


async def test_rows_in_quarantine_follow_changes_of_the_definition(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    make(source, target)
    target.execute(CHECK)
    group = "ddl: capture\non_ddl: {drop_column: apply}"
    async with stream(T, settings=QUARANTINE, group=group) as streamer:
        await streamer.caught_up()
        await apply(
            streamer,
            source,
            "insert into t values (1, 1, 'a'), (2, -2, 'b'), (3, -3, 'c')",
            "alter table t rename column v to w; alter table t drop column big",
            "alter table t add column big int default 5; update t set big = 7 where id = 2",
            "insert into t values (4, 4)",
        )
        assert await short(target) == [("insert", "2"), ("insert", "3"), ("update", "2")]
        assert target.execute("select id, w, big from t order by 1") == [(1, 1, 5), (4, 4, 5)]
        target.execute(MEND)
        await ask(streamer, target, "retry")
        await streamer.caught_up()
        assert not await rows(target)
        assert_same(source, target, "t")


async def test_a_retry_that_another_process_fulfils_meanwhile_applies_nothing_twice(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    """Two processes may work for a moment, if the first loses the lock unnoticed."""
    ddl = "create table log (line text)"
    make(source, target, ddl)
    target.execute("alter table log add constraint fits check (line <> 'late')")
    async with stream("log: {initial: none, on_error: quarantine}") as streamer:
        await streamer.caught_up()
        await apply(streamer, source, "insert into log values ('late')")
        assert len(await rows(target)) == 1
        target.execute("alter table log drop constraint fits")
        await streamer.ask("pause", "public.log")
        await command.request_action(address(target), "retry", Choice(f"{target.schema}.*"))
        with target.connect() as other:
            # GIVEN a second process that has fulfilled the request, up to the COMMIT
            other.execute("begin")
            other.execute(
                "update streamer.request set state = 'done' where action = 'quarantine_retry'"
            )
            other.execute("insert into log values ('late')")
            other.execute("delete from streamer.quarantine")
            await table_requests.request(
                address(target), "resume", "public.log", database=None, sid=None
            )

            async def waits() -> bool:
                sql = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
                return bool(target.value(sql))

            await streamer.eventually(waits)
            other.execute("commit")
        # THEN the row is there once
        source.execute("insert into log values ('next')")
        await streamer.caught_up()
        assert_same(source, target, "log")


CHANGES_TYPES = "ddl: capture\non_ddl: {change_type: apply}"


async def test_a_type_that_changes_while_rows_are_in_quarantine_reaches_the_others_afterwards(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    """A copy writes values that the source computed again, and waits until quarantine has no row."""
    ddl = "create table t (id int primary key, v text, w int)"
    make(source, target, ddl)
    target.execute("alter table t add constraint positive check (w > 0)")
    source.execute("insert into t select g, g::text, 1 from generate_series(1, 20) g")
    async with stream("t:", settings=QUARANTINE, group=CHANGES_TYPES) as streamer:
        await streamer.caught_up()
        await apply(streamer, source, "insert into t values (21, '21', -1)")
        assert await short(target) == [("insert", "21")]
        source.execute("alter table t alter v type int using v::int + 100")
        await streamer.eventually(lambda: is_refused(streamer))
        target.execute("alter table t drop constraint positive")
        await ask(streamer, target, "retry")
        await until(lambda: contents(source, "t") == contents(target, "t"), "all rows are equal")


async def is_refused(streamer: Streamer) -> bool:
    """Whether the copy has met rows in quarantine."""
    return "are in quarantine, and may be among" in str((await streamer.table("public.t"))["error"])
