"""SQLSTATE 53400 and 53200 stand for several limits, and the advice is about the exceeded limit."""

import asyncpg
import psycopg
import pytest

from streamer.source.connection import translate as translate_source
from streamer.target.driver_errors import translate as translate_target
from tests.support.postgres import Database

SORT = "select count(*) from (select g from generate_series(1, 500000) g order by -g) s"
SLOTS = (
    "select pg_create_physical_replication_slot('limit_' || g, false, true)"
    " from generate_series(1, 10000) g"
)

LOCKS = "select pg_advisory_xact_lock(g) from generate_series(1, 1000000) g"
"""A publication locks each of its tables in the same way."""


def test_a_source_out_of_locks(source: Database) -> None:
    with source.connect() as session, pytest.raises(psycopg.Error) as caught:
        session.execute(LOCKS.encode())
    error = translate_source(caught.value, "shop")
    assert error.code == "source_settings"
    assert error.hint is not None
    assert "raise max_locks_per_transaction" in error.hint


def test_a_source_out_of_slots(source: Database) -> None:
    with source.connect() as session, pytest.raises(psycopg.Error) as caught:
        session.execute(SLOTS.encode())
    error = translate_source(caught.value, "shop")
    assert error.hint == "raise max_replication_slots on that server, and restart it"


def test_a_source_with_a_limit_of_temporary_files(source: Database) -> None:
    with source.connect() as session:
        session.execute("set temp_file_limit = 64; set work_mem = 64")
        with pytest.raises(psycopg.Error) as caught:
            session.execute(SORT.encode())
    error = translate_source(caught.value, "shop")
    assert error.code == "source_settings"
    assert error.hint is not None
    assert "raise temp_file_limit" in error.hint
    assert "slots" not in error.hint


async def test_a_target_with_a_limit_of_temporary_files(target: Database) -> None:
    connection = await asyncpg.connect(target.url)
    try:
        await connection.execute("set temp_file_limit = 64; set work_mem = 64")
        with pytest.raises(asyncpg.PostgresError) as caught:
            await connection.fetchval(SORT)
    finally:
        await connection.close()
    error = translate_target(caught.value)
    assert error.hint is not None
    assert "raise temp_file_limit" in error.hint
