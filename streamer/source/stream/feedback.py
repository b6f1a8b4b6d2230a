"""Feedback to a source: status updates at intervals, and answers to its keepalives.

A walsender ends a connection that was silent for ``wal_sender_timeout``, and requests a reply after
half of that time. streamer sends status updates at least three times as often. If the source was
silent for a few seconds, the update requests a reply. Without a reply, page and status show the
source as silent after `SILENT_SECONDS`. The stream ends much later, because a network may recover.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from streamer.errors.error_classes import SourceConnectionError
from streamer.source.stream.replication_stream import Burst, ChangeStream
from streamer.util.lsn import Lsn
from streamer.util.waiting import wait_for_event

# A healthy source sends at least every 1.5 intervals. The page shows a silent source
# `SILENT_SECONDS` after the last message, and with its own waits within 12 s.
STATUS_SECONDS_MAX: Final = 3.0
SILENT_SECONDS: Final = 6.0
SILENCE_SECONDS_MIN: Final = 60.0
FAR_BYTES: Final = 16 * 1024 * 1024
"""A position that moved by this much is reported at once, so that the source can remove WAL."""


@dataclass(frozen=True, slots=True)
class FeedbackTimes:
    """The intervals of a source."""

    label: str
    interval: float
    """Seconds between status updates."""
    silence: float
    """Seconds without a message, despite requested replies, after which the source counts as
    lost.
    """

    @classmethod
    def of(cls, label: str, wal_sender_timeout_seconds: float) -> "FeedbackTimes":
        """Derive the intervals from the server's setting; 0 means no timeout."""
        third = wal_sender_timeout_seconds / 3
        interval = min(STATUS_SECONDS_MAX, third) if third else STATUS_SECONDS_MAX
        return cls(label, interval, max(SILENCE_SECONDS_MIN, 4 * interval))

    def should_request_reply(self, last_message_at: float, *, is_reading: bool) -> bool:
        """Return whether the next status update should request a reply from the source.

        *last_message_at* is a time of `time.monotonic`. While a reader waits for memory, the
        source's messages stay in the socket. Raises SourceConnectionError after `silence`.
        """
        quiet = time.monotonic() - last_message_at
        if quiet > self.silence and is_reading:
            raise SourceConnectionError(f'source "{self.label}" has not answered for {quiet:.0f} s')
        return quiet > self.interval / 2


class Feedback:
    """The status updates of a stream.

    *positions* returns the durable position up to which the source may discard WAL, and the
    position up to which changes are visible. *is_reading* returns whether the reader reads messages
    now.
    """

    def __init__(
        self,
        stream: ChangeStream,
        times: FeedbackTimes,
        positions: Callable[[], tuple[Lsn, Lsn]],
        is_reading: Callable[[], bool],
    ) -> None:
        self._stream = stream
        self._times = times
        self._positions = positions
        self._is_reading = is_reading

    @property
    def durable_lsn(self) -> Lsn:
        """The position up to which the source may discard WAL."""
        return self._positions()[0]

    def send(self, *, request_reply: bool = False) -> None:
        """Send a status update now. Raises SourceError."""
        durable_lsn, visible_lsn = self._positions()
        self._stream.send_status(durable_lsn, visible_lsn, request_reply=request_reply)

    def answer(self, burst: Burst) -> bool:
        """Answer the keepalive of *burst* if it requests a reply; return whether it does."""
        if burst.wal_end_lsn is None or not burst.reply_requested:
            return False
        self.send()
        return True

    async def run(self, moved: asyncio.Event, sent: Callable[[], None] = lambda: None) -> None:
        """Send a status update when the positions have *moved*, and at each interval.

        Calls *sent* after each update. Raises SourceConnectionError once the source counts as lost.
        """
        while True:
            await wait_for_event(moved, self._times.interval)
            moved.clear()
            self.send(
                request_reply=self._times.should_request_reply(
                    self._stream.last_message_at, is_reading=self._is_reading()
                )
            )
            sent()
