"""Connects commands to the server of a source from which `run` streams.

A url with several hosts, or a DNS name that moved, may lead a command to a different server than
the process. The command would then compare positions and rows of an unrelated server.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import is_installed
from streamer.bookkeeping.sources import read_source_records
from streamer.mapping.rules import SourceMapping, find_source
from streamer.source.catalog import check_same_database
from streamer.source.connection import Connection, connection
from streamer.source.server.primaries_after_failover import prefer_newest, require_server_of_run
from streamer.source.timeline_branches import KnownServer


async def read_known_server(bookkeeping: Bookkeeping, source: SourceMapping) -> KnownServer:
    """Return the server from which `run` streams; no server before the first start of `run`."""
    if not await is_installed(bookkeeping):
        return KnownServer()
    records = await read_source_records(bookkeeping)
    record = find_source(records, source.database, source.sid)
    return KnownServer() if record is None else record.known_server


@asynccontextmanager
async def connection_of_run(
    source: SourceMapping, bookkeeping: Bookkeeping
) -> AsyncIterator[Connection]:
    """Connect to the server of `run` during a block.

    Raises SourceElsewhereError, SourceDatabaseError, and the errors of `connection`.
    """
    server = await read_known_server(bookkeeping, source)
    await prefer_newest(source, server)
    async with connection(source) as plain:
        await check_same_database(source, plain, server)
        await require_server_of_run(source, plain, server)
        yield plain
