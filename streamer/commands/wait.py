"""``streamer wait``: until everything committed by now is visible at the target.

A source that does not answer counts as behind. Its commits count from the moment it answers. With a
list of tables, only their positions count, so other tables may stand still.
"""

import asyncio
import math
import time
from typing import Final

from streamer.commands.scope import ALL, Scope
from streamer.errors import MappingError, Retry, SourceError, StreamerError
from streamer.lsn import NOTHING, Lsn
from streamer.mapping.rules import Mapping, SourceMapping
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.definitions import read_definitions
from streamer.progress.lag import ask_for_positions
from streamer.progress.relations import RelationRecord, read_relation_records
from streamer.progress.schema import is_installed
from streamer.progress.sources import read_source_records
from streamer.source.catalog import flush_wal
from streamer.source.connection import connection
from streamer.target.connection import TargetAddress

POLL_SECONDS: Final = 0.05
NOTIFY_SECONDS: Final = 1.0
SOURCE_RETRY_SECONDS: Final = 1.0
_NOT_SET_UP: Final = "nothing is set up yet: is `streamer run` running?"


Wanted = dict[str, Lsn | SourceError | None]
"""The position to wait for, by the label of its source, or why that is not known yet."""


async def wait(
    address: TargetAddress, mapping: Mapping, seconds: float, scope: Scope = ALL
) -> str | None:
    """Do the same as `wait_over`, over a connection of its own."""
    bookkeeping = Bookkeeping(address, "streamer wait")
    try:
        return await wait_over(bookkeeping, mapping, seconds, scope)
    finally:
        await bookkeeping.close()


async def wait_over(
    bookkeeping: Bookkeeping, mapping: Mapping, seconds: float, scope: Scope = ALL
) -> str | None:
    """Wait until everything committed now is visible and every table ready; return the obstacle, if
    any.

    Raises StreamerError for a failure that an operator must fix.
    """
    wanted: Wanted = {s.label: None for s in scope.sources(mapping)}
    makes_definitions = any(source.makes_definitions for source in scope.sources(mapping))
    waiting = _Waiting(bookkeeping, scope, wanted, makes_definitions=makes_definitions)
    try:
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            for source in scope.sources(mapping):
                group.create_task(_find_position(source, wanted), name=f"position {source.label}")
            group.create_task(waiting.run(), name="waiting")
    except TimeoutError:
        return f"after {seconds:g} s: {waiting.missing}"
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return None


async def _find_position(source: SourceMapping, wanted: Wanted) -> None:
    while True:
        try:
            async with connection(source) as plain:
                wanted[source.label] = await flush_wal(plain)
                return
        except SourceError as exc:
            if exc.retry is not Retry.TIMED:
                raise
            wanted[source.label] = exc
        await asyncio.sleep(SOURCE_RETRY_SECONDS)


class _Waiting:
    """Polls the bookkeeping. ``missing``: the obstacles at the last poll."""

    def __init__(
        self, bookkeeping: Bookkeeping, scope: Scope, wanted: Wanted, *, makes_definitions: bool
    ) -> None:
        self._bookkeeping = bookkeeping
        self._scope = scope
        self._wanted = wanted
        self._makes_definitions = makes_definitions
        self.missing = _NOT_SET_UP

    async def run(self) -> None:
        """Return when nothing is missing."""
        asked_at = -math.inf
        while True:
            try:
                found = await self._look()
                now = time.monotonic()
                if found and now - asked_at >= NOTIFY_SECONDS:
                    asked_at = now
                    of_tables = bool(self._scope.tables)
                    await ask_for_positions(self._bookkeeping, of_tables=of_tables)
            except MappingError:
                raise
            except StreamerError as exc:  # the target may restart; there is time
                found = [str(exc)]
            if not found:
                return
            self.missing = "; ".join(found)
            await asyncio.sleep(POLL_SECONDS)

    async def _look(self) -> list[str]:
        """Return the present obstacles, one line for each source."""
        bookkeeping = self._bookkeeping
        if not await is_installed(bookkeeping):
            return [_NOT_SET_UP]
        records = {record.label: record for record in await read_source_records(bookkeeping)}
        missing = []
        has_table = False
        for label, wanted in self._wanted.items():
            record = records.get(label)
            if isinstance(wanted, SourceError):
                missing.append(str(wanted))
            elif record is None:
                missing.append(f'source "{label}" was never started')
            elif wanted is None:
                missing.append(f'source "{label}" has not answered')
            else:
                records_of_it = await read_relation_records(bookkeeping, record.source_id)
                relations = self._scope.of((each.source, each) for each in records_of_it)
                has_table = has_table or bool(relations)
                if what := self._missing_of(label, relations, record.acknowledged_lsn, wanted):
                    missing.append(what)
                elif self._makes_definitions:
                    missing += await _pending(bookkeeping, label, relations)
        if self._wanted and self._scope.tables and not has_table and not missing:
            missing.append(f"no table {', '.join(self._scope.tables)} is streamed")
        return missing

    def _missing_of(
        self, label: str, relations: list[RelationRecord], acknowledged_lsn: Lsn, wanted: Lsn
    ) -> str | None:
        for relation in relations:
            if relation.state != "ready":
                return f'table "{relation.source}" of "{label}" is {relation.state}'
        if acknowledged_lsn >= wanted:
            return None
        if not self._scope.tables:
            return f'source "{label}": confirmed {acknowledged_lsn}, waiting for {wanted}'
        for relation in relations:
            visible_lsn = max(acknowledged_lsn, relation.visible_lsn or NOTHING)
            if visible_lsn < wanted:
                where = f'table "{relation.source}" of "{label}"'
                return f"{where}: visible {visible_lsn}, waiting for {wanted}"
        return None


async def _pending(
    bookkeeping: Bookkeeping, label: str, relations: list[RelationRecord]
) -> list[str]:
    """Return the definitions that a process is still to make; those it gave up do not count."""
    found = await read_definitions(bookkeeping)
    return [
        f'{record.label} of table "{record.source}" of "{label}" is not made yet'
        for relation in relations
        for record in found.get(relation.relation_id, [])
        if not record.is_given_up
    ][:1]
