"""The server answers COMMIT of a failed transaction without an error, and rolls back."""

import contextlib

import pytest

from streamer.errors.error_classes import StreamerError, TargetError
from streamer.postgres.secret import Secret
from streamer.target.connection import TargetAddress, target_connection, transaction
from tests.support.postgres import Database


async def test_a_commit_that_rolled_back_is_an_error(target: Database) -> None:
    async with target_connection(TargetAddress.parse(Secret(target.url))) as connection:
        await connection.execute("begin")
        with contextlib.suppress(StreamerError):
            await connection.execute("select 1 / 0")
        with pytest.raises(TargetError, match='answer to COMMIT was "ROLLBACK"'):
            await connection.commit()
        async with transaction(connection):
            await connection.execute("select 1")
