"""Killed before, in and after the transaction that changes a definition, the program makes each
change exactly once, in its place.
"""

from pathlib import Path

from tests.support.definitions import described
from tests.support.postgres import Database
from tests.support.process import Process, caught_up, status
from tests.support.streamer import write_config
from tests.support.waiting import eventually

DDL = "create table t (id int primary key, name text)"


def run_to_the_end(config: Path) -> None:
    """Run once more, without a kill, until everything has arrived."""
    with Process(config) as process:
        eventually(lambda: status(config)[0]["state"] == "streaming")
        caught_up(process)
        assert process.terminate() == 0


def change(source: Database, number: int) -> None:
    """Change the definition and rows, in one transaction and in several."""
    old, new = f"c{number}", f"d{number}"
    source.execute(
        f"insert into t (id) values ({number * 3});"
        f"alter table t add column {old} int not null default {number};"
        f"update t set {old} = -id where id % 2 = 0; insert into t (id) values ({number * 3 + 1})"
    )
    source.execute(f"alter table t rename column {old} to {new}")
    source.execute(f"insert into t (id, {new}) values ({number * 3 + 2}, 7)")
    if number % 2:
        source.execute(f"alter table t drop column {new}")


def test_killed_at_each_step_of_a_change(
    tmp_path: Path, source: Database, target: Database
) -> None:
    for db in (source, target):
        db.execute(DDL)
    config = tmp_path / "config.yaml"
    group = "ddl: capture\non_ddl: {drop_column: apply}"
    write_config(config, source, target, "t: {initial: none}", group=group)
    with Process(config) as process:
        caught_up(process)
        process.kill()
    number = 0
    for name in ("ddl.applied", "apply.before_commit", "apply.after_commit") * 2:
        with Process(config, environment={"STREAMER_FAILPOINTS": f"{name}=kill@3"}) as process:
            while not process.process.ends_within(0.1):
                assert number < 300, f"{name} was not reached"
                change(source, number)
                number += 1
            assert process.process.returncode == -9, name
    run_to_the_end(config)
    columns = (
        "select attname from pg_attribute where attrelid = 't'::regclass"
        " and attnum > 0 and not attisdropped order by 1"
    )
    names = [str(row[0]) for row in source.execute(columns)]
    assert target.execute(columns) == source.execute(columns)
    rows = f"select {', '.join(names)} from t order by id"
    assert target.execute(rows) == source.execute(rows)
    # Each command was made once: a rename or drop made twice would have failed, an addition too.
    made = target.value("select count(*) from streamer.ddl where state = 'applied'")
    assert made == number * 2 + number // 2


def test_killed_as_a_relation_follows_its_table(
    tmp_path: Path, source: Database, target: Database
) -> None:
    for db in (source, target):
        db.execute("create table a_0 (id int primary key)")
    config = tmp_path / "config.yaml"
    write_config(config, source, target, '"a_*": {initial: none}', group="ddl: capture")
    with Process(config, environment={"STREAMER_FAILPOINTS": "rename.followed=kill"}) as process:
        caught_up(process)
        source.execute("insert into a_0 values (1); alter table a_0 rename to a_1")
        source.execute("insert into a_1 values (2)")
        assert process.process.ends_within(60)
        assert process.process.returncode == -9
    assert target.value("select to_regclass('a_0') is not null"), "all of it or nothing"
    source.execute("alter table a_1 rename to a_2; insert into a_2 values (3)")
    with Process(config) as process:
        caught_up(process)
        assert process.terminate() == 0
    assert target.execute("select id from a_2 order by id") == [(1,), (2,), (3,)]
    assert target.execute("select source, target from streamer.relation") == [
        ("public.a_2", "public.a_2")
    ]


def change_objects(source: Database, number: int) -> None:
    """Add, rename and drop indexes and constraints, with rows between them."""
    source.execute(
        f"create index i{number} on t (name, id); insert into t (id) values ({number * 2});"
        f"alter table t add constraint c{number} check (id > -{number + 1})"
    )
    source.execute(
        f"create unique index u{number} on t (id, name); insert into t (id) values ({number * 2 + 1})"
    )
    if number:
        before = number - 1
        source.execute(f"alter index i{before} rename to r{before}; drop index u{before}")
        source.execute(f"alter table t drop constraint c{before}")


def test_killed_while_an_index_or_a_constraint_is_made(
    tmp_path: Path, source: Database, target: Database
) -> None:
    for db in (source, target):
        db.execute(DDL)
    config = tmp_path / "config.yaml"
    group = "ddl: capture\ncreate: all"
    write_config(config, source, target, "t: {initial: none}", group=group)
    with Process(config) as process:
        caught_up(process)
        process.kill()
    number = 0
    for name in ("definitions.before_make", "definitions.part_made"):
        for count in (2, 3):
            environment = {"STREAMER_FAILPOINTS": f"{name}=kill@{count}"}
            with Process(config, environment=environment) as process:
                while not process.process.ends_within(0.2):
                    assert number < 200, f"{name} was not reached"
                    change_objects(source, number)
                    number += 1
                assert process.process.returncode == -9, name
    with Process(config) as process:
        eventually(lambda: status(config)[0]["state"] == "streaming")
        caught_up(process)
        eventually(lambda: not target.execute(LEFT))
        assert process.terminate() == 0
    here, there = (described(db, "public.t") for db in (source, target))
    assert (there["indexes"], there["constraints"]) == (here["indexes"], here["constraints"])


LEFT = "select * from streamer.definition where state <> 'made'"


def change_partitions(source: Database, number: int) -> None:
    """Add a partition with rows, and detach or drop the one before, with rows around it."""
    for table in "pq":
        source.execute(
            f"insert into {table} values ({number}, 0);"
            f"create table {table}_{number} partition of {table}"
            f" for values from ({number * 10 + 10}) to ({number * 10 + 20});"
            f"insert into {table} select {number}, {number * 10 + 10} + g"
            " from generate_series(0, 9) g"
        )
        if number:
            before = f"{table}_{number - 1}"
            leave = f"alter table {table} detach partition {before}"
            source.execute(
                f"update {table} set id = -id where id = {number - 1};"
                f"{leave if number % 2 else f'drop table {before}'};"
                f"insert into {table} values ({number}, 1)"
            )


def test_killed_while_partitions_come_and_go(
    tmp_path: Path, source: Database, target: Database
) -> None:
    for table in "pq":
        source.execute(
            f"create table {table} (id int, at int, primary key (id, at)) partition by range (at)"
        )
        source.execute(f"create table {table}_rest partition of {table} default")
    config = tmp_path / "config.yaml"
    group = "ddl: capture\non_ddl: {detach_partition: apply}"
    write_config(config, source, target, "p:\nq: {partitioned: true}", group=group)
    number = 0
    for name in ("ddl.applied=kill@7", "apply.before_commit=kill@9", "apply.after_commit=kill@9"):
        with Process(config, spark=False, environment={"STREAMER_FAILPOINTS": name}) as process:
            if not number:
                caught_up(process)
            while not process.process.ends_within(0.1):
                assert number < 200, "the failpoint was not reached"
                change_partitions(source, number)
                number += 1
            assert process.process.returncode == -9
    run_to_the_end(config)
    for table in "pq":
        rows = f"select id, at from {table} order by at, id"
        assert target.execute(rows) == source.execute(rows)
    leaves = "select relid::regclass::text from pg_partition_tree('q') order by 1"
    assert target.execute(leaves) == source.execute(leaves)
