"""A heartbeat measures how long a commit takes to become visible, even at an idle source.

Every few seconds streamer commits an empty transaction with a logical message at the source. The
heartbeat comes through slot and stream like any transaction, and counts as arrived when all earlier
changes are durable in the target. At most one heartbeat is in flight, so streamer writes no WAL for
a stalled stream. The age of the present heartbeat shows how long the stream has stalled.

The sources of a process that are databases of one server share their heartbeats. All databases of a
server share its WAL, so every walsender passes every heartbeat. If each of 200 sources sent
heartbeats, each walsender would wake up forty times a second.

All times come from this machine's clock, because the clocks of the two servers may differ.
Measuring begins before the request for the commit: on an idle source the heartbeat may arrive
before the answer to that request.
"""

import asyncio
import math
import time
from typing import Final

import structlog

from streamer.control.progress_tracker import ProgressTracker
from streamer.errors.error_classes import Retry, SourceConnectionError, SourceError
from streamer.mapping.rules import SourceMapping
from streamer.report.problems import OVERDUE_SECONDS
from streamer.runtime.services import Services
from streamer.runtime.tables.lag import Lag
from streamer.source.catalog import SourceServer
from streamer.source.connection import Connection, names_several_hosts, translating
from streamer.source.server.primary_of_standby import connection_to_primary
from streamer.source.stream.emit_heartbeat import emit_heartbeat, heartbeat_obstacle
from streamer.util.lsn import INVALID_LSN, Lsn
from streamer.util.repeated_notices import end_notice, give_notice

log = structlog.get_logger()

_OFF: Final = "heartbeats are off"
PRIMARY_RETRY_SECONDS: Final = 5.0


class ServerBeats:
    """The heartbeats of the sources that are databases of one server."""

    def __init__(self) -> None:
        self.began_at = -math.inf
        """The monotonic time at which the process began to send the last heartbeat."""
        self.receivers: dict[Heartbeat, Lag] = {}

    def sent(self, lsn: Lsn, began_at: float) -> None:
        """Make each source without a heartbeat in flight wait for the heartbeat at *lsn*."""
        for heartbeat, lag in self.receivers.items():
            lag.record_end(lsn, began_at)
            heartbeat.sent(lsn, began_at, lag.tracker)


class Heartbeat:
    """The heartbeats of one attempt to stream a source."""

    def __init__(self, source: SourceMapping, services: Services) -> None:
        self.arrived_seconds: float | None = None
        """How long the last heartbeat that arrived took."""
        self._source = source
        interval = source.heartbeat_interval
        self._interval = services.heartbeat_interval if interval is None else interval
        self._by_server = services.heartbeats
        self._target = services.target
        self.confirmed_at: float | None = None
        """The monotonic time at which the process sent the last heartbeat that arrived."""
        self._sent_at: float | None = None
        self._lsn = INVALID_LSN

    async def run(self, plain: Connection, server: SourceServer, lag: Lag) -> None:
        """Beat until cancelled; return at once where heartbeats are impossible.

        The heartbeats of a standby begin at its primary, if the url lists the primary. A primary
        that is down does not end the stream. Raises SourceConnectionError when the source is lost.
        """
        if not self._interval:
            return
        if not (server.in_recovery and names_several_hosts(self._source)):
            await self._run_over(plain, server, lag)
            return
        while True:
            try:
                async with connection_to_primary(self._source, plain) as primary:
                    await self._run_over(primary, server, lag)
                return
            except SourceError as exc:
                if exc.retry is not Retry.TIMED:
                    self._log_off(str(exc))
                    return
                self._log_off(f"{exc}; streamer tries again")
            await asyncio.sleep(max(self._interval, PRIMARY_RETRY_SECONDS))

    async def _run_over(self, plain: Connection, server: SourceServer, lag: Lag) -> None:
        """Send heartbeats over *plain*, a session at *server* or, for a standby, at its primary."""
        with translating(self._source.label):
            obstacle = await heartbeat_obstacle(plain)
        if obstacle is not None:
            self._log_off(obstacle)
            return
        beats = self._by_server.setdefault(server.identity, ServerBeats())
        beats.receivers[self] = lag
        try:
            await self._share(plain, beats)
        except SourceError as exc:
            if isinstance(exc, SourceConnectionError) or exc.retry is Retry.TIMED:
                raise
            self._log_off(str(exc))
        finally:
            del beats.receivers[self]
            if not beats.receivers:
                self._by_server.pop(server.identity, None)

    async def _share(self, plain: Connection, beats: ServerBeats) -> None:
        """Send a heartbeat for all sources of the server, unless a heartbeat is very recent."""
        while True:
            wait = beats.began_at + self._interval - time.monotonic()
            if wait <= 0 and self._sent_at is None:
                await self._beat(plain, beats)
                end_notice(_OFF, self._source.label)
            await asyncio.sleep(wait if wait > 0 else self._interval)

    def _log_off(self, obstacle: str) -> None:
        give_notice(log.warning, _OFF, self._source.label, reason=obstacle)

    async def _beat(self, plain: Connection, beats: ServerBeats) -> None:
        beats.began_at = began = time.monotonic()
        beats.sent(await emit_heartbeat(plain, self._source.label), began)

    def sent(self, lsn: Lsn, began_at: float, tracker: ProgressTracker) -> None:
        """Record that a heartbeat at *lsn* is in flight, since *began_at*."""
        if self._sent_at is None:
            self._lsn, self._sent_at = lsn, began_at
            self.check_arrival(tracker)

    def check_arrival(self, tracker: ProgressTracker) -> None:
        """Check whether the heartbeat has arrived."""
        # The heartbeat's message lies before the end of its commit: a position equal to its LSN is
        # too early.
        if self._sent_at is not None and tracker.flush_lsn > self._lsn:
            self.arrived_seconds = time.monotonic() - self._sent_at
            self.confirmed_at = self._sent_at
            self._sent_at = None

    @property
    def travelling_seconds(self) -> float:
        """How long the present heartbeat has been in flight; 0 without a heartbeat."""
        return 0.0 if self._sent_at is None else time.monotonic() - self._sent_at

    @property
    def seconds(self) -> float | None:
        """The present delay of a commit: the longer of the last heartbeat and the one in flight.

        With no change in flight, a heartbeat arrives without a commit at the target. So the delay
        is at least the time since the target last confirmed a write.
        """
        waited = max(self.travelling_seconds, self._target.silent_seconds)
        if self.arrived_seconds is None:
            return waited or None
        return max(self.arrived_seconds, waited)

    @property
    def overdue_seconds(self) -> float | None:
        """How long the present heartbeat has been in flight, if too long."""
        waited = max(self.travelling_seconds, self._target.silent_seconds)
        return waited if waited > OVERDUE_SECONDS else None
