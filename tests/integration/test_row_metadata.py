"""Columns of the target that tell where a row comes from."""

import pytest

from streamer.commands import quarantined_rows
from streamer.compare.comparison import Comparison, ComparisonScope, Options
from streamer.compare.local_launcher import LocalProcess
from streamer.control.resync_options import Resync, RowScope
from streamer.target.connection import TargetAddress
from tests.integration.test_sync_resync import resync
from tests.support.implementations import implementation  # noqa: F401
from tests.support.postgres import Database
from tests.support.shared import Shared, streams

pytestmark = pytest.mark.usefixtures("comparing_in_threads")
SECONDS = 60.0
DDL = """
create table t (id int primary key, v text, big text);
alter table t alter big set storage external;
create table logged (line text);
alter table logged replica identity full;
insert into t values (1, 'one', repeat('x', 5000)), (2, 'two', null), (3, 'three', null);
insert into logged values ('a')
"""
RULE = "{metadata: {committed_at: _at, synced_at: _synced, lsn: _lsn, operation: _op}}"
TABLES = f"t: {RULE}\nlogged: {RULE}"


def _commits(source: Database, *statements: str) -> tuple[object, ...]:
    """Run each statement in a transaction; return the commit time of the last."""
    connection = source.connect()
    with connection:
        xid = None
        for statement in statements:
            with connection.transaction():
                connection.execute(statement.encode())
                (xid,) = connection.execute("select pg_current_xact_id()::xid").fetchone() or ()
        found = connection.execute(
            "select pg_xact_commit_timestamp(%s::text::xid)", [str(xid)]
        ).fetchone()
        assert found is not None
        return found


@pytest.mark.parametrize("transport", ["text", "binary"])
@streams(TABLES, source=DDL, sid="eu", group="transport: <transport>")
async def test_rows_tell_their_last_change(shared: Shared, transport: str) -> None:
    source, target = shared.source, shared.target
    await shared.table_state("public.t", "ready", SECONDS)
    await shared.table_state("public.logged", "ready", SECONDS)
    at_copy = "_at > now() - interval '1 hour' and _synced >= _at and _lsn > '0/0'"
    assert target.execute(f"select id, _op, {at_copy} from t order by id") == [
        (1, "copy", True),
        (2, "copy", True),
        (3, "copy", True),
    ]
    last = _commits(
        source,
        "insert into t values (4, 'four', null), (5, 'five', null)",
        "update t set v = v || '!' where id in (1, 2, 4)",  # 1 lacks the large value
        "delete from t where id = 3",
        "update t set id = 50 where id = 5",
        "insert into logged values ('a'), ('b')",
        "update logged set line = 'c' where line = 'b'",
    )
    await shared.caught_up(SECONDS)
    rows = target.execute("select id, v, length(big), _op from t order by id")
    assert rows == [
        (1, "one!", 5000, "update"),
        (2, "two!", None, "update"),
        (4, "four!", None, "update"),
        (50, "five", None, "update"),
    ]
    assert target.value("select count(distinct (_at, _lsn)) from t") == 2
    assert target.execute("select line, _op from logged order by 1, 2") == [
        ("a", "copy"),
        ("a", "insert"),
        ("c", "update"),
    ]
    assert target.execute("select _at from logged where line = 'c'") == [last]
    await _comes_back(shared, target)
    await _equal(shared)


async def _equal(streamer: Shared, *tables: str) -> None:
    """Compare *tables*, or all of the test."""
    comparison = Comparison(
        streamer.settings.target.url,
        streamer.mapping,
        LocalProcess(),
        Options(1),
    )
    names = tuple(map(streamer.own, tables)) or streamer.tables
    results = await comparison.run(ComparisonScope(names))
    assert len(results) == len(names)
    assert all(result.is_equal for result in results), results


async def _comes_back(streamer: Shared, target: Database) -> None:
    """A resync by difference does not change the facts of equal rows."""
    before = target.execute("select id, _op, _at, _lsn from t where id <> 2 order by id")
    target.execute("update t set v = 'wrong' where id = 2")
    await streamer.ask("resync", "public.t", mode="diff")

    async def is_right() -> bool:
        return target.execute("select v, _op from t where id = 2") == [("two!", "copy")]

    await streamer.eventually(is_right, SECONDS)
    await streamer.table_state("public.t", "ready", SECONDS)
    assert target.execute("select id, _op, _at, _lsn from t where id <> 2 order by id") == before


UNFIT = "create table t (id int primary key, _op text)"


