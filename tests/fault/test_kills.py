"""Killed at each step of the work, the program continues without loss.

A story has the steps at which process after process dies, the work meanwhile, and the rows of both
sides in the end. Separate files have the steps of copies, journals, comparisons and commands.
"""

from pathlib import Path

import pytest

from streamer.bookkeeping.requests import CHANNEL
from streamer.util.failpoints import NAMES
from tests.support.definitions import described
from tests.support.kills import Act, Kills, Rows, Story, differing
from tests.support.mixed import DDL, HISTORY, TABLES, assert_equal, write
from tests.support.postgres import Database

ELSEWHERE = ("sync.", "indexes.", "journal.", "compare.", "execute.", "cutover.", "purge.", "slot.")
"""Steps that test_sync_kills, test_backlog_kills and similar files have."""
T = "create table t (id int primary key, v text);"
FIFTY = "insert into t select g, 'v' from generate_series(1, 50) g;"
CAPTURED = "ddl: capture"


# ---- every step from dispatch to acknowledgement ----------------------------------------------


def write_transactions(kills: Kills) -> None:
    """Write to tables of every kind, and reach the step of the next death."""
    write(kills.source, kills.acts * 5, kills.acts * 5 + 5)
    if kills.failpoint == "drain.piece_written@2" and kills.acts % 8 == 0:
        kills.source.execute(
            "insert into keyless select g % 3, repeat('x', 300) from generate_series(1, 40000) g"
        )
    if kills.failpoint == "requests.taken@2":
        kills.target.execute(
            "insert into streamer.request (relation_id, action) select id, 'resume'"
            f" from streamer.relation; notify {CHANNEL}"
        )


def write_without_process(kills: Kills) -> None:
    """Write while no process runs."""
    for _ in range(8):
        write_transactions(kills)
        kills.acts += 1


def streaming(*failpoints: str, workers: int, program: str = "streamer") -> Story:
    return Story(
        failpoints=failpoints,
        both=DDL,
        source="create table hist (id int primary key, v text)",
        target=HISTORY,
        rules=TABLES,
        options={"settings": f"workers: {workers}"},
        program=program,
        first=write_without_process,
        act=write_transactions,
        between=write_without_process,
        expected={"select kind, key from streamer.conflict": []},
        after=lambda kills: assert_equal(kills.source, kills.target),
    )


# ---- requests ---------------------------------------------------------------------------------


def ask_for_difference(kills: Kills) -> None:
    kills.target.execute("update t set v = 'wrong'")
    kills.command("resync", "t", "--mode", "diff", "--no-wait")
    assert request_states(kills) == [("queued",)]


def is_still_taken(kills: Kills) -> None:
    assert request_states(kills) == [("taken",)]


def request_states(kills: Kills) -> object:
    return kills.target.execute("select state from streamer.request")


def copied_once(kills: Kills) -> None:
    assert "".join(kills.outputs[1:]).count("table copied") == 1


def change_set(kills: Kills) -> None:
    """Change a rule. The column *mine* of the target differs where no copy of whole rows has been."""
    kills.target.execute("alter table t add column mine int; update t set mine = id")
    kills.configure("t: {set: {v: 'v || id'}}")


# ---- conflicts, column lists, definitions -----------------------------------------------------

NOTED = """
select r.source, c.kind, c.key ->> 'id', count(*) from streamer.conflict c
join streamer.relation r on r.id = c.relation_id group by 1, 2, 3 order by 1, 2, 3
"""
LACKING = """
create table keyed (id int primary key, v int);
create table whole (id int, v int); alter table whole replica identity full;
insert into keyed select n, 0 from generate_series(1, 9) n;
insert into whole select n, 0 from generate_series(1, 9) n
"""
CHANGE_MISSING = """
update keyed set v = {deaths} where {deaths} < 2 and id in (1, 3 + {deaths});
update whole set v = {deaths} where {deaths} < 2 and id in (1, 3 + {deaths});
delete from keyed where {deaths} = 2 and id in (2, 5);
delete from whole where {deaths} = 2 and id in (2, 5)
"""
MISSING = (("delete_missing", "5"), ("update_missing", "3"), ("update_missing", "4"))
LISTS = """
shrinks: {{column_list: true, exclude: [{}]}}
grows: {{column_list: true, exclude: [secret]}}
"""
LISTED = """
create table {0} (id int primary key, v text, w text, secret text);
insert into {0} values (1, 'a', 'b', 'c');
"""


