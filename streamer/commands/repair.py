"""``streamer repair`` and ``streamer compare --repair``: bring tables that differ back in step.

The comparison names the keys of the rows that differ, and a resync limited to them brings these
(`streamer.mapping.resync.RowScope`). It has the protocol of a resync: changes wait at the position
of a snapshot, and one transaction exchanges rows and stores the position. If the keys are too many,
or rows have none, a resync that compares brings the rows of the whole table that differ. The
command then compares the same rows again.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from streamer.commands.compare import compare
from streamer.commands.requests import command_actor
from streamer.compare.comparison import ComparisonScope, Options, TableResult
from streamer.config.settings import Settings
from streamer.errors import ComparisonError
from streamer.mapping.expressions import Expression
from streamer.mapping.resync import Mode, Resync, RowScope
from streamer.mapping.rules import Mapping
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.relations import RelationRecord, read_relation_records
from streamer.progress.requests import make_request
from streamer.progress.sources import read_source_records
from streamer.target.connection import TargetAddress

POLL_SECONDS: Final = 0.2
REPAIR_SECONDS_MAX: Final = 24 * 3600.0
ABSENT_SECONDS: Final = 10.0
"""How long a repair waits while no process runs the source: a restart takes less."""
KEYS_MAX: Final = 5000
"""The bookkeeping stores the keys of a request. With more, the whole table is compared."""


async def repair(
    settings: Settings, mapping: Mapping, scope: ComparisonScope, options: Options
) -> list[TableResult]:
    """Compare tables, repair those that differ, and compare these again.

    Return the results of the last comparison of each table. Raises ComparisonError if a repair ends
    with an error, and the errors of `compare`.
    """
    options = replace(options, keys_max=KEYS_MAX)
    results = await compare(settings, mapping, scope, options)
    different = [result for result in results if result.is_different]
    if not different:
        return results
    await _repair_tables(TargetAddress.parse(settings.target.url), different, scope.where)
    again = await compare(
        settings,
        mapping,
        replace(scope, relation_ids=frozenset(result.relation_id for result in different)),
        options,
    )
    found = {result.relation_id: result for result in again}
    return [found.get(result.relation_id, result) for result in results]


def choose_resync(result: TableResult, where: Expression | None) -> Resync:
    """Return the resync that brings the rows of *result* that differ. Pure.

    *where*: the condition of the comparison.
    """
    if result.keys is not None:
        return Resync(Mode.DIFF, scope=RowScope(keys=(result.keys,)))
    if where is not None:
        return Resync(Mode.DIFF, scope=RowScope((where.text,)))
    return Resync(Mode.DIFF)


async def _repair_tables(
    address: TargetAddress, different: Sequence[TableResult], where: Expression | None
) -> None:
    """Request a resync of tables, and wait for its end."""
    wanted = {result.relation_id: choose_resync(result, where) for result in different}
    bookkeeping = Bookkeeping(address, "streamer repair")
    try:
        before = await _read(bookkeeping, wanted)
        for reason in _refusals(before, wanted):
            raise ComparisonError(reason, hint="run `streamer resync` for the whole table")
        for relation_id, resync in wanted.items():
            await make_request(
                bookkeeping, relation_id, "resync", resync.to_json(), actor=command_actor()
            )
        began = seen = time.monotonic()
        while time.monotonic() < began + REPAIR_SECONDS_MAX:
            now = await _read(bookkeeping, wanted)
            waiting = {i for i in wanted if not is_repaired(before[i], now.get(i))}
            if not waiting:
                return
            absent = await _find_absent(bookkeeping, {before[i].source_id for i in waiting})
            if not absent:
                seen = time.monotonic()
            elif time.monotonic() > seen + ABSENT_SECONDS:
                raise ComparisonError(
                    f"no process runs source {absent}, so the repair waits",
                    hint="start `streamer run`, which makes the repair; then compare again",
                )
            await asyncio.sleep(POLL_SECONDS)
    finally:
        await bookkeeping.close()
    raise ComparisonError("the repair has not finished", hint="see `streamer status`")


async def _find_absent(bookkeeping: Bookkeeping, source_ids: set[int]) -> str:
    """Return the sources that no process runs."""
    records = await read_source_records(bookkeeping)
    absent = [r.label for r in records if r.source_id in source_ids and r.holder is None]
    return ", ".join(f'"{label}"' for label in absent)


def _refusals(before: dict[int, RelationRecord], wanted: dict[int, Resync]) -> Iterator[str]:
    for relation_id, resync in wanted.items():
        record = before[relation_id]
        if resync.scope is not None and record.snapshot_lsn is None:
            yield f'"{record.source}" is not in sync, so some rows cannot be repaired alone'


async def _read(bookkeeping: Bookkeeping, wanted: dict[int, Resync]) -> dict[int, RelationRecord]:
    records = await read_relation_records(bookkeeping)
    return {record.relation_id: record for record in records if record.relation_id in wanted}


def is_repaired(before: RelationRecord, now: RelationRecord | None) -> bool:
    """Return whether the resync of a table that was *before* has ended. Pure.

    Raises ComparisonError if the table is gone from the mapping, or the resync failed.
    """
    if now is None:
        raise ComparisonError(f'table "{before.source}" is no longer streamed')
    if now.attempt <= before.attempt:
        return False
    has_ended = now.state in ("ready", "catching_up") and now.snapshot_lsn is not None
    if now.error is not None and (now.state == "error" or has_ended):
        raise ComparisonError(
            f'the repair of "{now.source}" failed: {now.error.text}',
            hint="correct that, and repair again",
        )
    return has_ended
