"""``streamer repair`` and ``streamer compare --repair``: bring tables that differ back in step.

A repair is a resync that compares (``resync --mode diff``), of exactly the tables of those sources
that differ. So it has the protocol of a resync: a snapshot with a position, and changes that wait
meanwhile. One transaction writes the rows that differ and the new position. A repair that is killed
leaves the table as it was, or repaired. The command then compares the same tables again.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from streamer.commands.compare import compare
from streamer.commands.requests import command_actor
from streamer.compare.comparison import ComparisonScope, Options, TableResult
from streamer.config.settings import Settings
from streamer.errors import ComparisonError
from streamer.mapping.resync import Mode, Resync
from streamer.mapping.rules import Mapping
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.relations import RelationRecord, read_relation_records
from streamer.progress.requests import make_requests
from streamer.target.connection import TargetAddress

POLL_SECONDS: Final = 0.2
REPAIR_SECONDS_MAX: Final = 24 * 3600.0


async def repair(
    settings: Settings, mapping: Mapping, scope: ComparisonScope, options: Options
) -> list[TableResult]:
    """Compare tables, repair those that differ, and compare these again.

    Return the results of the last comparison of each table. Raises ComparisonError if a repair ends
    with an error, and the errors of `compare`.
    """
    results = await compare(settings, mapping, scope, options)
    different = [result for result in results if result.is_different]
    if not different:
        return results
    await _repair_tables(TargetAddress.parse(settings.target.url), different)
    again = await compare(
        settings,
        mapping,
        replace(scope, relation_ids=frozenset(result.relation_id for result in different)),
        options,
    )
    found = {result.relation_id: result for result in again}
    return [found.get(result.relation_id, result) for result in results]


async def _repair_tables(address: TargetAddress, different: Sequence[TableResult]) -> None:
    """Request a resync of tables, and wait for its end."""
    ids = [result.relation_id for result in different]
    bookkeeping = Bookkeeping(address, "streamer repair")
    try:
        before = await _read(bookkeeping, ids)
        await make_requests(
            bookkeeping, ids, "resync", Resync(Mode.DIFF).to_json(), actor=command_actor()
        )
        deadline = time.monotonic() + REPAIR_SECONDS_MAX
        while time.monotonic() < deadline:
            now = await _read(bookkeeping, ids)
            if all(is_repaired(before[i], now.get(i)) for i in ids):
                return
            await asyncio.sleep(POLL_SECONDS)
    finally:
        await bookkeeping.close()
    raise ComparisonError("the repair has not ended", hint="see `streamer status`")


async def _read(bookkeeping: Bookkeeping, ids: Sequence[int]) -> dict[int, RelationRecord]:
    records = await read_relation_records(bookkeeping)
    return {record.relation_id: record for record in records if record.relation_id in ids}


def is_repaired(before: RelationRecord, now: RelationRecord | None) -> bool:
    """Return whether the resync of a table that was *before* has ended. Pure.

    Raises ComparisonError if the table is gone from the mapping or stopped with an error.
    """
    if now is None:
        raise ComparisonError(f'table "{before.source}" is no longer streamed')
    if now.attempt > before.attempt and now.state == "error":
        raise ComparisonError(
            f'the repair of "{now.source}" failed: {now.error}',
            hint="correct that, then run `streamer resume` and repair again",
        )
    return (
        now.attempt > before.attempt
        and now.state in ("ready", "catching_up")
        and now.snapshot_lsn is not None
    )
