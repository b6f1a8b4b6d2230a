"""streamer names a pooler in transaction mode, at either side; a pooler in session mode does no
harm.
"""

import asyncpg
import pytest
from psycopg.conninfo import conninfo_to_dict

from streamer.errors.error_classes import SourceRejectedError, TargetRejectedError
from streamer.postgres.connect_failures import POOLER_HINT, connect_hint
from streamer.postgres.pooler import POOLED
from streamer.postgres.secret import Secret
from streamer.source.connection import connect
from streamer.target.connection import TargetAddress, TargetConnection
from streamer.target.driver_errors import translate
from tests.support.pooler import pooler
from tests.support.postgres import Database
from tests.unit.build import source_mapping


def place(database: Database) -> tuple[str, int]:
    parameters = conninfo_to_dict(database.url)
    return str(parameters["host"]), int(parameters["port"] or 0)


def through(database: Database, port: int) -> Secret:
    _, own = place(database)
    return Secret(database.url.replace(f":{own}/", f":{port}/"))


@pytest.mark.parametrize("side", ["source", "target"])
async def test_transaction_mode_is_refused(source: Database, target: Database, side: str) -> None:
    database = source if side == "source" else target
    async with pooler(*place(database)) as port:
        url = through(database, port)
        if side == "target":
            with pytest.raises(TargetRejectedError, match=POOLED) as caught:
                await TargetConnection.connect(TargetAddress.parse(url), "streamer")
            assert "pool_mode = session" in str(caught.value.hint)
        else:
            with pytest.raises(SourceRejectedError, match=POOLED) as refused:
                await connect(source_mapping(url=url))
            assert "pool_mode = session" in str(refused.value.hint)


async def test_session_mode_is_not(source: Database, target: Database) -> None:
    async with pooler(*place(source), per_client=True) as port:
        at_source = await connect(source_mapping(url=through(source, port)))
        await at_source.close()
    async with pooler(*place(target), per_client=True) as port:
        address = TargetAddress.parse(through(target, port))
        at_target = await TargetConnection.connect(address, "streamer")
        assert await at_target.fetch_value("select 1") == 1
        await at_target.close()


def test_a_statement_of_another_client_names_the_pooler() -> None:
    """The first error of a pooler may come before the query for the mode."""
    error = asyncpg.DuplicatePreparedStatementError(
        'prepared statement "__asyncpg_stmt_1__" already exists'
    )
    assert translate(error).message == f"target: {POOLED}"


def test_a_refused_connection_for_replication_names_the_pooler() -> None:
    text = (
        'connection to server at "127.0.0.1", port 6432 failed: FATAL:  unsupported startup '
        "parameter: replication"
    )
    assert connect_hint(text) == POOLER_HINT