def change_lists(kills: Kills) -> None:
    """Let a column list shrink and a second list grow. The target has the new column already, so
    only the list shows that changes lack the column.
    """
    kills.configure(LISTS.format("secret, w"))
    for db in (kills.target, kills.source):
        db.execute("alter table grows add x text")
    kills.source.execute("insert into grows values (2, 'a', 'b', 'c', 'x')")


DEFINED = """
create table people (id int primary key, email text unique);
create table orders (id int primary key, person int references people, check (id > 0));
create index orders_person on orders (person) where person > 0;
insert into people select g, 'p' || g from generate_series(1, 50) g;
insert into orders select g, g from generate_series(1, 50) g;
"""
UNMADE = "select from streamer.definition where state <> 'made'"
PEOPLE_AND_ORDERS = ("select * from people order by id", "select * from orders order by id")


def is_defined(kills: Kills, *tables: str) -> bool:
    return not kills.target.execute(UNMADE) and all(
        described(kills.target, f"public.{table}") == described(kills.source, f"public.{table}")
        for table in tables or ("people", "orders")
    )


# ---- changes of definitions in the stream -----------------------------------------------------

CHANGE_COLUMNS = """
insert into t (id) values ({n} * 3); alter table t add column c{n} int not null default {n};
update t set c{n} = -id where id % 2 = 0; insert into t (id) values ({n} * 3 + 1)

alter table t rename column c{n} to d{n}

insert into t (id, d{n}) values ({n} * 3 + 2, 7)
"""
COLUMNS = """
select attname from pg_attribute where attrelid = 't'::regclass
and attnum > 0 and not attisdropped order by 1
"""


def change_columns(kills: Kills) -> None:
    """Change the definition and rows, in a single transaction and in several."""
    for statements in CHANGE_COLUMNS.format(n=kills.acts).split("\n\n"):
        kills.source.execute(statements)
    if kills.acts % 2:
        kills.source.execute(f"alter table t drop column d{kills.acts}")


def columns_changed_once(kills: Kills) -> None:
    """A rename or drop made twice would have failed, an addition too."""
    names = ", ".join(str(row[0]) for row in kills.source.execute(COLUMNS))
    assert differing(kills, [f"select {names} from t order by id"]) == []
    made = kills.target.value("select count(*) from streamer.ddl where state = 'applied'")
    assert made == kills.acts * 2 + kills.acts // 2


def rename_again(kills: Kills) -> None:
    assert kills.target.value("select to_regclass('a_0') is not null"), "all of it or nothing"
    kills.source.execute("alter table a_1 rename to a_2; insert into a_2 values (3)")


CHANGE_OBJECTS = """
create index i{n} on t (v, id); insert into t (id) values ({n} * 2);
alter table t add constraint c{n} check (id > -{n} - 1)

create unique index u{n} on t (id, v); insert into t (id) values ({n} * 2 + 1)

alter index if exists i{last} rename to r{last}; drop index if exists u{last}

alter table t drop constraint if exists c{last}
"""
PARTITIONED = """
create table {0} (id int, at int, primary key (id, at)) partition by range (at);
create table {0}_rest partition of {0} default;
"""


def change_partitions(kills: Kills) -> None:
    """Add a partition with rows, and detach or drop the partition before, with rows around."""
    number = kills.acts
    for table in "pq":
        kills.source.execute(
            f"insert into {table} values ({number}, 0);"
            f"create table {table}_{number} partition of {table}"
            f" for values from ({number * 10 + 10}) to ({number * 10 + 20});"
            f"insert into {table} select {number}, {number * 10 + 10} + g"
            " from generate_series(0, 9) g"
        )
        if number:
            former = f"{table}_{number - 1}"
            leave = f"alter table {table} detach partition {former}"
            kills.source.execute(
                f"update {table} set id = -id where id = {number - 1};"
                f"{leave if number % 2 else f'drop table {former}'};"
                f"insert into {table} values ({number}, 1)"
            )


# ---- mass deletes -----------------------------------------------------------------------------

MASS = "begin; insert into t values (11, 'in it'); delete from t where id < 9; commit"


def is_waiting(kills: Kills) -> bool:
    (table,) = kills.state()["tables"]
    return table["state"] == "paused" and table["waits_before"] is not None


