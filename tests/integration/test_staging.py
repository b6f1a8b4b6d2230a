"""Staging tables live as long as the session, and are empty for each use."""

from collections.abc import AsyncIterator

import pytest

from streamer.apply.sql.ordered_statements import Statements
from streamer.apply.write.target_transaction import DELETED_ROWS_MAX, TargetTransaction
from streamer.observability.metrics import Metrics
from streamer.postgres.secret import Secret
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database
from tests.unit.build import apply_plan


@pytest.fixture
async def transaction(target: Database) -> AsyncIterator[TargetTransaction]:
    target.execute("create table t (id text)")
    address = TargetAddress.parse(Secret(target.url))
    made = TargetTransaction(address, "streamer staging", Metrics(), lock_seconds=1)
    await made.connect([])
    yield made
    await made.close()


STATEMENTS = Statements(apply_plan(["id"], ["id"]))
FILL = f"insert into pg_temp.{STATEMENTS.stage} (seq) select generate_series(1, {{}})"


async def staged(transaction: TargetTransaction) -> tuple[int, int]:
    """Return the staged rows, and the bytes of live and dead rows."""
    rows = await transaction.target.fetch(
        f"select count(*) as number, pg_relation_size('pg_temp.{STATEMENTS.stage}') as size"
        f" from pg_temp.{STATEMENTS.stage}"
    )
    return rows[0]["number"], rows[0]["size"]


async def use(transaction: TargetTransaction, count: int | None, rows: int = 3) -> None:
    """Stage *rows* as the only rows."""
    transaction.stage(STATEMENTS, count)
    await transaction.target.execute(FILL.format(rows))
    assert (await staged(transaction))[0] == rows


async def test_a_staging_table_has_no_row_of_an_earlier_use(transaction: TargetTransaction) -> None:
    for _ in range(3):
        await transaction.begin()
        await use(transaction, 3)
        await use(transaction, 2, 2)
        await transaction.commit({})
    # A rollback restores the rows that the transaction had removed.
    await transaction.begin()
    await use(transaction, 1, 1)
    await transaction.rollback()
    assert (await staged(transaction))[0] == 2
    await transaction.begin()
    await transaction.savepoint()
    await use(transaction, 3)
    await transaction.rollback_to_savepoint()
    await use(transaction, 3)
    await transaction.commit({})


async def test_a_rollback_runs_no_statement_that_was_still_to_be_sent(
    transaction: TargetTransaction,
) -> None:
    await transaction.begin()
    await use(transaction, 3)
    with pytest.raises(Exception, match="division by zero"):
        await transaction.target.execute("select 1 / 0")
    transaction.stage(STATEMENTS, 3)
    await transaction.rollback()
    assert await transaction.target.fetch_value("select 1") == 1
    await transaction.begin()
    await use(transaction, 3)
    await transaction.commit({})


@pytest.mark.parametrize("count", [None, DELETED_ROWS_MAX + 1])
async def test_a_commit_frees_the_space_of_many_or_large_rows(
    transaction: TargetTransaction, count: int | None
) -> None:
    await transaction.begin()
    await use(transaction, count)
    await transaction.commit({})
    assert await staged(transaction) == (0, 0)


async def test_dead_rows_of_small_uses_are_removed_in_the_end(
    transaction: TargetTransaction,
) -> None:
    sizes = []
    for _ in range(5):
        await transaction.begin()
        await use(transaction, DELETED_ROWS_MAX // 2, DELETED_ROWS_MAX // 2)
        await transaction.commit({})
        sizes.append((await staged(transaction))[1])
    assert 0 in sizes
