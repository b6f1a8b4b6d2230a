"""A pause before a mass delete, and the decision about it, over kills."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.postgres import Database
from tests.support.process import Process, caught_up, command, status
from tests.support.streamer import write_config
from tests.support.waiting import eventually

DDL = "create table t (id int primary key, v text)"
TABLES = "t: {initial: none, max_deleted_rows: 3}"
MASS = "begin; insert into t values (11, 'in it'); delete from t where id < 9; commit"


def table(config: Path) -> dict[str, Any]:
    (found,) = status(config)[0]["tables"]
    return dict(found)


def is_waiting(config: Path) -> bool:
    found = table(config)
    return found["state"] == "paused" and found["waits_before"] is not None


@pytest.mark.parametrize(
    ("name", "skip"),
    [
        ("brake.found", False),
        ("brake.stored", True),
        ("requests.taken", True),
        ("apply.before_commit", True),
        ("apply.after_commit", False),
    ],
)
def test_a_mass_delete_waits_and_is_applied_once(
    name: str, skip: bool, tmp_path: Path, source: Database, target: Database
) -> None:
    source.execute(DDL + "; insert into t select g, 'x' from generate_series(1, 10) g")
    target.execute(DDL + "; insert into t select g, 'x' from generate_series(1, 10) g")
    config = tmp_path / "config.yaml"
    write_config(config, source, target, TABLES)
    pauses = name.startswith("brake.")
    first = {"STREAMER_FAILPOINTS": f"{name}=kill"} if pauses else {}
    with Process(config, environment=first) as process:
        eventually(lambda: status(config)[0]["state"] == "streaming")
        source.execute(MASS)
        if pauses:
            assert process.wait(60) == -9
        else:
            eventually(lambda: is_waiting(config))
            process.kill()
    source.execute("insert into t values (12, 'behind')")
    if pauses:
        with Process(config) as process:
            eventually(lambda: is_waiting(config))
            process.kill()
    assert target.value("select count(*) from t") == 10
    resume = ["resume", "t", *(["--skip-deletes"] if skip else [])]
    if name != "requests.taken":
        assert command(config, *resume).returncode == 0
    second = {"STREAMER_FAILPOINTS": f"{name}=kill{'@2' if name == 'requests.taken' else ''}"}
    if not pauses:
        with Process(config, environment=second) as process:
            if name == "requests.taken":
                eventually(lambda: status(config)[0]["state"] == "streaming")
                assert command(config, *resume).returncode == 0
            assert process.wait(60) == -9
    with Process(config) as process:
        caught_up(process)
        assert process.terminate() == 0
    kept = list(range(1, 11)) if skip else [9, 10]
    assert target.execute("select id from t order by id") == [(n,) for n in [*kept, 11, 12]]