def see_pause(kills: Kills) -> None:
    """Let a process find that the table waits for an operator."""
    if kills.deaths == 1:
        kills.source.execute("insert into t values (12, 'behind')")
        kills.begin(lambda: is_waiting(kills))
        assert kills.target.value("select count(*) from t") == 10


def see_pause_and_resume(kills: Kills) -> None:
    see_pause(kills)
    if kills.deaths == 1:
        kills.command("resume", "t")


def delete_all(kills: Kills) -> None:
    if kills.deaths == 0:
        kills.source.execute(MASS)


def delete_all_and_skip(kills: Kills) -> None:
    delete_all(kills)
    if kills.deaths == 1:
        kills.command("resume", "t", "--skip-deletes")


def braked(*failpoints: str, once: Act, between: Act, remaining: list[int]) -> Story:
    return Story(
        failpoints=failpoints,
        both=T + "insert into t select g, 'x' from generate_series(1, 10) g",
        rules="t: {initial: none, max_deleted_rows: 3}",
        once=once,
        between=between,
        expected={"select id from t order by id": [(n,) for n in [*remaining, 11, 12]]},
    )


# ---- tables join, leave, and get partitions and new names -------------------------------------

JOINING = """
"j_*": {}
"r_*": {}
"h_*": {type: history, on_table_dropped: close}
p: {}
log: {}
"""
OPEN = "select id, v from {} where kvsz_end = '9999-01-01' and not kvsz_deleted order by id"
VERSIONS = "select id, v, kvsz_deleted from {} order by id, kvsz_start"
CLOSED = [(1, "a", False), (1, "last", True), (2, "b", True), (9, "x", True)]
NAMED = "select relname from pg_class where relname like 'r\\_%' and relkind = 'r' order by 1"
PLAIN_TABLES = """
select relname::text from pg_class where relnamespace = 'public'::regnamespace
and relkind in ('r', 'p') and not relispartition order by 1
"""
# A second copy or change of a row would show, because the table has no key.
JOIN = """
create table j_{deaths} (id int, v text); insert into j_{deaths} values (1, 'before')

insert into j_{deaths} values (2, 'behind')
"""
EXCHANGE = """
begin; insert into r_x values ({deaths}, 'x'); insert into r_y values ({deaths}, 'y');
alter table r_x rename to r_z; alter table r_y rename to r_x;
insert into r_x values ({deaths}, 'y'); alter table r_z rename to r_y; commit

insert into r_x values ({deaths}, 'y'); insert into r_y values (9, 'x')
"""
ATTACH = """
create table p_{deaths} (id int not null, v text);
insert into p_{deaths} select {deaths}0 + g, 'attached' from generate_series(0, 4) g

alter table p attach partition p_{deaths} for values from ({deaths}0) to ({deaths}9);
insert into p values ({deaths}5, 'behind')

update p set v = 'changed' where id = {deaths}1

delete from p where id = {deaths}2
"""


def rename(kills: Kills) -> None:
    """Give a table another name, and the next one after a change of its rows."""
    name, number = kills.source.value(NAMED), kills.deaths
    kills.source.execute(
        f"insert into {name} values ({number}, 'before'); alter table {name} rename to r_{number};"
        f"alter table r_{number} add column c{number} int default {number}"
    )
    kills.source.execute(f"insert into r_{number} values ({number}, 'behind')")


def drop(kills: Kills) -> None:
    """Drop the table of a history after the last changes."""
    name = kills.source.value("select min(relname) from pg_class where relname like 'h\\_%'")
    kills.source.execute(
        f"update {name} set v = 'last' where id = 1; insert into {name} values (9, 'x')"
    )
    kills.source.execute(f"drop table {name}")


def coming_and_going(*failpoints: str, once: Act, source: str = "") -> Story:
    write_log = "insert into log values ({deaths})"
    histories = "".join(
        f"create table h_{number} (id int primary key, v text);"
        f"insert into h_{number} values (1, 'a'), (2, 'b');"
        for number in range(len(failpoints))
    )
    return Story(
        failpoints=failpoints,
        source="create table r_start (id int, v text); create table log (n int);"
        "create table p (id int, v text, primary key (id)) partition by range (id);"
        f"{source};{histories}",
        rules=JOINING,
        options={"group": CAPTURED, "settings": "discovery_interval: 1"},
        first=write_log,
        once=once,
        between=write_log,
        until=has_all_tables,
        rows=["select n from log order by n", NAMED],
    )