@streams("t: {metadata: {lsn: _lsn}}", both=UNFIT)
async def test_a_table_that_does_not_fit_has_a_remedy(shared: Shared) -> None:
    await shared.table_state("t", "error", SECONDS)
    error = (await shared.table("t"))["error"]
    assert f"alter table {shared.own('t')} add column _lsn pg_lsn" in error.replace('"', "")


FACTS = "committed_at: _at, operation: _op"
WAYS = f"""
kept: {{filter: "region = 'EU'", set: {{v: "upper(v)"}}, metadata: {{{FACTS}}}}}
appended: {{type: append, metadata: {{{FACTS}}}}}
checked: {{on_error: quarantine, exclude: [hidden], metadata: {{{FACTS}}}}}
"""


@streams(
    WAYS,
    source="""
        create table kept (id int primary key, region text, v text, secret text);
        create table appended (id int primary key, v text);
        create table checked (id int primary key, v int, big text, hidden text);
        alter table checked alter big set storage external
    """,
)
async def test_all_ways_to_write_a_row_bring_its_facts(shared: Shared) -> None:
    """Filter and set, append, a large value, a rejected row, later rows, and the retry."""
    source, target = shared.source, shared.target
    for name in ("kept", "appended", "checked"):
        await shared.table_state(f"public.{name}", "ready", SECONDS)
    target.execute("alter table checked add check (v < 100)")
    large = 3 * 1024 * 1024  # more than a message that is copied
    last = _commits(
        source,
        "insert into kept values (1, 'EU', 'a'), (2, 'US', 'b')",
        "insert into appended values (1, 'a'), (2, 'b')",
        f"insert into checked values (1, 1, repeat('x', {large}), 'hidden-value'),"
        " (2, 100, null, 'hidden-value'), (3, 3, null, 'hidden-value')",
        "update kept set v = 'c'; update kept set region = 'EU' where id = 2",
        "update appended set v = 'c' where id = 1; delete from appended where id = 2",
        "update checked set v = v + 1",
    )
    await shared.caught_up(SECONDS)
    assert target.execute("select id, v, _op from kept order by id") == [
        (1, "C", "update"),
        (2, "C", "update"),
    ]
    assert target.execute("select id, v, _op from appended order by id") == [
        (1, "c", "update"),
        (2, "b", "insert"),
    ]
    found = "select id, v, length(big), _op, _at from checked order by id"
    assert target.execute(found) == [
        (1, 2, large, "update", *last),
        (3, 4, None, "update", *last),
    ]
    held = (
        "select count(*), bool_or(q::text ~ 'hidden') from streamer.quarantine q"
        f" join streamer.relation r on r.id = relation_id where source = '{shared.own('checked')}'"
    )
    assert target.execute(held) == [(2, False)]
    target.execute("alter table checked drop constraint checked_v_check")
    address = TargetAddress.parse(shared.settings.target.url)
    await quarantined_rows.request_action(
        address, "retry", quarantined_rows.Choice(shared.own("checked"))
    )

    async def is_retried() -> bool:
        return target.execute("select v, _op, _at from checked where id = 2") == [
            (101, "update", *last)
        ]

    await shared.eventually(is_retried, SECONDS)


FILTERED = (
    "{filter: \"region = 'EU'\", set: {v: 'upper(v)'}, on_delete: mark,"
    " metadata: {committed_at: _at, operation: _op, deleted_at: _gone}}"
)


MARKED = "{on_delete: mark, metadata: {operation: _op, deleted_at: _gone}}"


T_AND_KEPT = """
    create table t (id int primary key, v text not null, big text);
    alter table t alter big set storage external;
    insert into t select g, 'v' || g, repeat('x', 3000) from generate_series(1, 9) g;
    create table kept (id int primary key, region text, v text, big text);
    alter table kept alter big set storage external;
    insert into kept select g, case when g % 10 < 8 then 'EU' else 'US' end, 'v' || g,
        repeat('x', 3000) from generate_series(1, 29) g;
"""


