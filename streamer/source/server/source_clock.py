"""The clock of a source's server, measured against the clock of this process.

A commit time comes from the server's clock, which may be an hour off. The age of a commit needs the
difference of the clocks. Ages use `time.monotonic`, so steps of this machine's clock do not matter.

Pure.
"""

from typing import Final

from streamer.decode.pgoutput import to_datetime

CLOCK_SQL: Final = "extract(epoch from pg_catalog.clock_timestamp())::float8"


class SourceClock:
    """Converts a commit time to the clock of `time.monotonic`."""

    def __init__(self) -> None:
        self._offset_seconds: float | None = None

    def measured(self, server_seconds: float, began: float, ended: float) -> None:
        """Record that the server's clock showed *server_seconds* between the moments *began* and
        *ended*.
        """
        self._offset_seconds = server_seconds - (began + ended) / 2

    def moment_of(self, commit_time: int) -> float | None:
        """Return the moment of a protocol time; None for no time, or before a measurement."""
        if not commit_time or self._offset_seconds is None:
            return None
        return to_datetime(commit_time).timestamp() - self._offset_seconds
