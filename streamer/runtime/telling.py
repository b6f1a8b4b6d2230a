"""Tells the bookkeeping what only this process knows, for `streamer status`: how many changes wait
in it, and that a heartbeat is overdue.

Only when that has changed, and every few seconds at most: where nothing is held nothing is written.
What a process that died has said counts no longer, because what it held comes again; so the first
word of the next one says all there is.
"""

import asyncio
from typing import Final

from streamer.errors import TargetError
from streamer.progress.store import HeldRecord, SourceRecord
from streamer.runtime.heartbeat import Heartbeat
from streamer.runtime.relations import Relations
from streamer.runtime.shared import Shared

TELL_SECONDS: Final = 2.0


async def tell(
    shared: Shared, source: SourceRecord, relations: Relations, heartbeat: Heartbeat
) -> None:
    """Tell of a source until cancelled."""
    told: list[HeldRecord] | None = None
    was_overdue: bool | None = None
    while True:
        held, overdue = _held(relations), heartbeat.overdue_seconds
        try:
            if held != told:
                await shared.store.set_held(source.source_id, held)
                told = held
            if was_overdue is not (overdue is not None):
                await shared.store.set_heartbeat_overdue(source.source_id, overdue)
                was_overdue = overdue is not None
        except TargetError as exc:  # said later: it is no reason to stop a stream
            shared.metrics.count_error(exc, source.database, source.sid)
        await asyncio.sleep(TELL_SECONDS)


def _held(relations: Relations) -> list[HeldRecord]:
    records = []
    for mapped in relations:
        lane = relations.lane(mapped)
        changes, size = lane.held(mapped)
        if changes:
            behind = lane.pending.flush_lsn_max
            records.append(HeldRecord(mapped.relation_id, changes, size, behind))
    return records