def has_all_tables(kills: Kills) -> bool:
    """Return whether tables have the rows of the source, and dropped histories all versions."""
    tables = [str(row[0]) for row in kills.source.execute(PLAIN_TABLES)]
    are_made = all(
        kills.target.value(f"select to_regclass('{name}') is not null") for name in tables
    )
    dropped = {f"h_{number}" for number in range(kills.deaths)}.difference(tables)
    states = {table["state"] for table in kills.state()["tables"] if table["error"] is None}
    return (
        are_made
        and differing(kills, [rows_of(name) for name in tables]) == []
        and all(kills.target.execute(VERSIONS.format(name)) == CLOSED for name in dropped)
        and states == {"ready"}
    )


def rows_of(table: str) -> Rows:
    if table.startswith("h_"):
        return f"select id, v from {table} order by id", OPEN.format(table)
    return f"select t::text from {table} t order by 1"


STORIES = {
    "streaming with one worker": streaming(
        *("acknowledge.after_send@2", "acknowledge.before_store@2", "apply.before_commit@2"),
        *("drain.piece_written@2", "requests.taken@2"),
        workers=1,
    ),
    "streaming with eight workers": streaming(
        *("acknowledge.after_store@2", "apply.after_commit@2", "apply.write@2"),
        "reader.dispatched@2",
        workers=8,
    ),
    "a lane moves": streaming(
        "apply.lane_moved@2", workers=1, program="tests.support.restless_lanes"
    ),
    "rows that differ are requested": Story(
        failpoints=("requests.taken", "sync.exchanged", "requests.ended"),
        source=T + FIFTY,
        first=ask_for_difference,
        between=is_still_taken,
        until=lambda kills: request_states(kills) == [("done",)],
        rows=["select * from t order by id"],
        after=copied_once,
    ),
    "a new column is copied": Story(
        failpoints=("requests.taken@2", "sync.at_point", "sync.exchanged", "sync.catching_up"),
        source=T + FIFTY,
        rules="t: {on_column_added: add}",
        first="alter table t add column n serial; update t set n = -1 where id = 2",
        between="update t set n = -3 where id = 3 + {deaths}; delete from t where id = 20 + {deaths}",
        rows=["select id, v, n from t order by id"],
    ),
    "the value of a column is another": Story(
        failpoints=("expressions.stored", "requests.taken", "sync.exchanged"),
        source=T + FIFTY,
        rules="t: {set: {v: 'upper(v)'}}",
        first=change_set,
        between="update t set v = 'w' where id = 3 + {deaths}; delete from t where id = 20 + {deaths}",
        rows=[("select id, v || id from t order by id", "select id, v from t order by id")],
        expected={"select count(*) from t where mine = id": [(47,)]},
    ),
    "a row is missing": Story(
        failpoints=("apply.before_commit", "apply.after_commit"),
        both=LACKING,
        target="delete from keyed where id in (3, 4, 5); delete from whole where id in (3, 4, 5)",
        rules="keyed: {initial: none}\nwhole: {initial: none}",
        first=CHANGE_MISSING,
        between=CHANGE_MISSING,
        rows=["select * from keyed order by id", "select * from whole order by id"],
        expected={
            NOTED: [
                (f"public.{table}", kind, key, 1)
                for table in ("keyed", "whole")
                for kind, key in MISSING
            ]
        },
    ),
    "column lists shrink and grow": Story(
        failpoints=("publication.relisted",),
        source=LISTED.format("shrinks") + LISTED.format("grows"),
        rules=LISTS.format("secret"),
        first=change_lists,
        between="update shrinks set v = 'behind', secret = 'n'; update grows set v = 'behind'",
        rows=["select id, v from shrinks", "select id, v, w, x from grows order by id"],
        expected={"select distinct state from streamer.relation": [("ready",)]},
    ),
    "definitions are made": Story(
        failpoints=(
            *("sync.table_created", "definitions.planned", "definitions.before_make@2"),
            *("definitions.before_make@2", "definitions.part_made"),
        ),
        source=DEFINED,
        rules="people:\norders:",
        options={"group": "create: all"},
        begins=False,
        between="insert into orders values (50 + {deaths}, 1)",
        until=is_defined,
        rows=PEOPLE_AND_ORDERS,
    ),
    "columns change": Story(
        failpoints=("ddl.applied@3", "apply.before_commit@3", "apply.after_commit@3") * 2,
        both=T,
        rules="t: {initial: none}",
        options={"group": f"{CAPTURED}\non_ddl: {{drop_column: apply}}"},
        act=change_columns,
        rows=[COLUMNS],
        after=columns_changed_once,
    ),
    "a relation follows its table": Story(
        failpoints=("rename.followed",),
        both="create table a_0 (id int primary key)",
        rules='"a_*": {initial: none}',
        options={"group": CAPTURED},
        begins=False,
        once="insert into a_0 values (1); alter table a_0 rename to a_1\n\n"
        "insert into a_1 values (2)",
        between=rename_again,
        expected={
            "select id from a_2 order by id": [(1,), (2,), (3,)],
            "select source, target from streamer.relation": [("public.a_2", "public.a_2")],
        },
    ),
    "an index or a constraint is made": Story(
        failpoints=(
            *("definitions.before_make@2", "definitions.before_make@3"),
            *("definitions.part_made@2", "definitions.part_made@3"),
        ),
        both=T,
        rules="t: {initial: none}",
        options={"group": f"{CAPTURED}\ncreate: all"},
        act=CHANGE_OBJECTS,
        until=lambda kills: is_defined(kills, "t"),
    ),
    "partitions come and go": Story(
        failpoints=("ddl.applied@7", "apply.before_commit@9", "apply.after_commit@9"),
        source=PARTITIONED.format("p") + PARTITIONED.format("q"),
        rules="p:\nq: {partitioned: true}",
        options={"group": f"{CAPTURED}\non_ddl: {{detach_partition: apply}}"},
        act=change_partitions,
        rows=[
            "select id, at from p order by at, id",
            "select id, at from q order by at, id",
            "select relid::regclass::text from pg_partition_tree('q') order by 1",
        ],
    ),
    "a mass delete is skipped": braked(
        *("delete_limit.stored", "requests.taken@2", "apply.before_commit"),
        once=delete_all_and_skip,
        between=see_pause,
        remaining=list(range(1, 11)),
    ),
    "a mass delete is made": braked(
        *("delete_limit.found", "apply.after_commit"),
        once=delete_all,
        between=see_pause_and_resume,
        remaining=[9, 10],
    ),
    "a table joins": coming_and_going(
        "join.registered", "join.published", "sync.copied", once=JOIN
    ),
    "a table is renamed": coming_and_going("rename.stored", "apply.before_commit", once=rename),
    "tables exchange their names": coming_and_going(
        *("rename.followed", "rename.stored", "apply.before_commit"),
        once=EXCHANGE,
        source="create table r_x (id int, v text); create table r_y (id int, v text)",
    ),
    "a table is dropped": coming_and_going(
        "drop.forgetting", "drop.forgotten", "apply.before_commit", once=drop
    ),
    "a partition is attached": coming_and_going(
        "attach.requesting", "sync.exchanged", "attach.requested", once=ATTACH
    ),
}


