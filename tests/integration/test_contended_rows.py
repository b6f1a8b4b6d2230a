"""Rows that a session at the target deletes and inserts again while streamer waits for them.

The statement that waits finds neither row: the old row is gone, and the snapshot lacks the new row.
"""

import contextlib
from collections.abc import Iterator

import pytest

from tests.support.postgres import Connection, Database, ordinary_role
from tests.support.streamer import MakeStreamer
from tests.support.waiting import until

MARKS = ", deleted_at timestamptz"
FACTS = {
    # name: rule, columns only at the target, index of the target, source's identity, change
    "updated": ("", "", "unique", "default", "update {} set v = 'new' where id = 1"),
    "partial": ("", "", "unique", "default", "update {} set v = 'new' where id = 2"),
    "key_only": ("columns: {id: id}", "", "unique", "default", "update {} set id = id"),
    "moved": ("", "", "unique", "default", "update {} set id = 9 where id = 1"),
    "moved_partial": ("", "", "unique", "default", "update {} set id = 9 where id = 2"),
    "deleted": ("", "", "unique", "default", "delete from {} where id = 1"),
    "passes": ('filter: "n > 2"', "", "unique", "default", "update {} set v = 'new' where id = 1"),
    "leaves": ('filter: "n > 2"', "", "unique", "full", "update {} set n = 1 where id = 1"),
    "out": ('filter: "n > 2"', "", "unique", "default", "delete from {} where id = 1"),
    "marked": ("on_delete: mark", MARKS, "unique", "default", "delete from {} where id = 1"),
    "mark_out": (
        'on_delete: mark, filter: "n > 2"',
        MARKS,
        "unique",
        "default",
        "delete from {} where id = 1",
    ),
    "appended": ("type: append", "", "unique", "default", "update {} set v = 'new' where id = 1"),
    "bare": ("", "", "", "default", "update {} set v = 'new' where id = 1"),
    "bare_deleted": ("", "", "", "default", "delete from {} where id = 1"),
    "whole": ("", "", "", "full", "update {} set v = 'new' where id = 1"),
    "whole_deleted": ("", "", "", "full", "delete from {} where id = 1"),
    "emptied": ("", "", "unique", "default", "truncate {}"),
}
ORDERED = ("updated", "partial", "deleted", "passes", "leaves", "out", "marked", "bare", "moved")
"""Those with a twin that has a trigger, so that streamer writes in exact order."""
TRIGGER = """
create function nothing() returns trigger language plpgsql as 'begin return new; end'
"""


def names() -> list[tuple[str, str]]:
    return [(name, name) for name in FACTS] + [(f"{name}_x", name) for name in ORDERED]


def make(source: Database, target: Database) -> str:
    """Make the tables, with three rows each; return the rules."""
    target.execute(TRIGGER)
    rules = []
    for table, name in names():
        rule, extra, index, identity, _ = FACTS[name]
        columns = "id int primary key, n int not null, v text, big text"
        source.execute(
            f"create table {table} ({columns}); alter table {table} replica identity {identity};"
            f"alter table {table} alter big set storage external"
        )
        if name == "key_only":
            columns = "id int not null"
        target.execute(
            f"create table {table} ({columns.replace('primary key', 'not null')}{extra});"
            + (f"create {index} index on {table} (id)" if index else "")
        )
        if table != name:
            target.execute(
                f"create trigger nothing before update on {table} for each row"
                f" execute function nothing(); alter table {table} enable always trigger nothing"
            )
        rules.append(f"{table}: {{initial: none{', ' + rule if rule else ''}}}")
    # streamer must write DELETE for TRUNCATE.
    target.execute("create table refers (id int references emptied (id))")
    return "\n".join(rules)


@contextlib.contextmanager
def users(target: Database) -> Iterator[dict[int, Connection]]:
    """Yield sessions by pid: each session has deleted and inserted a row of a table again."""
    with contextlib.ExitStack() as stack:
        sessions = {}
        for table, name in names():
            session = stack.enter_context(target.connect())
            key = 2 if "partial" in name else 1
            session.execute("begin")
            session.execute(
                f"create temporary table kept on commit drop as"
                f" select * from {table} where id = {key}".encode()
            )
            if name != "key_only" and "whole" not in name:
                session.execute("update kept set v = 'user'")
            session.execute(f"delete from {table} where id = {key}".encode())
            session.execute(f"insert into {table} select * from kept".encode())
            sessions[session.info.backend_pid] = session
        yield sessions


BLOCKING = """
select distinct unnest(pg_blocking_pids(pid)) from pg_stat_activity
where datname = current_database() and application_name like 'streamer%'
"""


