"""Passwords from files and commands."""

import shlex
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pydantic import ValidationError

from streamer.config.settings import UrlSettings
from streamer.postgres.conninfo import parse_conninfo
from streamer.postgres.credentials import (
    ConnectionUrl,
    current_password,
    forget_password,
    is_same_login,
    job_url,
    password_generation,
    renew_password,
    replace_password,
)
from streamer.postgres.password_source import (
    PasswordSource,
    PasswordUnavailableError,
    open_job_url,
    read_password_of,
)
from streamer.postgres.secret import Secret


def read_password(url: ConnectionUrl) -> str:
    return read_password_of(url.reveal(), url.password_source)


def in_file(path: Path) -> ConnectionUrl:
    return ConnectionUrl(f"postgresql://me@db/{path.name}", PasswordSource(file=str(path)))


def by_command(path: Path, seconds: float = 600) -> ConnectionUrl:
    """Return a url whose command counts its runs in *path*, and prints user and count."""
    program = (
        "import os, pathlib, sys; p = pathlib.Path(sys.argv[1]); "
        "n = int(p.read_text() if p.exists() else 0) + 1; p.write_text(str(n)); "
        "print(os.environ['PGUSER'], n, sep='-')"
    )
    command = shlex.join([sys.executable, "-c", program, str(path)])
    return ConnectionUrl("postgresql://me@db/x", PasswordSource(command=command, seconds=seconds))


def test_a_file_is_read_for_each_connection(tmp_path: Path) -> None:
    url = in_file(path := tmp_path / "password")
    path.write_text("one\n")
    assert read_password(url) == "one"
    path.write_text("it's two")
    assert read_password(url) == "it's two"


@pytest.mark.parametrize("content", ["", "\n", "a\nb\n", "a\0b", "x" * 70_000])
def test_a_file_that_is_no_password_is_refused(content: str, tmp_path: Path) -> None:
    (path := tmp_path / "password").write_text(content)
    with pytest.raises(PasswordUnavailableError, match=r"password: expected one line"):
        read_password(in_file(path))


def test_a_command_runs_once_in_its_lifetime(tmp_path: Path) -> None:
    url = by_command(tmp_path / "count")
    assert [read_password(url), read_password(url)] == ["me-1", "me-1"]
    assert forget_password(url)
    assert read_password(url) == "me-2"
    short = by_command(tmp_path / "count", seconds=1e-9)
    assert [read_password(short), read_password(short)] == ["me-3", "me-4"]


def test_the_output_of_a_failed_command_is_not_shown() -> None:
    command = shlex.join([sys.executable, "-c", "print('secret'); import sys; sys.exit('secret')"])
    url = ConnectionUrl("host=db", PasswordSource(command=command, seconds=1))
    with pytest.raises(PasswordUnavailableError) as caught:
        read_password(url)
    assert str(caught.value) == "password_command: it ended with exit status 1"


async def test_only_a_changed_password_outdates_connections(tmp_path: Path) -> None:
    url = in_file(path := tmp_path / "password")
    path.write_text("one")
    assert not await renew_password(url)
    read_password(url)
    assert not await renew_password(url)
    before = password_generation(url)
    path.write_text("two")
    assert await renew_password(url)
    assert password_generation(url) == before + 1
    path.write_text("three")
    assert read_password(url) == "three"  # a connection is the first reader
    assert await renew_password(url)
    assert not await renew_password(url)
    assert password_generation(url) == before + 2


async def test_a_new_password_in_the_url_is_taken_over() -> None:
    before = Secret("postgresql://u:one@replaced/x")
    now = Secret("postgresql://u:two@replaced/x")
    assert is_same_login(before, now)
    replace_password(before, now)
    assert (await current_password(before), password_generation(before)) == ("two", 1)
    replace_password(before, now)
    assert password_generation(before) == 1
    replace_password(before, before)
    assert (await current_password(before), password_generation(before)) == ("one", 2)
    assert not is_same_login(before, Secret("postgresql://u:one@elsewhere/x"))


async def test_a_task_of_a_job_reads_the_password_that_is_current_then(tmp_path: Path) -> None:
    url = in_file(path := tmp_path / "password")

    def opened(text: str) -> Any:
        return psycopg.conninfo.conninfo_to_dict(open_job_url(text))

    path.write_text("one")
    text = await job_url(url, {"PGPASSWORD": "other"})
    assert opened(text) == {"user": "me", "host": "db", "dbname": "password", "password": "one"}
    path.write_text("two")
    assert opened(text)["password"] == "two"
    path.unlink()  # as on a worker that lacks the file
    assert opened(text)["password"] == "one"
    plain = await job_url(Secret("postgresql://u@plain/x"), {"PGPASSWORD": "env"})
    assert opened(plain)["password"] == "env"


def test_the_settings_join_url_and_password() -> None:
    found = UrlSettings(url="host=db", password_command=["get", "a b"])  # type: ignore[arg-type]
    assert found.url == ConnectionUrl("host=db", PasswordSource(None, "get 'a b'", 600))
    assert found.url != Secret("host=db")
    for wrong in (
        {"url": "postgresql://u:p@db/x", "password_file": "f"},
        {"url": "host=db", "password_file": "f", "password_command": "c"},
        {"url": "host=db", "password_command": "'"},
    ):
        with pytest.raises(ValidationError):
            UrlSettings(**wrong)  # type: ignore[arg-type]


def test_a_caller_may_change_the_parameters_that_it_gets() -> None:
    url = "postgresql://alice:secret@db/shop"
    assert parse_conninfo(url).pop("password") == "secret"
    assert parse_conninfo(url)["password"] == "secret"
