"""A server that answers and refuses a session: class and remedy at both sides, by each cause."""

from unittest.mock import AsyncMock

import asyncpg
import psycopg
import pytest

from streamer.errors.connection_limits import (
    SourceConnectionLimitError,
    TargetConnectionLimitError,
)
from streamer.errors.error_classes import (
    SourceConnectionError,
    SourceRejectedError,
    StreamerError,
    TargetConnectionError,
    TargetPasswordError,
    TargetRejectedError,
)
from streamer.errors.error_reports import ErrorReport
from streamer.errors.remedies import Remedy
from streamer.postgres.connect_failures import refusal_remedy
from streamer.postgres.secret import Secret
from streamer.postgres.session_refusals import SessionLogin, find_refusal
from streamer.runtime.target_health import (
    TargetHealth,
    TargetMonitor,
    TargetState,
    refusal_of,
)
from streamer.source.connection import connect
from streamer.target.connection import TargetAddress, TargetConnection
from streamer.target.session_waits import SessionWaits
from tests.unit.build import source_mapping

URL = Secret("postgresql://loader@db/dw")
AT = 'connection to server at "10.0.0.1", port 5432 failed: FATAL:  '
LOGIN = (SourceRejectedError, TargetRejectedError)
LIMIT = (SourceConnectionLimitError, TargetConnectionLimitError)
STATE = (SourceConnectionError, TargetConnectionError)
Kinds = tuple[type[StreamerError], type[StreamerError]]

CAUSES: list[tuple[str, str, Kinds, str]] = [
    ("28P01", 'password authentication failed for user "loader"', LOGIN, "has its password"),
    ("28000", 'role "loader" does not exist', LOGIN, 'create role "loader" login'),
    ("28000", 'role "loader" is not permitted to log in', LOGIN, 'alter role "loader" login'),
    (
        "28000",
        'no pg_hba.conf entry for host "10.0.0.2", user "loader", database "dw", no encryption',
        LOGIN,
        "select pg_catalog.pg_reload_conf()",
    ),
    (
        "28000",
        'pg_hba.conf rejects connection for host "10.0.0.2", user "loader", database "dw"',
        LOGIN,
        "before any line that rejects the connection",
    ),
    ("28000", 'Peer authentication failed for user "loader"', LOGIN, "the authentication method"),
    ("3D000", 'database "dw" does not exist', LOGIN, 'create database "dw"'),
    (
        "42501",
        'permission denied for database "dw"',
        LOGIN,
        'grant connect on database "dw" to "loader"',
    ),
    ("42501", "permission denied to start WAL sender", LOGIN, 'alter role "loader" replication'),
    (
        "55000",
        'database "dw" is not currently accepting connections',
        LOGIN,
        'alter database "dw" allow_connections true',
    ),
    (
        "58P01",
        'could not access file "$libdir/plugins/audit": No such file or directory',
        LOGIN,
        "remove the library from session_preload_libraries and local_preload_libraries",
    ),
    (
        "53300",
        'too many connections for role "loader"',
        LIMIT,
        'alter role "loader" connection limit -1',
    ),
    (
        "53300",
        'too many connections for database "dw"',
        LIMIT,
        'alter database "dw" connection limit -1',
    ),
    ("53300", "sorry, too many clients already", LIMIT, "raise max_connections"),
    (
        "53300",
        "remaining connection slots are reserved for roles with the SUPERUSER attribute",
        LIMIT,
        "raise max_connections",
    ),
    (
        "53300",
        'number of requested standby connections exceeds "max_wal_senders" (currently 10)',
        LIMIT,
        "raise max_wal_senders",
    ),
    ("57P03", "the database system is starting up", STATE, "wait until the {side} has started"),
    ("57P03", "the database system is not yet accepting connections", STATE, "has started"),
    ("57P03", "the database system is in recovery mode", STATE, "has recovered from a crash"),
    ("57P03", "the database system is shutting down", STATE, "once the shutdown has ended"),
    ("57P03", "the database system is not accepting connections", STATE, "hot_standby = on"),
]


async def error_at_source(text: str, monkeypatch: pytest.MonkeyPatch) -> StreamerError:
    async def refuse(*_: object, **__: object) -> None:
        raise psycopg.OperationalError(text)

    monkeypatch.setattr(psycopg.AsyncConnection, "connect", refuse)
    with pytest.raises(StreamerError) as raised:
        await connect(source_mapping(url=URL))
    return raised.value


async def error_at_target(state: str, text: str, monkeypatch: pytest.MonkeyPatch) -> StreamerError:
    async def refuse(*_: object, **__: object) -> None:
        raise asyncpg.PostgresError.new({"S": "FATAL", "V": "FATAL", "C": state, "M": text})

    monkeypatch.setattr(asyncpg, "connect", refuse)
    with pytest.raises(StreamerError) as raised:
        await TargetConnection.connect(TargetAddress.parse(URL, "up to 52 connections"), "test")
    return raised.value


