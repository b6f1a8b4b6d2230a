"""`streamer events`, with and without a running process; and shell completion."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamer.commands.demo.embedded_servers import free_port
from tests.support.forks import ForkedProcess
from tests.support.postgres import Database
from tests.support.process import Process, caught_up, command, run
from tests.support.streamer import write_config
from tests.support.waiting import eventually

SCRIPT = "streamer.cli.main:main"
TOKEN = "the-token-of-the-events"


@pytest.fixture
def config(tmp_path: Path, source: Database, target: Database) -> Path:
    for db in (source, target):
        db.execute("create table t (id int primary key, v text)")
        db.execute('create table "o\x1b[31m" (id int primary key)')
    path = tmp_path / "config.yaml"
    tables = 't: {initial: none}\n"o*": {initial: none}'
    token = f"admin: {{token: {TOKEN}}}"
    write_config(path, source, target, tables, sid="eu", settings=token, port=free_port())
    return path


@contextlib.contextmanager
def tail(config: Path, out: Path, *arguments: str) -> Iterator[ForkedProcess]:
    errors = out.with_name("errors")
    out.touch()
    process = ForkedProcess(
        "streamer",
        ["--config", str(config), "events", *arguments],
        environment=dict(os.environ),
        stdout=out,
        stderr=errors,
    )
    try:
        yield process
    finally:
        process.kill()
    assert errors.read_text() == ""


def test_a_tail_goes_on_from_process_to_bookkeeping_and_back(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with tail(config, out, "--follow", "--json") as tailing:

        def lines() -> list[dict[str, object]]:
            return [json.loads(line) for line in out.read_text().splitlines()]

        def told(table: str | None, state: str) -> list[dict[str, object]]:
            return [
                line
                for line in lines()
                if (line["event"], line.get("table"), line.get("state")) == ("state", table, state)
            ]

        with Process(config, spark=False) as process:
            caught_up(process)
            eventually(lambda: told("public.t", "ready"))
            assert command(config, "pause", "t").returncode == 0
            eventually(lambda: told("public.t", "paused"))
            assert process.terminate() == 0
        # No process runs: requests show in the bookkeeping once a process has taken the requests.
        eventually(lambda: told(None, "stopped"))
        with Process(config, spark=False) as process:
            eventually(lambda: len(told(None, "streaming")) >= 2, 60)
            assert command(config, "resume", "t").returncode == 0
            eventually(lambda: len(told("public.t", "ready")) >= 2, 60)
            tailing.send_signal(signal.SIGINT)
            assert tailing.wait(30) == 0
            assert process.terminate() == 0
    assert all(line["at"] for line in lines())
    assert len(told("public.t", "paused")) == 1, "the same is told once"


def test_without_follow_it_says_how_everything_is_and_ends(config: Path) -> None:
    with Process(config, spark=False) as process:
        caught_up(process)
        running = command(config, "events")
        assert running.returncode == 0, running.stderr
        process.terminate()
    stopped = command(config, "events")

    assert "shop:eu  streaming" in running.stdout
    assert "shop:eu  stopped" in stopped.stdout
    for result in (running, stopped):
        assert "shop:eu public.t  ready" in result.stdout
        assert "\x1b" not in result.stdout  # a name is not obeyed by the terminal
        assert len(result.stdout.splitlines()) == 3
    config.write_text(config.read_text().replace(TOKEN, "another-token-of-the-events"))
    with Process(config, spark=False, environment={"STREAMER_ADMIN__TOKEN": TOKEN}) as process:
        eventually(lambda: "streaming" in process.output)
        refused = command(config, "events")
        assert refused.returncode == 3, refused.stdout
        assert "STREAMER_ADMIN__TOKEN" in refused.stderr


def test_a_process_elsewhere_that_does_not_answer_is_said(config: Path) -> None:
    result = command(config, "events", "--follow", "--url", "http://127.0.0.1:9")

    assert result.returncode == 3
    assert "cannot reach" in result.stderr


# ---- completion --------------------------------------------------------------------------------


def complete(config: Path, words: str) -> set[str]:
    """Ask as bash does for completions at the end of *words*."""
    line = f"streamer --config {config} {words}"
    environment = {
        "_STREAMER_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }
    result = run(SCRIPT, environment=environment)
    assert result.stderr == ""
    return set(result.stdout.split())


def test_a_shell_completes_commands_databases_and_tables(config: Path) -> None:
    assert {"status", "stop"} & complete(config, "stat") == {"status"}
    assert "--follow" in complete(config, "events --fo")
    assert complete(config, "resync ") == {"t"}
    assert complete(config, "pause --database ") == {"shop"}
    assert complete(config, "pause --sid e") == {"eu"}
    config.write_text("target: [")
    assert complete(config, "resync ") == set()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_shown_and_installed_for(shell: str, tmp_path: Path) -> None:
    environment = {
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
        "HOME": str(tmp_path),
    }

    def says(option: str) -> str:
        result = run(SCRIPT, option, shell, environment=environment)
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert "_STREAMER_COMPLETE=complete_" in says("--show-completion")
    assert "completion installed" in says("--install-completion")
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any("_STREAMER_COMPLETE" in file.read_text() for file in files)
