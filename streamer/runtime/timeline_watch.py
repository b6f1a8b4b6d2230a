"""Stores the timeline of a standby that is a source, before the target's changes need it.

While a standby streams, it can follow another primary or become one, and its timeline changes. The
target then gets changes from behind the fork. The next start would take them for commits that the
source has lost, so the bookkeeping needs the new timeline before.

The connection of the watch tells the server's identity when the attempt begins, and lives as long
as the attempt. So one run of the server sends everything that the attempt receives. A run replays
one history: it never goes back behind a fork.

The reader looks after it has received changes, and before it passes them on. A standby sends only
changes that it has replayed. So if it replays the known timeline at that look, these changes are
part of it. A kill therefore never leaves a change from behind a fork without its timeline. Earlier
changes are part of the new timeline only if the fork is not before them.

PostgreSQL's GetStandbyFlushRecPtr: IDENTIFY_SYSTEM tells a standby's replayed timeline, not the
received one.
"""

import asyncio
import contextlib
from dataclasses import replace
from typing import Final

import structlog

from streamer.errors import SourceConnectionError, StreamerError
from streamer.lsn import Lsn
from streamer.mapping.rules import SourceMapping
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.sources import follow_timeline
from streamer.source.catalog import SourceServer
from streamer.source.connection import Connection, translating
from streamer.source.timeline import read_branch, read_timeline
from streamer.source.timeline_branches import Branch, common_end
from streamer.target.claim import Claim

log = structlog.get_logger()

LOOK_SECONDS: Final = 2.0
LAST_LOOK_SECONDS: Final = 2.0


class TimelineWatch:
    """Looks at the timeline of one standby during one attempt to stream it."""

    def __init__(
        self,
        source: SourceMapping,
        server: SourceServer,
        branch: Branch,
        connection: Connection,
        bookkeeping: Bookkeeping,
        claim: Claim,
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
        self._claim = claim
        self._held_lsn = held_lsn
        self._looking = asyncio.Lock()
        self._change: str | None = None
        """The message about another timeline that a look has found."""

    async def run(self) -> None:
        """Look until cancelled, and once more then: copies store positions beside the reader.

        Raises SourceConnectionError when the timeline has changed: the attempt's place is another.
        """
        while True:
            try:
                await asyncio.sleep(LOOK_SECONDS)
            except asyncio.CancelledError:
                with contextlib.suppress(StreamerError, TimeoutError):
                    async with asyncio.timeout(LAST_LOOK_SECONDS):
                        await self.look()
                raise
            await self.look()

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    async def look(self) -> None:
        """Store the timeline if it has changed. Raises SourceConnectionError then."""
        async with self._looking:
            if self._change is None:
                self._change = await self._find_change()
        if self._change is not None:
            raise SourceConnectionError(self._change)

    async def _find_change(self) -> str | None:
        label, known = self._source.label, self._server.timeline
        with translating(label):
            timeline = await read_timeline(self._connection)
            if timeline == known:
                return None
            now = await read_branch(self._connection, replace(self._server, timeline=timeline))
        fork_lsn = common_end(self._branch, now)
        if fork_lsn is not None and self._held_lsn <= fork_lsn:
            await follow_timeline(self._bookkeeping, self._claim, known, timeline, now.text)
            log.info("the standby follows another timeline", source=label, timeline=timeline)
        return f'source "{label}": the server went over from timeline {known} to {timeline}'