@pytest.mark.parametrize("transport", ["text", "binary"])
@streams(
    f"t: {MARKED}\nwhole: {{on_delete: mark}}\nkept: {FILTERED}\nordered: {FILTERED}",
    source=f"""{T_AND_KEPT}
        create table whole (id int primary key, v text);
        alter table whole replica identity full;
        insert into whole values (1, 'a'), (2, 'b');
        create table ordered (like kept including all);
        insert into ordered select * from kept
        """,
    target="""
        create table ordered (sid text, id int, region text, v text, big text, _at timestamptz,
            _op text, _gone timestamptz, primary key (sid, id));
        create function pass() returns trigger language plpgsql as 'begin return new; end';
        create trigger pass before insert on ordered for each row execute function pass();
        alter table ordered enable always trigger pass
        """,
    sid="eu",
    group="transport: <transport>",
)
async def test_deleted_rows_stay_with_a_mark(shared: Shared, transport: str) -> None:
    source, target = shared.source, shared.target

    def rows() -> list[tuple[object, ...]]:
        return target.execute("select id, v, length(big), _op, _gone from t order by id")

    await shared.table_state("public.t", "ready", SECONDS)
    for name in ("whole", "kept", "ordered"):
        await shared.table_state(f"public.{name}", "ready", SECONDS)
    first = _commits(
        source,
        "delete from whole where id = 1",
        "insert into t values (10, 'v10', null)",
        "update t set id = 90 where id = 9",
        "delete from t where id in (1, 2, 10)",
    )
    await shared.caught_up(SECONDS)
    assert rows()[:2] == [(1, "v1", 3000, "delete", *first), (2, "v2", 3000, "delete", *first)]
    assert rows()[2:] == [
        *((n, f"v{n}", 3000, "copy", None) for n in range(3, 9)),
        (10, "v10", None, "delete", *first),
        (90, "v9", 3000, "update", None),
    ]
    assert target.execute("select id, deleted_at is null from whole order by id") == [
        (1, False),
        (2, True),
    ]
    await _equal(shared)

    # In a window, across windows, by a key that changes: an insert brings the row back.
    source.execute("insert into t values (1, 'again', null)")
    source.execute("delete from t where id = 3; insert into t values (3, 'again', null)")
    source.execute("update t set id = 2 where id = 4")
    await shared.caught_up(SECONDS)
    assert rows()[:3] == [
        (1, "again", None, "insert", None),
        (2, "v4", 3000, "update", None),
        (3, "again", None, "insert", None),
    ]
    await _equal(shared, "t")

    emptied = _commits(source, "truncate t")
    await shared.caught_up(SECONDS)
    assert target.value("select count(*) from t where _gone is null") == 0
    assert {row[3:] for row in rows() if row[0] != 10} == {("truncate", *emptied)}
    await _equal(shared, "t")
    await _mark_what_leaves_a_filter(shared, source, target)


