"""`streamer execute`, killed at every step on both sides: the script runs once on each."""

from pathlib import Path

import pytest

from streamer.util.failpoints import NAMES
from tests.support.kills import Kills
from tests.support.postgres import Database
from tests.support.process import caught_up

OF_COMMAND = ("execute.stored", "execute.announced", "execute.source_committed")
OF_PROCESS = ("execute.before_commit", "execute.after_commit")
COUNT = "insert into counted select %s, count(*) from t"


def test_every_failpoint_is_here() -> None:
    assert {name for name in NAMES if name.startswith("execute.")} == {*OF_COMMAND, *OF_PROCESS}


@pytest.mark.timeout(180)
def test_killed_at_each_step_a_script_runs_once_on_each_side(
    tmp_path: Path, source: Database, target: Database
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key); create table counted (n int, rows int)")
    kills = Kills(tmp_path, source, target, "t: {initial: none}")
    file = tmp_path / "count.sql"

    def execute(number: int, *arguments: str, failpoint: str | None = None) -> int:
        file.write_text(COUNT % number)
        words = ("execute", str(file), "--id", f"count {number}", *arguments)
        return kills.call(*words, failpoint=failpoint)[0]

    with kills.process() as process:
        caught_up(process)
        for number, name in enumerate(OF_COMMAND):
            source.execute(f"insert into t values ({number})")
            assert execute(number, failpoint=name) == -9
            source.execute(f"insert into t values (10{number})")
            assert execute(number) == 0
            assert execute(number) == 0
        process.kill()
    for number, name in enumerate(OF_PROCESS, 3):

        def announce(number: int = number) -> None:
            source.execute(f"insert into t values ({number})")
            assert execute(number, "--timeout", "0") == 1

        kills.die_of(name, announce)
        source.execute(f"insert into t values (10{number})")
    kills.end()
    done = source.execute("select n, rows from counted order by 1")
    assert [number for number, _ in done] == [0, 1, 2, 3, 4]
    assert target.execute("select n, rows from counted order by 1") == done
