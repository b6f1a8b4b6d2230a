"""Stores the timeline of a standby that is a source, before the target contains changes of that
timeline.

While a standby streams, it can follow a new primary or become a primary, and its timeline changes.
The target then gets changes from after the fork. The next start would treat these changes as
commits that the source has lost. So streamer stores the new timeline first.

The connection of the monitor checks the server's identity when the attempt begins, and lives as
long as the attempt. So a single run of the server sends all changes of the attempt. A run replays a
single history, and never returns to a position before a fork.

The reader checks the timeline after it has received changes, and before it passes them on. A
standby sends only changes that it has replayed. So if the standby replays the known timeline at
that check, these changes are part of this timeline. A kill therefore never leaves a change from
after a fork without its timeline. Earlier changes belong to the new timeline only if they precede
the fork.

PostgreSQL's GetStandbyFlushRecPtr: IDENTIFY_SYSTEM reports a standby's replayed timeline, not the
received timeline.
"""

import asyncio
import contextlib
from dataclasses import replace
from typing import Final

import structlog

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.sources import follow_timeline
from streamer.errors.error_classes import SourceConnectionError, StreamerError
from streamer.mapping.rules import SourceMapping
from streamer.source.catalog import SourceServer
from streamer.source.connection import Connection, translating
from streamer.source.server.timeline import read_branch, read_timeline
from streamer.source.timeline_branches import Branch, common_end
from streamer.target.fencing_token import FencingToken
from streamer.util.lsn import Lsn

log = structlog.get_logger()

CHECK_SECONDS: Final = 2.0
LAST_CHECK_SECONDS: Final = 2.0


class TimelineMonitor:
    """Checks the timeline of a standby during one attempt to stream the standby."""

    def __init__(
        self,
        source: SourceMapping,
        server: SourceServer,
        branch: Branch,
        connection: Connection,
        bookkeeping: Bookkeeping,
        fence: FencingToken,
        held_lsn: Lsn,
    ) -> None:
        """*connection*: the replication connection that read *server*. *held_lsn*: the newest
        position of the source that the target had when the attempt began.
        """
        self._source = source
        self._server = server
        self._branch = branch
        self._connection = connection
        self._bookkeeping = bookkeeping
        self._fence = fence
        self._held_lsn = held_lsn
        self._checking = asyncio.Lock()
        self._change: str | None = None
        """The message about a new timeline that a check has found."""

    async def run(self) -> None:
        """Check until cancelled, then once more, because copies store positions without the reader.

        Raises SourceConnectionError when the timeline has changed.
        """
        while True:
            try:
                await asyncio.sleep(CHECK_SECONDS)
            except asyncio.CancelledError:
                with contextlib.suppress(StreamerError, TimeoutError):
                    async with asyncio.timeout(LAST_CHECK_SECONDS):
                        await self.check()
                raise
            await self.check()

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    async def check(self) -> None:
        """Store a changed timeline. Raises SourceConnectionError then."""
        async with self._checking:
            if self._change is None:
                self._change = await self._find_change()
        if self._change is not None:
            raise SourceConnectionError(self._change)

    async def _find_change(self) -> str | None:
        label, former = self._source.label, self._server.timeline
        with translating(label):
            timeline = await read_timeline(self._connection)
            if timeline == former:
                return None
            now = await read_branch(self._connection, replace(self._server, timeline=timeline))
        fork_lsn = common_end(self._branch, now)
        if fork_lsn is not None and self._held_lsn <= fork_lsn:
            await follow_timeline(self._bookkeeping, self._fence, former, timeline, now.text)
            log.info("the standby follows a new timeline", source=label, timeline=timeline)
        return f'source "{label}": the server switched from timeline {former} to {timeline}'