def test_every_failpoint_is_here() -> None:
    failpoints = {
        failpoint.partition("@")[0] for story in STORIES.values() for failpoint in story.failpoints
    }
    assert {name for name in NAMES if not name.startswith(ELSEWHERE)} <= failpoints


SINCE = {"column lists shrink and grow": 15}
"""The first versions of PostgreSQL with the feature that a story needs."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "story",
    [pytest.param(name, marks=pytest.mark.since(SINCE.get(name, 14))) for name in STORIES],
)
def test_killed_while(story: str, tmp_path: Path, source: Database, target: Database) -> None:
    STORIES[story].play(tmp_path, source, target)


def test_killed_in_the_middle_of_an_index_build(
    tmp_path: Path, source: Database, target: Database
) -> None:
    source.execute(DEFINED)
    kills = Kills(tmp_path, source, target, "people:\norders:", group="create: all")
    kills.begin()
    target.execute(
        "drop index orders_person; update streamer.definition set state = 'pending'"
        " where name = 'orders_person'"
    )
    building = (
        "select pid from pg_stat_activity where datname = current_database()"
        " and query like 'create index concurrently%' and wait_event_type = 'Lock'"
    )
    with target.connect() as user:
        user.execute("begin; lock table orders in row exclusive mode")
        kills.begin(lambda: target.execute(building))
    kills.end(lambda: is_defined(kills))
    assert differing(kills, PEOPLE_AND_ORDERS) == []
