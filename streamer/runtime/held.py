"""Tells the bookkeeping how many changes wait in this process, for `streamer status`.

Only when that has changed, and every few seconds at most: where nothing is held nothing is written.
What a process that died has said counts no longer, because what it held comes again; so the first
word of the next one says all there is.
"""

import asyncio
from typing import Final

from streamer.errors import TargetError
from streamer.progress.store import HeldRecord, SourceRecord
from streamer.runtime.relations import Relations
from streamer.runtime.shared import Shared

PUBLISH_SECONDS: Final = 2.0


async def publish_held(shared: Shared, source: SourceRecord, relations: Relations) -> None:
    """Tell of *relations* of *source* until cancelled."""
    told: list[HeldRecord] | None = None
    while True:
        held = _held(relations)
        if held != told:
            try:
                await shared.store.set_held(source.source_id, held)
                told = held
            except TargetError as exc:  # said later: it is no reason to stop a stream
                shared.metrics.count_error(exc, source.database, source.sid)
        await asyncio.sleep(PUBLISH_SECONDS)


def _held(relations: Relations) -> list[HeldRecord]:
    records = []
    for mapped in relations:
        lane = relations.lane(mapped)
        changes, size = lane.held(mapped)
        if changes:
            behind = lane.pending.flush_lsn_max
            records.append(HeldRecord(mapped.relation_id, changes, size, behind))
    return records
