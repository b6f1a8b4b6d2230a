"""Columns of existing rows are brought once, wherever the process dies."""

from pathlib import Path

import pytest

from tests.support.postgres import Database
from tests.support.process import Process, caught_up
from tests.support.streamer import write_config
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("without_spark")

ROWS = "select id, v, n from t order by id"


@pytest.mark.parametrize(
    "name", ["requests.taken", "sync.at_point", "sync.exchanged", "sync.catching_up"]
)
def test_killed_at(name: str, tmp_path: Path, source: Database, target: Database) -> None:
    source.execute("create table t (id int primary key, v text)")
    source.execute("insert into t select g, 'v' from generate_series(1, 50) g")
    config = tmp_path / "config.yaml"
    write_config(config, source, target, "t: {on_column_added: add}")
    with Process(config, spark=False) as process:
        caught_up(process)
        process.kill()
    source.execute("alter table t add column n serial; update t set n = -1 where id = 2")
    count = "@2" if name == "requests.taken" else ""
    armed = {"STREAMER_FAILPOINTS": f"{name}=kill{count}"}
    with Process(config, environment=armed, spark=False) as process:
        assert process.wait(90) == -9
    source.execute("update t set n = -3 where id = 3; delete from t where id = 4")
    with Process(config, spark=False) as process:
        eventually(lambda: source.execute(ROWS) == target.execute(ROWS), what="equal rows")
        caught_up(process)
        assert process.terminate() == 0
    assert source.execute(ROWS) == target.execute(ROWS)


@pytest.mark.parametrize("name", ["expressions.stored", "requests.taken", "sync.exchanged"])
def test_killed_after_set_has_changed(
    name: str, tmp_path: Path, source: Database, target: Database
) -> None:
    source.execute("create table t (id int primary key, v text)")
    source.execute("insert into t select g, 'v' from generate_series(1, 50) g")
    config = tmp_path / "config.yaml"
    write_config(config, source, target, "t: {set: {v: 'upper(v)'}}")
    with Process(config, spark=False) as process:
        caught_up(process)
        process.kill()
    # It differs only where no copy of whole rows has been.
    target.execute("alter table t add column mine int; update t set mine = id")
    write_config(config, source, target, "t: {set: {v: 'v || id'}}")
    armed = {"STREAMER_FAILPOINTS": f"{name}=kill"}
    with Process(config, environment=armed, spark=False) as process:
        assert process.wait(90) == -9
    source.execute("update t set v = 'w' where id = 3; delete from t where id = 4")
    there, here = "select id, v || id from t order by id", "select id, v from t order by id"
    with Process(config, spark=False) as process:
        eventually(lambda: source.execute(there) == target.execute(here), what="equal rows")
        caught_up(process)
        assert process.terminate() == 0
    assert source.execute(there) == target.execute(here)
    assert target.value("select count(*) from t where mine = id") == 49
