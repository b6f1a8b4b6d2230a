"""Transactions at the target that contain others."""

import pytest

from streamer.errors.error_classes import TargetError
from streamer.postgres.secret import Secret
from streamer.target.connection import (
    TargetAddress,
    TargetConnection,
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
