"""Tables join, leave, and get partitions and other names. Killed before, in and after each step of
that, the program does the step once, and every row arrives once.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from streamer.failpoints import NAMES
from tests.support.postgres import Database
from tests.support.process import Process, caught_up, status
from tests.support.streamer import write_config
from tests.support.waiting import eventually

TABLES = """
"j_*": {}
"r_*": {}
"h_*": {type: history, on_table_dropped: close}
p: {}
log: {}
"""
OPEN = "select id, v from {} where kvsz_end = '9999-01-01' and not kvsz_deleted"
VERSIONS = "select id, v, kvsz_deleted from {} order by id, kvsz_start"

Change = Callable[[Database, int], None]


def join(source: Database, number: int) -> None:
    """Create a table without a key, where a second copy or change of a row would show."""
    source.execute(
        f"create table j_{number} (id int, v text); insert into j_{number} values (1, 'before')"
    )
    source.execute(f"insert into j_{number} values (2, 'behind')")


def rename(source: Database, number: int) -> None:
    """Give a table another name, and the next one after a change of its rows."""
    name = source.value("select relname from pg_class where relname like 'r\\_%' and relkind = 'r'")
    source.execute(
        f"insert into {name} values ({number}, 'before'); alter table {name} rename to r_{number};"
        f"alter table r_{number} add column c{number} int default {number}"
    )
    source.execute(f"insert into r_{number} values ({number}, 'behind')")


def exchange(source: Database, number: int) -> None:
    """Let two tables exchange their names, between changes of their rows."""
    source.execute(
        f"begin; insert into r_x values ({number}, 'x'); insert into r_y values ({number}, 'y');"
        "alter table r_x rename to r_z; alter table r_y rename to r_x;"
        f"insert into r_x values ({number}, 'y'); alter table r_z rename to r_y; commit"
    )
    source.execute(f"insert into r_x values ({number}, 'y'); insert into r_y values (9, 'x')")


def drop(source: Database, number: int) -> None:
    """Drop the table of a history with its last changes."""
    name = source.value("select min(relname) from pg_class where relname like 'h\\_%'")
    source.execute(f"update {name} set v = 'last' where id = 1; insert into {name} values (9, 'x')")
    source.execute(f"drop table {name}")


def attach(source: Database, number: int) -> None:
    """Attach a partition with rows, and change some of them behind that."""
    low = number * 10
    source.execute(
        f"create table p_{number} (id int not null, v text);"
        f"insert into p_{number} select g, 'attached' from generate_series({low}, {low + 4}) g"
    )
    source.execute(
        f"alter table p attach partition p_{number} for values from ({low}) to ({low + 10});"
        f"insert into p values ({low + 5}, 'behind')"
    )
    source.execute(f"update p set v = 'changed' where id = {low + 1}")
    source.execute(f"delete from p where id = {low + 2}")


CASES: dict[str, tuple[Change, tuple[str, ...]]] = {
    "joins": (join, ("join.registered", "join.published", "sync.copied")),
    "is renamed": (rename, ("rename.stored", "apply.before_commit")),
    "exchanges its name": (exchange, ("rename.followed", "rename.stored", "apply.before_commit")),
    "is dropped": (drop, ("drop.forgetting", "drop.forgotten", "apply.before_commit")),
    "has a new partition": (attach, ("attach.requesting", "sync.exchanged", "attach.brought")),
}


def test_every_failpoint_is_here() -> None:
    tested = {name for _, names in CASES.values() for name in names}
    own = ("join.", "rename.", "drop.", "attach.")
    assert {name for name in NAMES if name.startswith(own)} <= tested


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_killed_as_a_table(case: str, tmp_path: Path, source: Database, target: Database) -> None:
    change, names = CASES[case]
    source.execute(
        "create table r_start (id int, v text); create table log (n int);"
        "create table p (id int, v text, primary key (id)) partition by range (id)"
    )
    if case == "exchanges its name":
        source.execute("create table r_x (id int, v text); create table r_y (id int, v text)")
    for number in range(len(names)):
        source.execute(
            f"create table h_{number} (id int primary key, v text);"
            f"insert into h_{number} values (1, 'a'), (2, 'b')"
        )
    config = tmp_path / "config.yaml"
    group = "ddl: capture"
    write_config(config, source, target, TABLES, group=group, settings="discovery_interval: 1")
    with Process(config, spark=False) as process:
        caught_up(process)
        process.kill()
    for number, name in enumerate(names):
        source.execute(f"insert into log values ({number})")
        environment = {"STREAMER_FAILPOINTS": f"{name}=kill"}
        with Process(config, spark=False, environment=environment) as process:
            # It may die already while it ends the step of the last process.
            eventually(partial(has_begun, process))
            if process.process.poll() is None:
                change(source, number)
            assert process.process.ends_within(120), f"{name} was not reached"
            assert process.process.returncode == -9, process.output
    with Process(config, spark=False) as process:
        caught_up(process)
        eventually(lambda: differences(source, target) == [])
        eventually(lambda: states(config) == {"ready"})
        eventually(lambda: still_open(source, target, len(names)) == [])
        assert process.terminate() == 0
    assert len(target.execute("select n from log")) == len(names)
    if change in (rename, exchange):
        named = "select relname from pg_class where relname like 'r\\_%'"
        assert target.execute(named) == source.execute(named)


def still_open(source: Database, target: Database, count: int) -> list[str]:
    """Return the dropped tables whose history does not have each version once, all closed."""
    left = {row[0] for row in source.execute("select relname from pg_class")}
    last = [(1, "a", False), (1, "last", True), (2, "b", True), (9, "x", True)]
    gone = [f"h_{number}" for number in range(count) if f"h_{number}" not in left]
    return [name for name in gone if target.execute(VERSIONS.format(name)) != last]


def has_begun(process: Process) -> bool:
    return process.process.poll() is not None or status(process.config)[0]["state"] == "streaming"


def states(config: Path) -> set[str]:
    return {table["state"] for table in status(config)[0]["tables"] if table["error"] is None}


def differences(source: Database, target: Database) -> list[str]:
    """Return the tables whose rows at the target are not exactly those of the source."""
    tables = source.execute(
        "select relname from pg_class where relnamespace = 'public'::regnamespace"
        " and relkind in ('r', 'p') and not relispartition order by 1"
    )
    differing = []
    for (name,) in tables:
        if not target.value(f"select to_regclass('{name}') is not null"):
            differing.append(str(name))
            continue
        row = "select t::text from {} t order by 1"
        here, there = source.execute(row.format(name)), target.execute(row.format(name))
        if str(name).startswith("h_"):
            here = source.execute(f"select id, v from {name} order by id")
            there = target.execute(f"{OPEN.format(name)} order by id")
        if here != there:
            differing.append(f"{name}: {here} != {there}")
    return differing
