"""A request that a process has taken is fulfilled once and has its outcome, wherever that dies."""

import json
from pathlib import Path

import pytest

from streamer.failpoints import VARIABLE
from tests.support.postgres import Database
from tests.support.process import Process, caught_up, command
from tests.support.streamer import write_config
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("without_spark")


@pytest.mark.parametrize("name", ["requests.taken", "sync.exchanged", "requests.ended"])
def test_killed_at(name: str, tmp_path: Path, source: Database, target: Database) -> None:
    source.execute("create table t (id int primary key, v text)")
    source.execute("insert into t select g, 'v' from generate_series(1, 50) g")
    config = tmp_path / "config.yaml"
    write_config(config, source, target, "t:")
    with Process(config, spark=False) as process:
        caught_up(process)
    target.execute("update t set v = 'wrong'")
    made = command(config, "resync", "t", "--mode", "diff", "--no-wait", "--json")
    number = json.loads(made.stdout)["requests"][0]["id"]
    assert json.loads(made.stdout)["requests"][0]["state"] == "queued"
    state = f"select state from streamer.request where id = {number}"
    armed = {VARIABLE: f"{name}=kill"}
    with Process(config, environment=armed, spark=False) as process:
        assert process.wait(90) == -9
    assert target.value(state) == "taken"
    with Process(config, spark=False) as process:
        eventually(lambda: target.value(state) == "done", what="the outcome")
        caught_up(process)
        assert process.terminate() == 0
        copies = process.output.count("table copied")
    assert source.execute("select * from t order by id") == (
        target.execute("select * from t order by id")
    )
    assert copies == (name != "requests.ended")
