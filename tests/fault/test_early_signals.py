"""Signals during the start of the process work as later signals do."""

import os
import signal
from pathlib import Path

from tests.support.postgres import Database
from tests.support.process import Process, caught_up
from tests.support.streamer import write_config
from tests.support.waiting import eventually

HANGUP = 1 << (signal.SIGHUP - 1)


def survives_hangup(pid: int) -> bool:
    """Whether the kernel reports SIGHUP as ignored or handled."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigIgn", "SigCgt"))]
    return any(mask & HANGUP for mask in masks)


def test_a_reload_that_is_asked_for_at_once_does_not_end_the_process(
    source: Database, target: Database, tmp_path: Path
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key)")
    config = tmp_path / "config.yaml"
    write_config(config, source, target, "t: {initial: none}")
    with Process(config, spark=False) as process:
        pid = process.process.pid
        eventually(lambda: survives_hangup(pid), 60, "a handler")

        def has_started() -> bool:
            assert process.process.poll() is None, process.output
            os.kill(pid, signal.SIGHUP)
            return "starting" in process.output

        eventually(has_started, 60, "the log's first line")
        caught_up(process)
        source.execute("insert into t values (1)")
        caught_up(process)
        assert target.execute("select id from t") == [(1,)]
        assert process.terminate() == 0
