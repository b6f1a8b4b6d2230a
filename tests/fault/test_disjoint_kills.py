"""Killed at each step of a copy into a table that other tables fill, a copy begins again."""

from pathlib import Path

import pytest

from tests.support.kills import Story
from tests.support.postgres import Database

pytestmark = pytest.mark.usefixtures("without_spark")

STEPS = ("sync.prepared", "sync.copied", "sync.exchanged", "sync.catching_up")
TABLES = """
create table events_1 (id int primary key, v text);
create table events_2 (id int primary key, v text);
insert into events_1 select g, 'one' from generate_series(1, 1000, 2) g;
insert into events_2 select g, 'two' from generate_series(2, 1000, 2) g
"""
BOTH = "select id, v from events_1 union all select id, v from events_2 order by 1"
STORY = Story(
    failpoints=STEPS,
    source=TABLES,
    rules='"events_*": {target: events, keys: disjoint}',
    begins=False,
    between="insert into events_1 values (2000 + 2 * {deaths}, 'late');"
    "insert into events_2 values (2001 + 2 * {deaths}, 'late'); update events_1 set v = 'x' where id < 9",
    rows=((BOTH, "select id, v from events order by 1"),),
)


def test_a_killed_first_copy_begins_again_without_a_collision(
    tmp_path: Path, source: Database, target: Database
) -> None:
    STORY.play(tmp_path, source, target)
