"""`streamer status --watch`: on a terminal, and where there is none."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forks import ForkedProcess
from tests.support.postgres import Database
from tests.support.process import ROOT
from tests.support.streamer import write_config
from tests.support.waiting import eventually


@pytest.fixture
def config(tmp_path: Path, source: Database, target: Database) -> Path:
    source.execute('create table "[red]t" (id int primary key)')
    path = tmp_path / "config.yaml"
    write_config(path, source, target, '"[red]t":')
    return path


def watch(config: Path, *arguments: str) -> list[str]:
    return [
        *(sys.executable, "-m", "streamer", "--config", str(config)),
        *("status", "--watch", "--interval", "0.2", *arguments),
    ]


def test_without_a_terminal_it_prints_one_below_the_other_until_interrupted(
    config: Path, tmp_path: Path
) -> None:
    out, errors = tmp_path / "out", tmp_path / "errors"
    out.touch()
    process = ForkedProcess(
        "streamer",
        watch(config)[3:],
        environment=dict(os.environ),
        stdout=out,
        stderr=errors,
    )
    try:
        eventually(lambda: out.read_text().count("shop: not started") >= 3)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
    assert errors.read_text() == ""
    assert "\x1b" not in out.read_text()


def test_as_json_it_prints_an_object_a_line(config: Path) -> None:
    with subprocess.Popen(watch(config, "--json"), cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(2):
            assert json.loads(process.stdout.readline())["sources"][0]["state"] == "not started"
        process.stdout.close()  # as `head` does
        try:
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_on_a_terminal_it_draws_a_screen_and_gives_the_terminal_back(config: Path) -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen(
        watch(config), cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    shown = ""

    def read_until(pattern: str) -> None:
        nonlocal shown
        while not re.search(pattern, shown):
            try:
                data = os.read(ours, 65536).decode(errors="replace")
            except OSError:  # the program has closed its end of the terminal
                data = ""
            assert data, shown
            shown += data

    try:
        read_until(r"(?s)not started.*not started")
        assert "\x1b[?1049h" in shown  # the alternate screen
        process.send_signal(signal.SIGINT)
        read_until(r"\x1b\[\?1049l")
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(ours)
