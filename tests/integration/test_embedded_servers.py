"""Servers that a test runs, and their answers."""

from pathlib import Path

import pytest

from streamer.commands.demo.embedded_servers import ServerError
from tests.support.postgres import Database, running, versions


def test_servers_of_one_name_follow_one_another(server_directory: Path) -> None:
    place = server_directory / "again"
    numbers = set()
    for _ in range(2):
        with running(place, versions()["18"]) as server:
            assert server.directory.name.startswith("again-")
            numbers |= set(server.execute("select system_identifier from pg_control_system()"))
        assert not list(server_directory.glob("again*"))
    assert len(numbers) == 2


def test_a_server_that_does_not_start_is_an_ordinary_failure(server_directory: Path) -> None:
    settings = {"max_connections": "many"}
    with (
        pytest.raises(ServerError, match='invalid value for parameter "max_connections": "many"'),
        running(server_directory / "unable", versions()["18"], settings),
    ):
        pass
    assert not list(server_directory.glob("unable*"))


def test_rows_without_columns_are_rows(source: Database) -> None:
    assert source.execute("select from generate_series(1, 2)") == [(), ()]
    assert source.execute("select from generate_series(1, 0)") == []
    assert source.execute("create table t ()") == []
