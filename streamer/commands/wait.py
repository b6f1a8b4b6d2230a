"""``streamer wait``: until the target shows all commits of the sources up to now.

A source that does not answer counts as behind. Once the source answers, the command waits for the
commits up to that moment. A table with a request counts as behind until its process has taken the
request and stored the new state. With a list of tables, the command reads only the positions of
these tables.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import is_installed
from streamer.bookkeeping.lagging_tables import request_positions
from streamer.bookkeeping.planned_definitions import read_definitions
from streamer.bookkeeping.positions import RelationPosition, SourcePosition, read_positions
from streamer.bookkeeping.server_of_run import connection_of_run
from streamer.commands.status import read_report
from streamer.errors.error_classes import (
    MappingError,
    Retry,
    SourceError,
    StreamerError,
    TargetError,
)
from streamer.mapping.rules import Mapping, SourceLabel, SourceMapping
from streamer.mapping.scope import ALL, Scope
from streamer.report.problems import worst_first
from streamer.source.server.primary_of_standby import flush_source
from streamer.target.connection import TargetAddress
from streamer.util.lsn import INVALID_LSN, Lsn

POLL_SECONDS: Final = 0.02
POLL_SECONDS_MAX: Final = 0.25
POLL_GROWTH: Final = 1.25
"""Pauses between polls grow, so a short wait ends early and a long wait costs the target little."""
NOTIFY_SECONDS: Final = 1.0
RECONNECT_SECONDS: Final = 10.0
"""A wait connects again at this interval, because the target may have failed over. An old primary
that lives on would never reach the awaited positions.
"""
SOURCE_RETRY_SECONDS: Final = 1.0
PROBLEMS_MAX: Final = 10
_NOT_SET_UP: Final = "the target has no bookkeeping of streamer yet: is `streamer run` running?"


EndPositions = dict[SourceLabel, Lsn | SourceError | None]
"""The position to wait for, by the label of the source, or why the position is unknown."""


async def wait(
    address: TargetAddress, mapping: Mapping, seconds: float, scope: Scope = ALL
) -> str | None:
    """Call `wait_over` with a new connection. The returned obstacle also names the problems."""
    bookkeeping = Bookkeeping(address, "streamer wait")
    try:
        obstacle = await wait_over(bookkeeping, mapping, seconds, scope)
    finally:
        await bookkeeping.close()
    if obstacle is None:
        return None
    return "; ".join([obstacle, *await name_problems(address, mapping, scope)])


async def name_problems(address: TargetAddress, mapping: Mapping, scope: Scope = ALL) -> list[str]:
    """Return the worst problems of *scope*, as `streamer status` lists them."""
    report = await read_report(address, mapping, scope=scope)
    problems = list(report.problems)
    for status in report.sources:
        problems += [problem for problem in status.problems if problem.blocks]
    shown = [f"{worst.subject}: {worst.sentence}" for worst in worst_first(problems)]
    more = len(shown) - PROBLEMS_MAX
    return shown[:PROBLEMS_MAX] + ([f"and {more} more problems"] if more > 0 else [])


ReadEnd = Callable[[SourceMapping], Awaitable[Lsn]]
"""Asks a source for the position to wait for."""


async def read_end(source: SourceMapping, bookkeeping: Bookkeeping) -> Lsn:
    """Return the position after the last commit of *source*. Raises StreamerError."""
    async with connection_of_run(source, bookkeeping) as plain:
        return await flush_source(source, plain)


async def wait_over(
    bookkeeping: Bookkeeping,
    mapping: Mapping,
    seconds: float,
    scope: Scope = ALL,
    ask: ReadEnd | None = None,
) -> str | None:
    """Wait until all commits so far are visible, every table is ready, and no request waits.

    Return the obstacle at the time limit, if any. *ask*: replaces `read_end`. Raises StreamerError
    for a failure that an operator must fix.
    """
    ask = ask or partial(read_end, bookkeeping=bookkeeping)
    sources = scope.sources_of_tables(mapping)
    positions: EndPositions = {SourceLabel(s.database, s.sid): None for s in sources}
    makes_definitions = any(source.makes_definitions for source in sources)
    waiting = _Waiting(bookkeeping, scope, positions, makes_definitions=makes_definitions)
    try:
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            for source in sources:
                group.create_task(
                    _find_position(source, positions, ask), name=f"position {source.label}"
                )
            group.create_task(waiting.run(), name="waiting")
    except TimeoutError:
        return f"after {seconds:g} s: {waiting.missing}"
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return None


async def _find_position(source: SourceMapping, positions: EndPositions, ask: ReadEnd) -> None:
    label = SourceLabel(source.database, source.sid)
    while True:
        try:
            positions[label] = await ask(source)
            return
        except TargetError:  # the second task names this error
            pass
        except SourceError as exc:
            if exc.retry is not Retry.TIMED:
                raise
            positions[label] = exc
        await asyncio.sleep(SOURCE_RETRY_SECONDS)


class _Waiting:
    """Polls the bookkeeping. ``missing``: the obstacles at the last poll."""

    def __init__(
        self,
        bookkeeping: Bookkeeping,
        scope: Scope,
        positions: EndPositions,
        *,
        makes_definitions: bool,
    ) -> None:
        self._bookkeeping = bookkeeping
        self._scope = scope
        self._positions = positions
        self._makes_definitions = makes_definitions
        self._is_installed = False
        self.missing = _NOT_SET_UP

    async def run(self) -> None:
        """Poll until no obstacle remains."""
        asked_at, pause = -math.inf, POLL_SECONDS
        connected_at = time.monotonic()
        while True:
            if time.monotonic() - connected_at >= RECONNECT_SECONDS:
                await self._bookkeeping.close()
                self._is_installed, connected_at = False, time.monotonic()
            try:
                obstacles = await self._find_obstacles()
                now = time.monotonic()
                if obstacles and now - asked_at >= NOTIFY_SECONDS:
                    asked_at = now
                    of_tables = not all(map(self._scope.has_whole, self._positions))
                    await request_positions(self._bookkeeping, of_tables=of_tables)
            except MappingError:
                raise
            except StreamerError as exc:  # the target may restart before the time limit
                obstacles = [str(exc)]
                self._is_installed = False  # the next connection may reach a different server
            if not obstacles:
                return
            self.missing = "; ".join(obstacles)
            await asyncio.sleep(pause)
            pause = min(POLL_SECONDS_MAX, pause * POLL_GROWTH)

    async def _find_obstacles(self) -> list[str]:
        """Return the present obstacles, in at most one line for each source."""
        bookkeeping = self._bookkeeping
        if not self._is_installed:
            self._is_installed = await is_installed(bookkeeping)
            if not self._is_installed:
                return [_NOT_SET_UP]
        positions = await read_positions(bookkeeping)
        missing = []
        has_table = False
        for label, awaited in self._positions.items():
            position = positions.get(label)
            tables = () if position is None else position.relations
            relations = self._scope.select(label, ((r.source, r.row_sid, r) for r in tables))
            has_table = has_table or bool(relations) or self._scope.has_whole(label)
            if not self._scope.names(label) and position is not None and not relations:
                continue  # a source without tables of the tenant
            if isinstance(awaited, SourceError):
                missing.append(str(awaited))
            elif position is None:
                missing.append(f'source "{label}" has never been started')
            elif awaited is None:
                missing.append(f'source "{label}" has not answered')
            elif obstacle := self._missing_of(position, relations, awaited):
                missing.append(obstacle)
            elif self._makes_definitions:
                missing += await _pending(bookkeeping, label, relations)
        if self._positions and not has_table and not missing:
            missing.append(f"no table {self._scope.words} is streamed")
        return missing

    def _missing_of(
        self, position: SourcePosition, relations: list[RelationPosition], awaited: Lsn
    ) -> str | None:
        label, acknowledged_lsn = position.label, position.acknowledged_lsn
        for relation in relations:
            if relation.state != "ready":
                return f'table "{relation.source}" of "{label}" is {relation.state}'
            if relation.has_request:
                where = f'table "{relation.source}" of "{label}"'
                return f"{where} has a pending request: is `streamer run` running?"
        if acknowledged_lsn >= awaited:
            return None
        if self._scope.has_whole(position.label):
            return f'source "{label}": confirmed {acknowledged_lsn}, waiting for {awaited}'
        for relation in relations:
            visible_lsn = max(acknowledged_lsn, relation.visible_lsn or INVALID_LSN)
            if visible_lsn < awaited:
                where = f'table "{relation.source}" of "{label}"'
                return f"{where}: visible {visible_lsn}, waiting for {awaited}"
        return None


async def _pending(
    bookkeeping: Bookkeeping, label: str, relations: list[RelationPosition]
) -> list[str]:
    """Return the definitions that a process has yet to make, except failed definitions."""
    definitions = await read_definitions(bookkeeping)
    return [
        f'{record.label} of table "{record.source}" of "{label}" is not created yet'
        for relation in relations
        for record in definitions.get(relation.relation_id, [])
        if not record.is_given_up
    ][:1]