async def _mark_what_leaves_a_filter(streamer: Shared, source: Database, target: Database) -> None:
    """Sets and exact order do the same: a trigger has table "ordered" written in exact order."""

    async def found(*statements: str) -> object:
        """Change both tables; return the commit time of the last statement."""
        both = [
            "; ".join(s.replace("TABLE", name) for name in ("kept", "ordered")) for s in statements
        ]
        (last,) = _commits(source, *both)
        await streamer.caught_up(SECONDS)
        listed = "select id, region, v, md5(big), _at, _op, _gone from {} order by id"
        assert target.execute(listed.format("kept")) == target.execute(listed.format("ordered"))
        return last

    def row(key: int) -> tuple[object, ...]:
        (values,) = target.execute(
            f"select region, v, length(big), _op, _at, _gone from kept where id = {key}"
        )
        return values

    left = await found(
        "update TABLE set v = 'first', region = 'US' where id = 1;"
        "update TABLE set v = v || '!' where id = 2; delete from TABLE where id in (3, 8)"
    )
    assert row(1) == ("EU", "V1", 3000, "delete", left, left)
    assert row(2)[:4] == ("EU", "V2!", 3000, "update")
    assert row(3) == ("EU", "V3", 3000, "delete", left, left)
    assert target.value("select count(*) from kept where id = 8") == 0

    # A marked row stays unchanged, until its key enters the filter again.
    later = await found(
        "update TABLE set v = 'second' where id = 1", "update TABLE set region = 'US' where id = 2"
    )
    assert row(1) == ("EU", "V1", 3000, "delete", left, left)
    assert row(2) == ("EU", "V2!", 3000, "delete", later, later)
    await found("delete from TABLE where id = 2", "insert into TABLE values (3, 'US', 'out', null)")
    assert row(2)[-1] == later
    assert row(3)[-1] == left
    entered = await found(
        "update TABLE set region = 'EU', big = 'new' where id = 1;"
        "insert into TABLE values (2, 'EU', 'again', null);"
        "update TABLE set region = 'EU', big = 'new' where id in (3, 9)"
    )
    assert row(1) == ("EU", "SECOND", 3, "update", entered, None)
    assert row(2) == ("EU", "AGAIN", None, "insert", entered, None)
    assert row(3) == ("EU", "OUT", 3, "update", entered, None)

    # Several changes of a row in a window: the row keeps its last state inside the filter.
    left = await found(
        "update TABLE set v = 'last' where id = 4; update TABLE set region = 'US' where id = 4;"
        "update TABLE set v = 'outside' where id = 4;"
        "insert into TABLE values (30, 'EU', 'short', null); delete from TABLE where id = 30"
    )
    assert row(4) == ("EU", "LAST", 3000, "delete", left, left)
    assert row(30) == ("EU", "SHORT", None, "delete", left, left)
    left = await found(
        "delete from TABLE where id = 5; insert into TABLE values (5, 'EU', 'new', null);"
        "delete from TABLE where id = 6; insert into TABLE values (6, 'US', 'new', null)"
    )
    assert row(5) == ("EU", "NEW", None, "insert", left, None)
    assert row(6) == ("EU", "V6", 3000, "delete", left, left)

    # A key that changes, inside the filter, on the way out, and to the key of a marked row.
    left = await found(
        "update TABLE set id = 31 where id = 11; update TABLE set id = 6 where id = 6;"
        "update TABLE set id = 32, region = 'US' where id = 12;"
        "delete from TABLE where id = 6; update TABLE set id = 6 where id = 13"
    )
    assert row(31)[:4] == ("EU", "V11", 3000, "update")
    assert row(12) == ("EU", "V12", 3000, "delete", left, left)
    assert row(6)[1:] == ("V13", 3000, "update", left, None)
    assert target.value("select count(*) from kept where id in (11, 13, 32)") == 0

    await _equal(streamer)

    await found("truncate TABLE; insert into TABLE values (1, 'EU', 'a', repeat('x', 3000))")
    assert target.value("select count(*) from kept where _gone is null") == 1
    assert target.value("select count(*) > 5 from kept where _op = 'truncate'")

    # The values of a marked row may be old, so a marked row completes no row that enters.
    await found("update TABLE set region = 'US', big = repeat('y', 3000)")
    source.execute("update kept set region = 'EU'; update ordered set region = 'EU'")
    for name in ("kept", "ordered"):
        await streamer.table_state(f"public.{name}", "error", SECONDS)
        error = (await streamer.table(f"public.{name}"))["error"]
        assert "unchanged value" in error
        assert target.value(f"select count(*) from {name} where _gone is null") == 0


@streams(f"t: {MARKED}\nkept: {FILTERED}", source=T_AND_KEPT, sid="eu", group="transport: text")
async def test_resyncs_keep_marks_and_mark_lost_rows_and_bring_rows_back(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up(SECONDS)
    (left,) = _commits(
        source,
        "insert into t values (10, 'v10', null)",
        "delete from t where id = 10",
        "insert into kept values (30, 'EU', 'short', null); update kept set id = 31 where id = 11;"
        " update kept set region = 'US' where id = 6",
        "update kept set id = 32, region = 'US' where id = 12; delete from kept where id in (4, 6, 30);"
        " update kept set id = 6 where id = 13",
    )
    await shared.caught_up(SECONDS)
    target.execute("insert into t values ('eu', 50, 'stray', null, 'x', null)")
    target.execute("update t set _gone = now() where id = 5")
    for mode in ("diff", "reload"):
        await resync(shared, mode=mode)
        assert target.execute("select id, _op from t where _gone is not null order by id") == [
            (10, "delete"),
            (50, "delete"),
        ]

    # With a filter: rows outside are marked, and a resync of some rows leaves the rest unchanged.
    target.execute(
        "insert into kept (sid, id, v) values ('eu', 4000, 'X'); update kept set v = 'Y' where id = 6;"
        "update kept set _gone = now() where id = 31"
    )
    some = Resync(scope=RowScope(("id > 30",))).to_json()
    for wanted, sixth in ((some, "Y"), ({"mode": "diff"}, "V13")):
        await resync(shared, "public.kept", **wanted)
        assert target.execute("select id, _op from kept where _gone is not null order by id") == [
            (key, "delete") for key in (4, 12, 30, 4000)
        ]
        found = target.execute("select v, _gone from kept where id in (6, 12) order by id")
        assert found == [(sixth, None), ("V12", left)]
    await _equal(shared)
