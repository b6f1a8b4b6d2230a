"""The classification of SQLSTATEs, for all callers: the stream, a copy, quarantine, the source."""

import errno

import asyncpg
import psycopg
import pytest

from streamer.copy.parts import part_copier
from streamer.errors.error_classes import Retry, TargetContentionError
from streamer.postgres import sqlstate
from streamer.source import connection
from streamer.target import driver_errors as target

TRANSIENT = ["08006", "25006", "40001", "40P01", "53100", "53300", "55006", "55P03"]
TRANSIENT += ["57014", "57P01", "58030"]
FINAL = ["0A000", "22003", "22P02", "23505", "23514", "28P01", "3D000", "42501", "42703", "42P01"]
# The source gives some codes a different class: a missing slot, a limit with its own setting.
FINAL += ["P0001", "P0002", "XX000"]


@pytest.mark.parametrize("state", TRANSIENT + FINAL)
def test_all_callers_agree_whether_to_try_again(state: str) -> None:
    at_target = asyncpg.PostgresError("no")
    at_target.sqlstate = state
    by_libpq = psycopg.errors.lookup(state)("no")
    is_transient = state in TRANSIENT
    assert sqlstate.is_transient(state) is is_transient
    assert (target.translate(at_target).retry is Retry.TIMED) is is_transient
    assert part_copier._is_transient(by_libpq) is is_transient
    assert (connection.translate(by_libpq, "shop").retry is Retry.TIMED) is is_transient
    if is_transient:
        assert not sqlstate.is_row_specific(state)


@pytest.mark.parametrize(
    ("message", "is_race"),
    [
        ('could not map filenumber "base/16575/24788" to relation OID', True),
        ('could not map filenode "base/16575/24788" to relation OID', True),
        ("cache lookup failed for relation 16575", True),
        ("could not open relation with OID 16575", True),
        ("tuple concurrently updated", True),
        ("missing chunk number 0 for toast value 16575 in pg_toast_2619", False),
        ("invalid memory alloc request size 1200000003", False),
        ("the tuple concurrently updated by a trigger was odd", False),
    ],
)
def test_an_internal_error_is_tried_again_where_a_change_of_definitions_explains_it(
    message: str, is_race: bool
) -> None:
    at_target = asyncpg.PostgresError(message)
    at_target.sqlstate = "XX000"
    by_libpq = psycopg.errors.lookup("XX000")(message)
    at_source = connection.translate(by_libpq, "shop")
    assert (target.translate(at_target).retry is Retry.TIMED) is is_race
    assert (at_source.retry is Retry.TIMED) is is_race
    assert part_copier._is_transient(by_libpq) is is_race
    assert message in str(at_source)


def test_a_target_that_is_read_only_for_a_while_is_waited_for() -> None:
    error = asyncpg.ReadOnlySQLTransactionError("cannot execute INSERT in a read-only transaction")
    assert isinstance(target.translate(error), TargetContentionError)
    assert part_copier._is_transient(psycopg.errors.lookup("25006")("no"))


def test_a_protocol_violation_that_leaves_the_connection_is_about_a_value() -> None:
    assert sqlstate.meaning("08P01", "ERROR") is sqlstate.Meaning.VALUE
    assert sqlstate.meaning("08P01", "FATAL") is sqlstate.Meaning.LOST


@pytest.mark.parametrize("address", ["('127.0.0.1', 1)", "('127.0.0.1', 1, 0, 0)"])
def test_a_refused_connection_reads_as_those_of_libpq(address: str) -> None:
    refused = ConnectionRefusedError(errno.ECONNREFUSED, f"Connect call failed {address}")
    assert str(target.translate(refused)) == (
        'target: connection to server at "127.0.0.1", port 1 failed: Connection refused'
    )


def test_an_ended_session_does_not_advise_to_start_a_server_that_runs() -> None:
    """The supervisor adds the advice about an unreachable server only to an error without a hint."""
    error = psycopg.errors.AdminShutdown("terminating connection due to administrator command")
    translated = connection.translate(error, "shop")
    assert translated.hint is not None
    assert "an operator ended the session" in translated.hint
