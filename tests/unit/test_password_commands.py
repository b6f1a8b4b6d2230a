"""Commands that print passwords delay their own logins, and no further connection."""

import asyncio
import os
import shlex
import sys
import time
from pathlib import Path

import pytest

from streamer.postgres import secret_command
from streamer.postgres.credentials import (
    ConnectionUrl,
    awaited_password,
    current_password,
    forget_password,
    job_url,
    passwords_renewed,
)
from streamer.postgres.password_source import (
    COMMAND_VARIABLE,
    PasswordSource,
    PasswordUnavailableError,
    open_job_url,
)
from tests.support.waiting import until

COUNT = "echo run >> {path}; echo password-$(wc -l < {path})"


def by_shell(script: str, name: str, seconds: float = 600) -> ConnectionUrl:
    """Return a url of the login *name*, with the output of a shell script as its password."""
    command = shlex.join(["sh", "-c", script])
    return ConnectionUrl(
        f"postgresql://{name}@db/x", PasswordSource(command=command, seconds=seconds)
    )


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A pipe: scripts that read the pipe hang until a writer comes."""
    os.mkfifo(path := tmp_path / "gate")
    return path


def open_gate(gate: Path) -> None:
    """Let the script that reads *gate* go on."""
    gate.write_text("password\n")


async def test_files_and_the_target_wait_for_no_command(tmp_path: Path, gate: Path) -> None:
    waiting = [
        asyncio.create_task(current_password(by_shell(f"cat {gate}", f"hangs{number}")))
        for number in range(40)
    ]
    (path := tmp_path / "password").write_text("from a file")
    in_file = ConnectionUrl("postgresql://me@db/in_file", PasswordSource(file=str(path)))
    target = by_shell("echo from a command", "target")
    try:
        async with asyncio.timeout(secret_command.COMMAND_SECONDS / 2):
            assert await current_password(in_file) == "from a file"
            assert await current_password(target, goes_first=True) == "from a command"
        states = {awaited_password(by_shell(f"cat {gate}", f"hangs{n}")) for n in range(40)}
        assert states == {
            "the output of its password_command",
            "its turn to run password_command, after the commands of other connections",
        }
    finally:
        for task in waiting:
            task.cancel()


async def test_commands_that_hang_keep_others_waiting_once(
    gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secret_command, "COMMAND_SECONDS", 10.0)
    monkeypatch.setattr("streamer.postgres.password_source.COMMAND_SECONDS", 0.0)  # all are slow
    urls = [by_shell(f"read -r line < {gate}; exit 1", f"slow{number}") for number in range(10)]
    for url in urls:  # these scripts hang
        task = asyncio.create_task(current_password(url))
        await until(lambda url=url: awaited_password(url) is not None, "it runs")  # type: ignore[misc]
        open_gate(gate)
        with pytest.raises(PasswordUnavailableError):
            await task
    again = [asyncio.create_task(current_password(url)) for url in urls]
    try:
        async with asyncio.timeout(5):
            assert await current_password(by_shell("echo quick", "quick")) == "quick"
    finally:
        for task in again:
            task.cancel()


async def test_connections_of_one_login_await_one_command(tmp_path: Path, gate: Path) -> None:
    count = tmp_path / "count"
    url = by_shell(f"echo run >> {count}; read -r line < {gate}; echo $line", "many")
    waiting = [asyncio.create_task(current_password(url)) for _ in range(20)]
    await until(count.exists, "the command runs")
    waiting[0].cancel()
    open_gate(gate)
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert found[1:] == ["password"] * 19
    assert count.read_text() == "run\n"
    assert awaited_password(url) is None


async def test_connections_of_one_login_share_the_failure(tmp_path: Path) -> None:
    count = tmp_path / "count"
    url = by_shell(f"echo run >> {count}; exit 3", "fails")
    found = await asyncio.gather(*(current_password(url) for _ in range(9)), return_exceptions=True)
    assert {str(each) for each in found} == {"password_command: it ended with exit status 3"}
    assert count.read_text() == "run\n"


def alive(group: int) -> bool:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if pgrp == str(group) and state != "Z":
            return True
    return False


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        ("echo password", "password"),
        ("yes | head -c 1000000", "password_command: expected one line with the password"),
        ("exec sleep 300", "password_command: streamer ended it after 1 s"),
    ],
)
async def test_the_processes_of_a_command_end_with_it(
    end: str, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secret_command, "COMMAND_SECONDS", 1.0)
    pid = tmp_path / "pid"
    url = by_shell(f"echo $$ > {pid}; sleep 300 & {end}", "group")
    began = time.monotonic()
    (found,) = await asyncio.gather(current_password(url), return_exceptions=True)
    assert str(found) == outcome
    assert time.monotonic() - began < 60
    group = int(pid.read_text())
    await until(lambda: not alive(group), "the group has ended")


async def test_an_endless_output_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_command, "COMMAND_SECONDS", 60.0)
    began = time.monotonic()
    with pytest.raises(PasswordUnavailableError, match="expected one line"):
        await current_password(by_shell("exec yes", "endless"))
    assert time.monotonic() - began < 30, "long before its time is over"


def test_the_end_of_the_loop_ends_a_command(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    async def give_up() -> None:
        url = by_shell(f"echo $$ > {pid}; exec sleep 300", "abandoned")
        task = asyncio.create_task(current_password(url))
        await until(lambda: pid.exists() and bool(pid.read_text()), "the command runs")
        task.cancel()

    began = time.monotonic()
    asyncio.run(give_up())
    assert time.monotonic() - began < secret_command.COMMAND_SECONDS
    assert not alive(int(pid.read_text()))


async def test_tasks_of_a_job_have_the_output_that_is_current(tmp_path: Path) -> None:
    url = by_shell(COUNT.format(path=tmp_path / "count"), "job", seconds=0.05)
    text = await job_url(url)
    async with passwords_renewed(url):
        await until(lambda: "password-3" in open_job_url(text), "the command runs again")
    assert forget_password(url)


async def test_a_worker_of_a_cluster_has_a_command_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = by_shell("echo from-streamer", "cluster")
    text = (await job_url(url)).replace("streamer-passwords-", "missing-")
    assert "password=from-streamer" in open_job_url(text)
    monkeypatch.setenv(COMMAND_VARIABLE, shlex.join([sys.executable, "-c", "print('own')"]))
    assert "password=own" in open_job_url(text)