@pytest.mark.parametrize("is_ordinary", [False, True], ids=["replica", "ordinary"])
async def test_a_row_that_goes_and_comes_while_streamer_waits_gets_its_change(
    source: Database, target: Database, stream: MakeStreamer, is_ordinary: bool
) -> None:
    with contextlib.ExitStack() as stack:
        if is_ordinary:
            role = stack.enter_context(ordinary_role(target))
        rules = make(source, target)
        if is_ordinary:
            target.execute(f"grant all on all tables in schema public to {role}")
        async with stream(rules) as streamer:
            await streamer.caught_up()
            for table, _ in names():
                source.execute(
                    f"insert into {table} values (1, 5, 'old', null),"
                    " (2, 5, 'old', repeat('b', 3000)), (3, 5, 'old', null)"
                )
            await streamer.caught_up()
            with users(target) as sessions:
                for table, name in names():
                    source.execute(FACTS[name][-1].format(table))

                def let_go() -> bool:
                    """Let users commit for whom streamer waits, until streamer has waited for all
                    users.
                    """
                    for (pid,) in target.execute(BLOCKING):
                        if session := sessions.pop(int(str(pid)), None):
                            session.execute("commit")
                    return not sessions

                await until(let_go, "streamer waits for each user")
            await streamer.caught_up()
            for table, name in names():
                columns = "id" if name == "key_only" else "id, n, v, md5(big)"
                passes = "n > 2" if "filter" in FACTS[name][0] else "true"
                marked = "deleted_at is null" if FACTS[name][1] == MARKS else "true"
                sent = source.execute(f"select {columns} from {table} where {passes} order by 1")
                written = target.execute(f"select {columns} from {table} where {marked} order by 1")
                assert written == sent, table
                assert (await streamer.table(f"public.{table}"))["state"] == "ready"


COMES_AND_GOES = """
create sequence attempts_{0};
create function meet_{0}() returns trigger language plpgsql as $$ begin
    if new.v = 'new' and nextval('public.attempts_{0}') <= {1} then
        insert into public.{0} (id, v) values (new.id, 'user');
    end if;
    return new;
end $$;
create trigger meet before insert on {0} for each row execute function meet_{0}();
alter table {0} enable always trigger meet
"""
"""This stands for a session whose row exists at each attempt of a window, but not afterwards."""
ATTEMPTS = {"t": 3, "wide": 1}
"""Attempts until a change would go into quarantine. Rows of wide tables have fewer."""


async def test_rows_that_come_and_go_put_no_change_into_quarantine(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for name, met in ATTEMPTS.items():
        more = "".join(f", c{n} int" for n in range(1590)) if name == "wide" else ""
        for side in (source, target):
            side.execute(f"create table {name} (id int primary key, v text{more})")
        target.execute(COMES_AND_GOES.format(name, met))
    rules = "\n".join(f"{t}: {{initial: none, on_error: quarantine}}" for t in ATTEMPTS)
    async with stream(rules) as streamer:
        await streamer.caught_up()
        for name, met in ATTEMPTS.items():
            source.execute(f"insert into {name} values (1, 'old')")
            await streamer.caught_up()
            target.execute(f"delete from {name}")
            source.execute(f"update {name} set v = 'new'")
            await streamer.caught_up()
            assert target.execute(f"select id, v from {name}") == [(1, "new")]
            assert target.value(f"select last_value from attempts_{name}") == met + 1
        assert not target.value("select count(*) from streamer.quarantine")


async def test_a_trigger_that_suppresses_changes_stops_no_table(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    """Sets count too few rows, and exact order finds each row."""
    source.execute("create table t (id int primary key, v text)")
    target.execute(
        "create table t (id int primary key, v text);"
        "create function spare() returns trigger language plpgsql as"
        " 'begin if old.id = 3 then return null; end if; return old; end';"
        "create trigger spare before delete on t for each row execute function spare();"
        "create trigger same before update on t for each row"
        " execute function suppress_redundant_updates_trigger()"
    )
    with ordinary_role(target) as role:
        target.execute(f"alter table t owner to {role}")
        async with stream("t: {initial: none}") as streamer:
            await streamer.caught_up()
            source.execute("insert into t select n, 'v' from generate_series(1, 6) n")
            await streamer.caught_up()
            source.execute("begin; update t set v = v; update t set v = 'w' where id = 2; commit")
            await streamer.caught_up()
            source.execute("delete from t where id > 2 and id < 5")
            await streamer.caught_up()
            assert target.execute("select * from t order by 1") == [
                (1, "v"),
                (2, "w"),
                (3, "v"),
                (5, "v"),
                (6, "v"),
            ]
            assert (await streamer.table("public.t"))["state"] == "ready"
