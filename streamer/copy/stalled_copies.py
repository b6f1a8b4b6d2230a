"""The status of copies that make no progress: obstacles and errors."""

from collections import Counter
from collections.abc import Iterable

import structlog

from streamer.apply.lanes.lane import MappedRelation
from streamer.bookkeeping.relation_states import set_copy_error
from streamer.copy.copy_context import CopyContext
from streamer.errors.error_reports import ErrorReport, TableWait
from streamer.source.server.wait_limits import Reported

log = structlog.get_logger()


class CopyReports:
    """Shows why copies of a source wait or fail."""

    def __init__(self, context: CopyContext) -> None:
        self._context = context
        self._reported = Reported()
        self._delayed: dict[MappedRelation, int] = {}
        """Copies in progress with an error, and the number of finished parts at the error."""
        self._done: Counter[int] = Counter()
        """The number of finished parts, by relation id."""

    async def show_wait(self, relations: Iterable[MappedRelation], wait: TableWait | None) -> None:
        """Show what copies wait for: a session or a turn. None ends the wait."""
        relations = list(relations)
        tables = [str(mapped.mapping.source) for mapped in relations]
        if wait is not None and not wait.is_automatic and self._reported.is_new(str(wait), *tables):
            label = self._context.label
            log.warning("copies wait", source=label, tables=tables, waiting_for=str(wait))
        await self._context.events.copies_wait(relations, wait)

    async def show_sessions(self, relations: Iterable[MappedRelation], sessions: str) -> None:
        """Show the *sessions* of the source that copies wait for."""
        await self.show_wait(relations, TableWait(sessions))

    async def show_error(
        self, relations: Iterable[MappedRelation], error: ErrorReport | None
    ) -> None:
        """Show why copies in progress make no progress; None removes the error."""
        relations = list(relations)
        ids = [mapped.relation_id for mapped in relations]
        await set_copy_error(self._context.bookkeeping, ids, error)
        for mapped in relations:
            self._context.events.step(mapped, lambda state: state.delayed(error))
            if error is not None:
                self._delayed[mapped] = self._done[mapped.relation_id]
            else:
                self._delayed.pop(mapped, None)

    def begin_round(self, relations: Iterable[MappedRelation]) -> None:
        """Reset the counts for a round that copies all parts of *relations* again."""
        for mapped in relations:
            self._done.pop(mapped.relation_id, None)
            if mapped in self._delayed:
                self._delayed[mapped] = 0

    async def show_progress(self, done: Counter[int]) -> None:
        """Clear the error of each copy that finished a further part. *done*: as `_done`."""
        self._done.update({number: count - self._done[number] for number, count in done.items()})
        advanced = [m for m, parts in self._delayed.items() if done[m.relation_id] > parts]
        if advanced:
            await self.show_error(advanced, None)
