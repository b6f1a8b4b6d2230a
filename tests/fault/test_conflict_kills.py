"""A process that is killed at a commit with conflicts: each conflict is noted once."""

from pathlib import Path

import pytest

from tests.support.postgres import Database, assert_same
from tests.support.process import Process, caught_up
from tests.support.streamer import write_config

DDL = """
create table keyed (id int primary key, v int);
create table whole (id int, v int); alter table whole replica identity full;
insert into keyed select n, 0 from generate_series(1, 9) n;
insert into whole select n, 0 from generate_series(1, 9) n;
"""
NOTED = """
select r.source, c.kind, c.key ->> 'id', count(*) from streamer.conflict c
join streamer.relation r on r.id = c.relation_id group by 1, 2, 3 order by 1, 2, 3
"""


@pytest.mark.timeout(200)
def test_a_kill_around_the_commit_notes_no_conflict_twice_and_loses_none(
    source: Database, target: Database, tmp_path: Path
) -> None:
    source.execute(DDL)
    target.execute(DDL)
    for table in ("keyed", "whole"):
        target.execute(f"delete from {table} where id in (3, 4, 5)")
    path = tmp_path / "config.yaml"
    write_config(path, source, target, "keyed: {initial: none}\nwhole: {initial: none}")
    with Process(path, spark=False) as process:
        caught_up(process)
        assert process.terminate() == 0
    expected = []
    for n, failpoint in enumerate(("apply.before_commit=kill", "apply.after_commit=kill"), 3):
        for table in ("keyed", "whole"):
            source.execute(f"update {table} set v = {n} where id in (1, {n})")
            expected.append((f"public.{table}", "update_missing", str(n), 1))
        with Process(path, spark=False, environment={"STREAMER_FAILPOINTS": failpoint}) as process:
            assert process.wait(60) == -9
    for table in ("keyed", "whole"):
        source.execute(f"delete from {table} where id in (2, 5)")
        expected.append((f"public.{table}", "delete_missing", "5", 1))
    with Process(path, spark=False) as process:
        caught_up(process)
        assert process.terminate() == 0
    assert target.execute(NOTED) == sorted(expected)
    for table in ("keyed", "whole"):
        assert_same(source, target, table)
