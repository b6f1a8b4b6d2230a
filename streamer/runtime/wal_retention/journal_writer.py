"""Reads a slot into a journal: frames in, flushed records and status updates out.

The journal does not need the target, and holds the only copy of acknowledged changes. After any
failure the source sends all later changes again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from streamer.errors.error_classes import SourceDivergedError
from streamer.source.journal.gather_records import Gatherer
from streamer.source.journal.journal_files import Journal
from streamer.source.stream.feedback import FAR_BYTES, Feedback, FeedbackTimes
from streamer.source.stream.replication_stream import ReplicationStream
from streamer.util.failpoints import failpoint
from streamer.util.lsn import INVALID_LSN
from streamer.util.waiting import in_thread, wait_for_event

GROUP_SECONDS: Final = 0.05
"""How long records gather for one flush."""
UNWRITTEN_BYTES_MAX: Final = 8 * 1024 * 1024
GATHER_SECONDS: Final = 0.001
QUIET_SECONDS: Final = 1.0


class Journaler:
    """One START_REPLICATION into a journal, which the object owns meanwhile."""

    def __init__(
        self,
        journal: Journal,
        stream: ReplicationStream,
        gatherer: Gatherer,
        *,
        label: str,
        wal_sender_timeout_seconds: float,
        check_timeline: Callable[[], Awaitable[None]] | None,
        flushed: Callable[[], None],
    ) -> None:
        """*check_timeline* raises an error if the source's timeline has changed. Calls *flushed*
        after each flush.
        """
        self._flushed = flushed
        self._check_timeline = check_timeline
        self._journal = journal
        self._stream = stream
        self._gatherer = gatherer
        self._label = label
        self._feedback = Feedback(
            stream,
            FeedbackTimes.of(label, wal_sender_timeout_seconds),
            # none of these changes is visible in the target yet
            lambda: (journal.end_lsn, INVALID_LSN),
            lambda: gatherer.size <= UNWRITTEN_BYTES_MAX,
        )
        self._arrived = asyncio.Event()
        self._has_room = asyncio.Event()

    async def run(self) -> None:
        """Read and write until cancelled. Raises SourceError, SpoolError, ProtocolError."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(), name=f"journal reader {self._label}")
            group.create_task(self._write(), name=f"journal writer {self._label}")
            group.create_task(
                self._feedback.run(asyncio.Event()), name=f"journal feedback {self._label}"
            )

    async def _read(self) -> None:
        stream, gatherer = self._stream, self._gatherer
        while True:
            burst = stream.read()
            if self._check_timeline is not None and (
                burst.payloads or burst.wal_end_lsn is not None
            ):
                await self._check_timeline()
            is_same = gatherer.feed(burst.payloads)
            if burst.wal_end_lsn is not None:
                if gatherer.is_between_transactions:
                    is_same = is_same and gatherer.keepalive(burst.wal_end_lsn)
                self._feedback.answer(burst)
            if not is_same:
                raise SourceDivergedError(
                    f'source "{self._label}" has a different history than its journal: the '
                    "source was restored to an earlier time and has written since"
                )
            if burst.payloads or gatherer.end_lsn - self._journal.end_lsn >= FAR_BYTES:
                self._arrived.set()
            if gatherer.size > UNWRITTEN_BYTES_MAX:
                self._has_room.clear()
                await self._has_room.wait()
            elif burst.payloads:
                await asyncio.sleep(GATHER_SECONDS)
            else:
                await stream.wait_readable()

    async def _write(self) -> None:
        while True:
            # A position without a change is not urgent.
            if await wait_for_event(self._arrived, QUIET_SECONDS):
                await asyncio.sleep(GROUP_SECONDS)
            self._arrived.clear()
            records = self._gatherer.pop_records()
            if not records:
                continue
            former_end = self._journal.end_lsn
            try:
                await in_thread(self._journal.write, records)
            finally:
                self._journal.changed.set()
            self._has_room.set()
            if self._journal.end_lsn > former_end:
                self._feedback.send()
                self._flushed()
                failpoint("journal.acknowledged")
