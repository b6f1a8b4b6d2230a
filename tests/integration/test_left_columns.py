"""The bookkeeping of columns that removed tenants leave in a shared target table."""

from collections.abc import AsyncIterator

import pytest

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import migrate
from streamer.bookkeeping.purges import read_remaining_columns
from streamer.bookkeeping.sources import forget_source
from streamer.postgres.secret import Secret
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database

COMES = """
with s as (insert into streamer.source (database, sid, slot, publication)
           values ('shop', '{sid}', '{sid}', 'p') returning id)
insert into streamer.relation (source_id, source, target, type, columns)
select id, 'public.t', 'public.t', 'clone', '{columns}' from s returning source_id
"""


@pytest.fixture
async def bookkeeping(target: Database) -> AsyncIterator[Bookkeeping]:
    found = Bookkeeping(TargetAddress.parse(Secret(target.url)))
    await migrate(found)
    yield found
    await found.close()


async def test_a_tenant_that_comes_back_and_goes_again_left_the_columns_of_both_times(
    target: Database, bookkeeping: Bookkeeping
) -> None:
    target.execute(COMES.format(sid="stays", columns='{"id": 1, "last": 3}'))
    for columns in ('{"id": 1, "former": 2}', '{"id": 1, "last": 3, "skipped": -4}'):
        number = target.value(COMES.format(sid="moves", columns=columns))
        await forget_source(bookkeeping, int(str(number)))
    async with bookkeeping.connection() as connection:
        assert [each.name for each in await read_remaining_columns(connection)] == ["former"]
