"""`streamer execute`, killed at every step on both sides: the script runs once on each."""

from pathlib import Path

import pytest

from streamer.failpoints import NAMES
from tests.support.postgres import Database
from tests.support.process import Process, caught_up, run
from tests.support.streamer import write_config
from tests.support.waiting import eventually

OF_COMMAND = ("execute.stored", "execute.announced", "execute.source_committed")
OF_PROCESS = ("execute.before_commit", "execute.after_commit")
IS_ACTIVE = "select bool_or(active) from pg_replication_slots where database = current_database()"
COUNT = "insert into counted select %s, count(*) from t"


def test_every_failpoint_is_here() -> None:
    assert {name for name in NAMES if name.startswith("execute.")} == {*OF_COMMAND, *OF_PROCESS}


@pytest.mark.timeout(180)
def test_killed_at_each_step_a_script_runs_once_on_each_side(
    tmp_path: Path, source: Database, target: Database
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key); create table counted (n int, rows int)")
    config = tmp_path / "config.yaml"
    write_config(config, source, target, "t: {initial: none}")
    file = tmp_path / "count.sql"

    def execute(number: int, failpoint: str | None = None) -> int:
        file.write_text(COUNT % number)
        environment = {} if failpoint is None else {"STREAMER_FAILPOINTS": f"{failpoint}=kill"}
        arguments = ("--config", str(config), "execute", str(file), "--id", f"count {number}")
        result = run("streamer", *arguments, environment=environment, seconds=120)
        assert result.returncode in (0, -9), result.stderr
        return result.returncode

    with Process(config, spark=False) as process:
        caught_up(process)
        for number, name in enumerate(OF_COMMAND):
            source.execute(f"insert into t values ({number})")
            assert execute(number, name) == -9
            source.execute(f"insert into t values (10{number})")
            assert execute(number) == 0
            assert execute(number) == 0
        process.kill()
    for number, name in enumerate(OF_PROCESS, 3):
        environment = {"STREAMER_FAILPOINTS": f"{name}=kill"}
        with Process(config, spark=False, environment=environment) as process:
            eventually(lambda: source.value(IS_ACTIVE) or process.process.poll() is not None)
            source.execute(f"insert into t values ({number})")
            file.write_text(COUNT % number)
            arguments = ("--config", str(config), "execute", str(file), "--id", f"count {number}")
            assert run("streamer", *arguments, "--timeout", "0").returncode == 1
            assert process.wait(60) == -9
        source.execute(f"insert into t values (10{number})")
    with Process(config, spark=False) as process:
        caught_up(process)
        assert process.terminate() == 0
    done = source.execute("select n, rows from counted order by 1")
    assert [number for number, _ in done] == [0, 1, 2, 3, 4]
    assert target.execute("select n, rows from counted order by 1") == done
