"""Migrations of the bookkeeping after the first, while programs of an earlier version run."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

from streamer.bookkeeping import bookkeeping_schema, schema_version, unmapped_relations
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.registered_relations import remove_relation
from streamer.bookkeeping.relation_records import RELATIONS, read_relation_records
from streamer.bookkeeping.replicas import join, read_replicas
from streamer.bookkeeping.source_lock import LockSession
from streamer.bookkeeping.sources import register_source
from streamer.errors.error_classes import StreamerError, TargetContentionError, TargetError
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import SourceMapping
from streamer.postgres.secret import Secret
from streamer.target.connection import TargetAddress, target_connection
from streamer.util.lsn import Lsn
from streamer.util.migrations import Migration, read_migrations
from tests.support.postgres import Database

SOURCE = SourceMapping("shop", None, Secret(""), ())
NEWEST = read_migrations("target")[-1].number
COLUMN = "alter table streamer.relation add column taste text not null default 'sweet';"
NEEDED = max(migration.needs for migration in read_migrations("target"))
"""The migration that all running programs of this version certainly know."""
RUNS_ON_IT = f"-- needs: {NEEDED}\n"


@pytest.fixture
async def books(target: Database) -> AsyncIterator[Bookkeeping]:
    """The bookkeeping as this version has made the schema."""
    bookkeeping = Bookkeeping(TargetAddress.parse(Secret(target.url)))
    await bookkeeping_schema.migrate(bookkeeping)
    yield bookkeeping
    await bookkeeping.close()


@contextmanager
def next_version(sql: str) -> Iterator[None]:
    """The program of the next version, which has a migration more."""
    migrations = [*read_migrations("target"), Migration(NEWEST + 1, "next", sql)]
    with pytest.MonkeyPatch.context() as patch:
        for module in (bookkeeping_schema, schema_version):
            patch.setattr(module, "read_migrations", lambda kind: migrations)
        yield


async def add_relation(books: Bookkeeping, name: str) -> int:
    """Store a relation in sync; return the id of its source."""
    source_id, _ = await register_source(books, SOURCE)
    values = {
        "source_id": source_id,
        "source": RelationName("public", name),
        "target": RelationName("public", name),
        "type": "clone",
        "snapshot_lsn": Lsn(16),
    }
    await RELATIONS.insert(books, [values])
    return source_id


async def unmap_relations(books: Bookkeeping) -> None:
    """Let all relations leave the mapping."""
    for record in await read_relation_records(books):
        await unmapped_relations.store_former(books, record.relation_id)
        await remove_relation(books, record.relation_id)


async def test_a_migration_keeps_rows_and_is_recorded(books: Bookkeeping) -> None:
    await add_relation(books, "t")
    with next_version(RUNS_ON_IT + COLUMN):
        assert not await bookkeeping_schema.is_installed(books)
        for _ in range(2):
            await bookkeeping_schema.migrate(books)
        assert await bookkeeping_schema.is_installed(books)

    rows = await books.fetch("select source, taste from streamer.relation")
    assert [tuple(row) for row in rows] == [("public.t", "sweet")]
    rows = await books.fetch("select number, name, needs from streamer.migration order by 1 desc")
    assert tuple(rows[0]) == (NEWEST + 1, "next", NEEDED)


async def test_a_migration_that_fails_leaves_nothing_behind(books: Bookkeeping) -> None:
    with next_version(f"{COLUMN} select 1/0;"), pytest.raises(StreamerError, match="zero"):
        await bookkeeping_schema.migrate(books)

    assert await bookkeeping_schema.is_installed(books)
    assert await books.fetch_value(
        "select count(*) from pg_attribute where attrelid = 'streamer.relation'::regclass"
        " and attname = 'taste'"
    ) == 0  # fmt: skip


async def test_an_older_program_runs_on_a_schema_that_needs_no_newer_one(
    books: Bookkeeping,
) -> None:
    with next_version(RUNS_ON_IT + COLUMN):
        await bookkeeping_schema.migrate(books)

    await bookkeeping_schema.migrate(books)
    assert await bookkeeping_schema.is_installed(books)
    await add_relation(books, "t")
    assert len(await read_relation_records(books)) == 1
    async with books.connection() as connection:
        number = await join(connection, "host:1", None)
        assert [replica.number for replica in await read_replicas(connection)] == [number]


async def test_an_older_program_refuses_a_schema_that_needs_a_newer_one(
    books: Bookkeeping,
) -> None:
    with next_version(COLUMN):
        await bookkeeping_schema.migrate(books)

    # A process that was about to start during the migration does not join either.
    for refused in (
        bookkeeping_schema.migrate(books),
        bookkeeping_schema.is_installed(books),
        _join(books),
    ):
        with pytest.raises(TargetError, match=f"newer streamer \\(migration {NEWEST + 1}\\)"):
            await refused
    assert await books.fetch_value("select count(*) from streamer.replica") == 0


async def _join(books: Bookkeeping) -> int:
    async with books.connection() as connection:
        return await join(connection, "host:1", None)


async def test_a_migration_that_older_programs_cannot_bear_waits_for_their_end(
    books: Bookkeeping, target: Database
) -> None:
    address = TargetAddress.parse(Secret(target.url))
    locks = LockSession(address, "host:7")
    await locks.acquire(SOURCE)
    async with target_connection(address) as replica:
        await join(replica, "host:8", None)
        with next_version(COLUMN):
            names = r": host:7, host:8 \("
            with pytest.raises(TargetContentionError, match=names):
                await bookkeeping_schema.migrate(books)
    await locks.close()

    with next_version(COLUMN):
        await bookkeeping_schema.migrate(books)
        assert await bookkeeping_schema.is_installed(books)


async def test_a_migration_that_older_programs_can_bear_does_not_wait(
    books: Bookkeeping, target: Database
) -> None:
    locks = LockSession(TargetAddress.parse(Secret(target.url)), "host:7")
    await locks.acquire(SOURCE)
    with next_version(RUNS_ON_IT + COLUMN):
        await bookkeeping_schema.migrate(books)
    await locks.close()


async def test_tables_that_left_before_and_after_a_migration_return_together(
    books: Bookkeeping,
) -> None:
    await add_relation(books, "early")
    await unmap_relations(books)
    with next_version(RUNS_ON_IT + COLUMN):
        await bookkeeping_schema.migrate(books)
    source_id = await add_relation(books, "late")
    await unmap_relations(books)

    names = {name: (name, None) for name in ("public.late", "public.early")}
    returned = await unmapped_relations.restore_records(books, source_id, names, may_resume=True)

    assert returned == set(names)
    assert len(await read_relation_records(books)) == 2
