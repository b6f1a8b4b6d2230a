"""The next step after a failed connection attempt, from the words of the drivers."""

import ssl

import asyncpg
import psycopg
import pytest

from streamer.errors.error_classes import (
    SourceConnectionError,
    SourceContentionError,
    SourceRejectedError,
    TargetConnectionError,
)
from streamer.postgres.connect_failures import PRIMARY_HINT, STANDBY_HINT
from streamer.postgres.conninfo import TLS_HINT, probe_command
from streamer.source import connection as source_connection
from streamer.target import driver_errors

AT = 'connection to server at "10.0.0.1", port 5432 failed: '
REFUSED = AT + "Connection refused"
PASSWORD = AT + 'FATAL:  password authentication failed for user "streamer"'
NO_WALSENDER = AT + "FATAL:  permission denied to start WAL sender"
EXPIRED = AT + "SSL error: certificate verify failed"
LOST = AT + "SSL SYSCALL error: EOF detected"
PROMOTED = AT + "server is not in hot standby mode"
STANDBY = AT + "session is read-only"


def several(*texts: str) -> str:
    return "\n".join(f"- host: 'a', port: '5432', hostaddr: '10.0.0.1': {text}" for text in texts)


@pytest.mark.parametrize(
    ("text", "kind", "hint"),
    [
        (REFUSED, SourceConnectionError, None),
        (NO_WALSENDER, SourceRejectedError, None),
        (LOST, SourceConnectionError, None),
        (PASSWORD, SourceRejectedError, None),
        (EXPIRED, SourceConnectionError, TLS_HINT),
        (PROMOTED, SourceConnectionError, PRIMARY_HINT),
        (STANDBY, SourceConnectionError, STANDBY_HINT),
        (several(REFUSED, PASSWORD), SourceConnectionError, None),
        (several(REFUSED, STANDBY), SourceConnectionError, STANDBY_HINT),
        (several(PASSWORD, EXPIRED), SourceConnectionError, TLS_HINT),
        (several(REFUSED, REFUSED), SourceConnectionError, None),
    ],
)
def test_the_hint_for_a_source_is_about_the_hosts_that_answered(
    text: str, kind: type[SourceConnectionError], hint: str | None
) -> None:
    error = source_connection.translate(psycopg.OperationalError(text), "shop")
    assert type(error) is kind
    assert error.hint == hint


@pytest.mark.parametrize(
    ("raised", "hint"),
    [
        (ConnectionRefusedError("refused"), None),
        (ssl.SSLCertVerificationError("certificate verify failed"), TLS_HINT),
        (ssl.SSLEOFError("EOF occurred in violation of protocol"), None),
        (ConnectionError('PostgreSQL server at "a:1" rejected SSL upgrade'), TLS_HINT),
        (
            asyncpg.TargetServerAttributeNotMatched(
                "None of the hosts match the target attribute requirement 'read-write'"
            ),
            STANDBY_HINT,
        ),
    ],
)
def test_the_hint_for_the_target_is_about_the_cause(raised: Exception, hint: str | None) -> None:
    error = driver_errors.translate(raised)
    assert isinstance(error, TargetConnectionError)
    assert error.hint == hint


@pytest.mark.parametrize(
    ("url", "command"),
    [
        ("postgresql://me:secret@db:5433/shop", "pg_isready -h db -p 5433 -d shop"),
        ("postgresql://db/shop", "pg_isready -h db -d shop"),
        ("dbname='my shop'", "pg_isready -d 'my shop'"),
        ("postgresql://", "pg_isready"),
    ],
)
def test_a_probe_takes_missing_parameters_from_the_environment(url: str, command: str) -> None:
    assert probe_command(url) == command


def test_a_server_that_closes_a_connection_has_one_message() -> None:
    for error in (
        ConnectionResetError(104, "Connection reset by peer"),
        BrokenPipeError(32, "Broken pipe"),
        asyncpg.InternalClientError("unexpected connection_lost() call"),
        asyncpg.InterfaceError("connection was closed in the middle of operation"),
    ):
        translated = driver_errors.translate(error)
        assert isinstance(translated, TargetConnectionError)
        assert translated.message == "target: server closed the connection unexpectedly"


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (psycopg.errors.SerializationFailure("initial slot snapshot too large"), "transactions"),
        (psycopg.errors.DeadlockDetected("deadlock detected"), None),
    ],
)
def test_a_source_that_answers_with_a_conflict_is_busy_and_reachable(
    error: psycopg.Error, hint: str | None
) -> None:
    translated = source_connection.translate(error, "shop")
    assert type(translated) is SourceContentionError
    assert (hint is None) == (translated.remedy is None)
    assert hint is None or hint in str(translated.remedy)
