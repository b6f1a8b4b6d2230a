"""Killed at every step from dispatch to acknowledgement, the program goes on as if nothing was."""

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
    *("publication.", "slot."),
)
MOVED = "apply.lane_moved"
STREAMING = sorted(
    name for name in NAMES - {MOVED, "requests.ended"} if not name.startswith(_OTHERS)
)
CASES = [
    (STREAMING[::2], 1, "streamer"),
    (STREAMING[1::2], 8, "streamer"),
    ([MOVED], 1, "tests.support.restless_lanes"),
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


@pytest.mark.parametrize(("names", "workers", "program"), CASES, ids=["1", "8", "moved"])
def test_killed_at_one_step_after_the_other(
    names: list[str],
    workers: int,
    program: str,
    tmp_path: Path,
    source: Database,
    target: Database,
) -> None:
    source.execute(DDL + "create table hist (id int primary key, v text)")
    target.execute(DDL + HISTORY)
    config = tmp_path / "config.yaml"
    write_config(config, source, target, TABLES, settings=f"workers: {workers}")
    with Process(config) as process:
        caught_up(process)
        process.kill()
    written = 0
    for name in names:
        write(source, written, written + 40)
        first = written + 40
        environment = {"STREAMER_FAILPOINTS": f"{name}=kill@2"}
        with Process(config, environment=environment, program=program) as process:
            if name == "drain.piece_written":
                write_large(source)
            while not process.process.ends_within(0.1):
                assert first < written + 1000, f"{name} was not reached"
                write(source, first, first + 5)
                if name == "requests.taken":
                    request_all(target)
                first += 5
            assert process.process.returncode == -9, name
        written = first + 20
        write(source, first, written)
        with Process(config) as process:
            eventually(lambda: status(config)[0]["state"] == "streaming")
            caught_up(process)
            assert process.terminate() == 0, name
        assert_equal(source, target)
