"""The times of feedback: status updates to a source, and its silence.

A walsender ends a connection that was silent for ``wal_sender_timeout``, and requests a reply at
half of that time. A pipeline sends status updates at least three times as often. It requests a
reply when the source has sent nothing for a few seconds. Without a reply, screens show the source
as silent after `SILENT_SECONDS`; the pipeline gives it up much later, because a network may
recover.

The pipeline answers keepalives (`streamer.runtime.pipeline`); this module only knows the times.
"""

import time
from dataclasses import dataclass
from typing import Final

from streamer.errors import SourceConnectionError

# A healthy source sends at least every one and a half intervals. Screens show a silent source
# `SILENT_SECONDS` after its last message; with the page's own waits that stays below 12 s.
STATUS_SECONDS_MAX: Final = 3.0
SILENT_SECONDS: Final = 6.0
SILENCE_SECONDS_MIN: Final = 60.0


@dataclass(frozen=True, slots=True)
class Feedback:
    """The intervals of one source."""

    label: str
    interval: float
    """Seconds between status updates."""
    silence: float
    """Seconds without a message after which the source counts as gone, despite requested
    replies.
    """

    @classmethod
    def of(cls, label: str, wal_sender_timeout_seconds: float) -> "Feedback":
        """Derive the intervals from the server's setting; 0 means no timeout."""
        third = wal_sender_timeout_seconds / 3
        interval = min(STATUS_SECONDS_MAX, third) if third else STATUS_SECONDS_MAX
        return cls(label, interval, max(SILENCE_SECONDS_MIN, 4 * interval))

    def should_request_reply(self, last_message_at: float, *, reader_is_running: bool) -> bool:
        """Return whether the next status update should request a reply from the source.

        *last_message_at* is a time of `time.monotonic`. A reader that waits for room in memory does
        not run, so the source's messages stay unread. Raises SourceConnectionError after `silence`.
        """
        quiet = time.monotonic() - last_message_at
        if quiet > self.silence and reader_is_running:
            raise SourceConnectionError(f'source "{self.label}" has not answered for {quiet:.0f} s')
        return quiet > self.interval / 2