@pytest.mark.parametrize(("state", "text", "kinds", "words"), CAUSES)
async def test_a_cause_has_the_same_remedy_at_both_sides(
    state: str, text: str, kinds: Kinds, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_source = await error_at_source(AT + text, monkeypatch)
    at_target = await error_at_target(state, text, monkeypatch)
    assert (type(at_source), type(at_target)) == kinds
    for error, side in ((at_source, "source"), (at_target, "target")):
        assert text in error.message
        assert error.remedy is not None
        assert words.format(side=side) in str(error.remedy)
        assert [sql.side for sql in error.remedy.sql] in ([], [side])
        assert "pg_isready" not in str(error)
    statements = [
        [sql.statements for sql in e.remedy.sql] for e in (at_source, at_target) if e.remedy
    ]
    assert statements[0] == statements[1]

    # A limit names the connections that streamer needs.
    assert ("streamer needs up to 52 connections" in str(at_target)) is (kinds == LIMIT)
    assert ("streamer needs 4 connections for each source" in str(at_source)) is (kinds == LIMIT)
    # A target that refuses sessions is not unreachable.
    health = TargetHealth()
    health.record_error(at_target, TargetAddress.parse(URL))
    assert health.state is (TargetState.UNREACHABLE if kinds == STATE else TargetState.REFUSED)
    assert health.remedy == at_target.remedy


@pytest.mark.parametrize("state", ["28000", "28P01", "3D000", "53300", "57P03"])
async def test_a_message_in_a_foreign_language_has_the_remedy_of_its_sqlstate(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = await error_at_target(state, "zu viele Verbindungen", monkeypatch)
    assert error.remedy is not None
    assert not error.remedy.steps


async def test_only_a_wrong_password_blames_the_file_of_the_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamer.target.connection.has_password_source", lambda _: True)
    error = await error_at_target("28000", 'role "loader" does not exist', monkeypatch)
    assert type(error) is TargetRejectedError
    error = await error_at_target("28P01", "password authentication failed", monkeypatch)
    assert type(error) is TargetPasswordError


@pytest.mark.parametrize(("name", "other"), [("dw", "postgres"), ("postgres", "template1")])
def test_a_statement_runs_in_a_database_other_than_the_one_that_refuses(
    name: str, other: str
) -> None:
    text = f'database "{name}" is not currently accepting connections'
    refusal = find_refusal(text)
    assert refusal is not None
    remedy = refusal.remedy(text, SessionLogin("target", URL, "the url"))
    assert f"at the target, in database {other}: " in str(remedy)
    (sql,) = remedy.sql
    assert sql.database == other
    # The bookkeeping and the API keep the database.
    read = Remedy.from_json(remedy.to_json())
    assert read is not None
    assert read.sql == remedy.sql


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (
            'no pg_hba.conf entry for host "10.0.0.2", user "loader", database "dw", no encryption',
            'host "dw" "loader" 10.0.0.2/32 scram-sha-256',
        ),
        (
            'pg_hba.conf rejects connection for host "::1", user "a b", database "d", SSL on',
            'hostssl "d" "a b" ::1/128 scram-sha-256',
        ),
        (
            'no pg_hba.conf entry for host "[local]", user "loader", database "dw", SSL off',
            'local "dw" "loader" scram-sha-256',
        ),
        (
            'no pg_hba.conf entry for replication connection from host "::2", user "u", SSL off',
            'host replication "u" ::2/128 scram-sha-256',
        ),
    ],
)
def test_a_refusal_by_pg_hba_has_the_line_that_accepts_the_session(message: str, line: str) -> None:
    refusal = find_refusal(message)
    assert refusal is not None
    remedy = refusal.remedy(message, SessionLogin("source", URL, "the url"))
    assert f"put the line `{line}` into pg_hba.conf of the source" in str(remedy)


async def test_a_target_that_refuses_new_sessions_is_refused_although_an_old_one_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = 'too many connections for role "loader"'
    refused = ("waiting", ErrorReport.of(await error_at_target("53300", text, monkeypatch)))
    conditions: list[tuple[str, ErrorReport | None]] = [refused]
    monitor = TargetMonitor(
        TargetAddress.parse(URL), "c", bool, print, print, lambda: refusal_of(conditions)
    )
    monkeypatch.setattr(monitor, "_reach", AsyncMock(return_value=SessionWaits()))
    await monitor._check()
    assert (monitor.health.state, monitor.health.error) == (TargetState.REFUSED, f"target: {text}")

    # WHEN a source streams, THEN the limit concerns only the remaining sources.
    conditions.append(("streaming", None))
    await monitor._check()
    assert monitor.health.is_well
    assert monitor.health.report is None


def test_several_hosts_have_the_remedy_of_each() -> None:
    login = SessionLogin("source", URL, "the url")
    texts = ('role "loader" does not exist', "sorry, too many clients already", "refused")
    listed = "\n".join(f"- host: 'h', port: '1', hostaddr: 'h': {AT}{text}" for text in texts)
    first, second, last = (find_refusal(text) for text in texts)
    assert first is not None
    assert second is not None
    assert last is None
    assert refusal_remedy(f"Multiple connection attempts failed\n{listed}", login) == Remedy.of(
        first.remedy(texts[0], login), "; ", second.remedy(texts[1], login)
    )


def test_the_names_of_a_statement_come_from_the_message_before_the_url() -> None:
    login = SessionLogin("source", URL, "the url")
    text = 'too many connections for role "of a "service"'
    refusal = find_refusal(text)
    assert refusal is not None
    (sql,) = refusal.remedy(text, login).sql
    assert sql.statements == ('alter role "of a ""service" connection limit -1',)
