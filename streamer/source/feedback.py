"""How often a source hears from us, and how long it may be silent before it counts as gone.

A walsender ends a connection that was silent for ``wal_sender_timeout``, and asks for an answer at
half of that. A pipeline sends status updates at least three times as often, and asks for a reply
when the source has sent nothing for a few seconds. Without one the source is reported as silent
after `SILENT_SECONDS`, and given up much later, because a network may recover.
"""

import time
from dataclasses import dataclass
from typing import Final

from streamer.errors import SourceConnectionError

# A source in order is heard at the latest after one and a half intervals. Screens show a silent one
# `SILENT_SECONDS` after its last message. With the page's own waits that stays below 12 s.
STATUS_SECONDS_MAX: Final = 3.0
SILENT_SECONDS: Final = 6.0
SILENCE_SECONDS_MIN: Final = 60.0


@dataclass(frozen=True, slots=True)
class Feedback:
    """When to tell, and when to give up."""

    label: str
    interval: float
    """Seconds between status updates."""
    silence: float
    """After so many seconds without a message although one was asked for, the source is gone."""

    @classmethod
    def of(cls, label: str, wal_sender_timeout_seconds: float) -> "Feedback":
        """Go by the server's setting, where 0 is no time-out."""
        third = wal_sender_timeout_seconds / 3
        interval = min(STATUS_SECONDS_MAX, third) if third else STATUS_SECONDS_MAX
        return cls(label, interval, max(SILENCE_SECONDS_MIN, 4 * interval))

    def should_request_reply(self, last_message_at: float, *, reader_is_running: bool) -> bool:
        """Return whether the next status update should request a reply from the source.

        *last_message_at* is a time of `time.monotonic`. A reader that waits for room in memory does
        not run, so the source cannot be heard. Raises SourceConnectionError when it is gone.
        """
        quiet = time.monotonic() - last_message_at
        if quiet > self.silence and reader_is_running:
            raise SourceConnectionError(f'source "{self.label}" has not answered for {quiet:.0f} s')
        return quiet > self.interval / 2
