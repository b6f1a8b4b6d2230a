"""Killed at every step from dispatch to acknowledgement, the program goes on as if nothing was."""

from itertools import cycle
from pathlib import Path

import pytest

from streamer.failpoints import NAMES
from streamer.progress.requests import CHANNEL
from tests.support.mixed import DDL, HISTORY, TABLES, assert_equal, write
from tests.support.postgres import Database
from tests.support.process import Process, caught_up, status
from tests.support.streamer import write_config
from tests.support.waiting import eventually

_OTHERS = (
    *("sync.", "indexes.", "journal.", "compare.", "execute.", "brake.", "cutover."),
    *("definitions.", "ddl.", "expressions.", "rename.", "purge.", "attach.", "drop.", "join."),
    "publication.",
)
MOVED = "apply.lane_moved"
STREAMING = sorted(name for name in NAMES - {MOVED} if not name.startswith(_OTHERS))
CASES = [
    *((name, workers, "streamer") for name, workers in zip(STREAMING, cycle([1, 8]), strict=False)),
    (MOVED, 1, "tests.support.restless_lanes"),
]


def write_large(source: Database) -> None:
    """The transactions that a drainer applies in pieces."""
    source.execute(
        "insert into keyless select g % 3, repeat('x', 300) from generate_series(1, 40000) g"
    )


def request_all(target: Database) -> None:
    """An operator's requests, which change nothing."""
    target.execute(
        "insert into streamer.request (relation_id, action) select id, 'resume'"
        f" from streamer.relation; notify {CHANNEL}"
    )


@pytest.mark.parametrize(("name", "workers", "program"), CASES)
def test_killed_at(
    name: str, workers: int, program: str, tmp_path: Path, source: Database, target: Database
) -> None:
    source.execute(DDL + "create table hist (id int primary key, v text)")
    target.execute(DDL + HISTORY)
    config = tmp_path / "config.yaml"
    write_config(config, source, target, TABLES, settings=f"workers: {workers}")
    with Process(config) as process:
        caught_up(process)
        process.kill()
    write(source, 0, 40)
    environment = {"STREAMER_FAILPOINTS": f"{name}=kill@2"}
    with Process(config, environment=environment, program=program) as process:
        first = 40
        while not process.process.ends_within(0.1):
            assert first < 1000, "the failpoint was not reached"
            write(source, first, first + 5)
            if name == "drain.piece_written" and first == 40:
                write_large(source)
            if name == "requests.taken":
                request_all(target)
            first += 5
        assert process.process.returncode == -9
    write(source, first, first + 20)
    with Process(config) as process:
        eventually(lambda: status(config)[0]["state"] == "streaming")
        caught_up(process)
        assert process.terminate() == 0
    assert_equal(source, target)
