"""Waits until the target reaches the point of a copy, as long as the snapshot may stay open.

An open snapshot keeps dead rows at the source, and the target may wait for a lock or an operator.
"""

import asyncio
import time
from typing import Final

from streamer.copy.copy_context import SyncEvents
from streamer.copy.prepare_copy import TableCopy
from streamer.errors.error_classes import SyncAgainError

SNAPSHOT_SECONDS: Final = 60.0
"""The maximum time for which a snapshot stays open while the target catches up. The next snapshot
begins closer to the target's position.
"""
CHECK_SECONDS: Final = 0.5
"""The minimum wait of a copy if earlier copies of the round have used up `SNAPSHOT_SECONDS`."""


async def reach_with_snapshot(events: SyncEvents, copy: TableCopy) -> None:
    """Wait until the target reaches the point of *copy*, which reads the snapshot of that point.

    Raises SyncAgainError, and SyncError if the point cannot be reached.
    """
    seconds = copy.snapshot.taken_at + SNAPSHOT_SECONDS - time.monotonic()
    try:
        async with asyncio.timeout(max(CHECK_SECONDS, seconds)):
            await events.reach(copy.mapped, copy.consistent_point)
    except TimeoutError:
        raise SyncAgainError(
            f'copying "{copy.name}" begins again: the target did not apply the changes from '
            f"before its snapshot within {SNAPSHOT_SECONDS:g} s"
        ) from None
