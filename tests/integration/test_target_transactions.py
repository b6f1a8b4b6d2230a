"""Transactions at the target that contain source transactions, and transactions in a message."""

import pytest

from streamer.errors.error_classes import ConflictError, TargetConnectionError, TargetError
from streamer.postgres.secret import Secret
from streamer.target.connection import (
    TargetAddress,
    TargetConnection,
    copy_sql,
    target_connection,
    transaction,
)
from tests.support.postgres import Database


async def fail(connection: TargetConnection) -> None:
    async with transaction(connection):
        await connection.execute("insert into public.t values ('undone')")
        await connection.execute("insert into nowhere values (1)")


async def test_a_transaction_in_another_one_commits_or_rolls_back_with_it(
    target: Database,
) -> None:
    target.execute("create table t (v text)")
    address = TargetAddress.parse(Secret(target.url))
    async with target_connection(address) as connection:
        connection.begin("begin")  # not sent yet
        async with transaction(connection):
            await connection.execute("insert into public.t values ('kept')")
        with pytest.raises(TargetError):
            await fail(connection)
        assert target.execute("select v from t") == []
        await connection.commit()
        assert target.execute("select v from t") == [("kept",)]

        await connection.execute("begin")
        async with transaction(connection):
            await connection.execute("insert into public.t values ('undone')")
        await connection.rollback()
        assert target.execute("select v from t") == [("kept",)]


async def test_a_transaction_in_one_message_is_committed_or_changes_nothing(
    target: Database,
) -> None:
    target.execute("create table t (id int primary key); insert into t values (9)")
    copy = copy_sql("t", ["id"], namespace="public")
    async with target_connection(TargetAddress.parse(Secret(target.url))) as connection:

        async def commit(*copies: bytes, last: str = "") -> None:
            connection.begin("begin")
            for rows in copies:
                connection.copy_before_commit(copy, [rows])
            try:
                await connection.send_commit(last)()
            except TargetError:
                await connection.rollback()
                raise

        await commit(b"1\n", b"2\n3\n")
        assert target.execute("select id from t order by 1") == [(1,), (2,), (3,), (9,)]
        assert not connection.is_in_transaction
        # After a failed statement, the server ignores the rows of the second COPY.
        with pytest.raises(ConflictError, match=r"Key \(id\)=\(9\) already exists"):
            await commit(b"4\n9\n", b"5\n")
        with pytest.raises(TargetError, match="division by zero"):
            await commit(b"4\n", last="select 1 / 0")
        assert await connection.fetch_value("select count(*) from public.t") == 4
        await commit(b"4\n", last="do $$ begin raise notice 'a notice'; end $$")
        assert await connection.fetch_value("select count(*) from public.t") == 5


async def test_a_connection_that_is_lost_before_the_answer_leaves_the_outcome_open(
    target: Database,
) -> None:
    target.execute("create table t (id int primary key)")
    async with target_connection(TargetAddress.parse(Secret(target.url))) as connection:
        connection.begin("begin")
        connection.copy_before_commit(copy_sql("t", ["id"], namespace="public"), [b"1\n"])
        with pytest.raises(TargetConnectionError):
            await connection.send_commit("select pg_terminate_backend(pg_backend_pid())")()
        assert connection.is_closed
        with pytest.raises(TargetConnectionError):
            await connection.send_commit()()
    assert target.execute("select * from t") == []
