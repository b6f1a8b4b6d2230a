"""What a start waits for: a password, the turn of a new source to copy, sessions of the source."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Final

from streamer.bookkeeping.sources import set_source_state
from streamer.copy.source_turns import CopyingSource, CopyTurn
from streamer.errors.error_classes import SourceContentionError, SourcePasswordError, StreamerError
from streamer.errors.error_reports import ErrorReport
from streamer.mapping.rule_options import Initial
from streamer.mapping.rules import RelationMapping
from streamer.postgres.credentials import awaited_password
from streamer.runtime.session.attempt import Attempt
from streamer.runtime.tables.relations import resolve_at
from streamer.source.reached_server import ServerIdentity

PASSWORD_REPORT_SECONDS: Final = 1.0
"""How often `status` learns that a start waits for a password."""


class StartWaits:
    """Waits and reports for one attempt. Owns the copy turn until the session takes the turn."""

    def __init__(self, attempt: Attempt) -> None:
        self.turn: CopyTurn | None = None
        self._attempt = attempt
        self._source = attempt.source
        self._services = attempt.services

    async def show(self, reason: ErrorReport | None = None, waiting_for: str | None = None) -> None:
        """Store that the source starts, and the reason why the start waits.

        A start after an error leaves the error visible, because the attempt may end with the error.
        """
        bookkeeping, source_id = self._services.bookkeeping, self._attempt.fence.source_id
        state, health = "starting", self._attempt.health
        if reason is None and waiting_for is None and health.state == "error":
            state, reason = health.state, health.error
        await set_source_state(bookkeeping, source_id, state, reason, waiting_for=waiting_for)

    async def report(self, awaited: str, code: str = SourceContentionError.code) -> None:
        """Store that the start waits for *awaited*: sessions of the source, or its password."""
        await self.show(ErrorReport(f"the start waits for {awaited}", code), awaited)

    @contextlib.asynccontextmanager
    async def reporting_password(self) -> AsyncIterator[None]:
        """Report, during the block, that connections wait for their password."""
        reporting = asyncio.create_task(self._report_password(), name="password wait")
        try:
            yield
        finally:
            reporting.cancel()
            await asyncio.wait([reporting])

    async def _report_password(self) -> None:
        with contextlib.suppress(StreamerError):
            while True:
                await asyncio.sleep(PASSWORD_REPORT_SECONDS)
                if (awaited := awaited_password(self._source.url)) is not None:
                    await self.report(awaited, SourcePasswordError.code)

    async def acquire_turn(self, server: ServerIdentity) -> None:
        """Wait for the copy turn of a new source at *server*, if all its tables need a copy.

        The source has no slot yet: until the turn comes, a slot would retain WAL, and its snapshot
        old row versions. The method acquires a free turn without a query. If no copy is due after
        all, the start ends the turn.
        """
        source, services = self._source, self._services
        copying = CopyingSource(source.label, server, is_first=True)
        self.turn = services.copy_turns.acquire_free(copying)
        if self.turn is not None:
            return
        async with services.sources.connection(source) as plain:
            mappings, definitions, _ = await resolve_at(plain, source, services.target_namespace)
        if not copies_all(mappings):
            return
        size = sum(definitions[m.source].size_bytes for m in mappings if m.source in definitions)
        self.turn = await services.copy_turns.acquire(
            copying, source.priority, size, self._report_turn
        )
        self._attempt.health.waiting_for = None

    async def _report_turn(self, reason: str) -> None:
        self._attempt.release_permit()
        self._attempt.health.waiting_for = reason
        await self.show(waiting_for=reason)

    def end_turn(self) -> None:
        if self.turn is not None:
            self.turn.end()
            self.turn = None


def copies_all(mappings: Iterable[RelationMapping]) -> bool:
    """Whether each table needs a first copy. Pure.

    A table without a first copy follows the source from the slot on, so such a source needs its
    slot at once.
    """
    return all(mapping.rule.initial is not Initial.NONE for mapping in mappings)
