"""A url with several hosts: which host a connection reaches, and how streamer judges errors."""

from typing import Any

import asyncpg
import psycopg
import pytest

from streamer.errors.error_classes import (
    SettingsError,
    SourceConnectionError,
    SourceRejectedError,
    TargetConnectionError,
    TargetRejectedError,
)
from streamer.postgres.conninfo import hosts_of, parse_conninfo, with_host_first
from streamer.postgres.secret import Secret
from streamer.source.connection import translate
from streamer.target.connection import TargetAddress, TargetConnection

REFUSED = asyncpg.InvalidAuthorizationSpecificationError("no pg_hba.conf entry")
STARTS = asyncpg.CannotConnectNowError("the database system is starting up")
URL = "postgresql://me@old:5432,new:5433/dw?target_session_attrs=read-write&connect_timeout=7"


class Hosts:
    """In place of asyncpg: raises the error of a host that has an error."""

    def __init__(self, errors: dict[str, Exception]) -> None:
        self.errors = errors
        self.tried: list[tuple[str, float]] = []

    async def connect(self, dsn: str, **parameters: Any) -> None:
        host = "new" if "host=new" in dsn else "old"
        assert f"port={5433 if host == 'new' else 5432}" in dsn
        assert "target_session_attrs=read-write" in dsn
        self.tried.append((host, parameters["timeout"]))
        raise self.errors.get(host, REFUSED)


@pytest.mark.parametrize("first", [TimeoutError(), ConnectionRefusedError(), STARTS, REFUSED])
async def test_each_host_of_the_target_gets_a_separate_time_limit(
    first: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts({"old": first})
    monkeypatch.setattr(asyncpg, "connect", hosts.connect)
    with pytest.raises((TargetConnectionError, TargetRejectedError)):
        await TargetConnection.connect(TargetAddress.parse(Secret(URL)), "test")
    assert hosts.tried == [("old", 7), ("new", 7)]


async def test_a_target_is_refused_only_where_every_host_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = TargetAddress.parse(Secret(URL))
    monkeypatch.setattr(asyncpg, "connect", Hosts({"old": STARTS}).connect)
    with pytest.raises(TargetConnectionError):
        await TargetConnection.connect(address, "test")
    monkeypatch.setattr(asyncpg, "connect", Hosts({}).connect)
    with pytest.raises(TargetRejectedError):
        await TargetConnection.connect(address, "test")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://a,b/dw?target_session_attrs=prefer-standby",
        "host=a,b,c port=1,2 dbname=dw",
    ],
)
def test_a_target_that_cannot_be_written_to_is_no_setting(url: str) -> None:
    with pytest.raises(SettingsError):
        TargetAddress.parse(Secret(url))


def test_a_source_is_refused_only_where_every_host_refuses() -> None:
    refused = 'connection failed: FATAL:  no pg_hba.conf entry for host "::1"'
    away = 'connection failed: connection to server at "10.0.0.1" failed: Connection refused'
    several = "Multiple connection attempts failed. All failures were:"

    def judged(*errors: str) -> Any:
        listed = "\n".join(f"- host: 'h', port: '1', hostaddr: 'h': {e}" for e in errors)
        return type(translate(psycopg.OperationalError(f"{errors[-1]}\n{several}\n{listed}"), "s"))

    assert judged(away, refused) is SourceConnectionError
    assert judged(refused, refused) is SourceRejectedError
    assert type(translate(psycopg.OperationalError(refused), "s")) is SourceRejectedError


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("postgresql://a:1,b:2/db", [("a", "1"), ("b", "2")]),
        ("host=a,b port=5433", [("a", "5433"), ("b", "5433")]),
        ("postgresql://a,b/db", [("a", ""), ("b", "")]),
        ("postgresql://a/db", []),
    ],
)
def test_the_hosts_of_a_url(url: str, hosts: list[tuple[str, str]]) -> None:
    assert hosts_of(url) == hosts


@pytest.mark.parametrize(
    ("first", "hosts", "ports"),
    [
        (("b", "2"), "b,a,c", "2,1,3"),
        (("a", "1"), "a,b,c", "1,2,3"),
        (("gone", "1"), "a,b,c", "1,2,3"),
    ],
)
def test_a_host_goes_before_the_others_of_its_url(
    first: tuple[str, str], hosts: str, ports: str
) -> None:
    given = parse_conninfo(
        with_host_first("postgresql://me:pw@a:1,b:2,c:3/db?sslmode=prefer", first)
    )
    assert (given["host"], given["port"]) == (hosts, ports)
    assert (given["password"], given["dbname"], given["sslmode"]) == ("pw", "db", "prefer")
