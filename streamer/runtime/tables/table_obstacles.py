"""Tables in sync that cannot continue for now. Such a table stops, and its changes wait."""

import structlog

from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.rows.make_plan import unlogged_error
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.relation_states import set_streaming_states
from streamer.control.table_state import State
from streamer.errors.error_classes import StreamerError
from streamer.errors.error_reports import ErrorReport
from streamer.mapping.rules import SourceMapping
from streamer.runtime.tables.relations import Relations
from streamer.target.catalog import Unlogged
from streamer.util.lsn import LSN_MAX

log = structlog.get_logger()


class Obstacles:
    """Obstacles to the tables of a source."""

    def __init__(
        self, source: SourceMapping, bookkeeping: Bookkeeping, relations: Relations
    ) -> None:
        self._source = source
        self._bookkeeping = bookkeeping
        self._relations = relations
        self._unlogged: set[MappedRelation] = set()

    async def stop(self, mapped: MappedRelation, error: StreamerError) -> None:
        """Stop *mapped* for the reason *error* until `remove` is called, even if already stopped.

        Changes of the table wait, because the next plan for these changes meets the obstacle.
        """
        is_new = mapped.obstacle is None
        kind, message, remedy = type(error), error.message, error.remedy
        # Without the obstacle, a drained lane would call the table ready.
        mapped.obstacle = lambda: kind(message, hint=remedy)
        mapped.plan = None
        if is_new:
            report = ErrorReport.of(error)
            log.error(
                "table stopped",
                source=self._source.label,
                table=str(mapped.mapping.source),
                error=report.text,
                **report.log_fields,
            )
            self._relations.become(mapped, mapped.state.failing(report))
            outcome = {mapped.relation_id: (State.ERROR, report)}
            await set_streaming_states(self._bookkeeping, outcome)

    async def remove(self, mapped: MappedRelation) -> None:
        """Continue *mapped*."""
        mapped.obstacle = None
        self._relations.become(mapped, mapped.state.drained())
        await set_streaming_states(self._bookkeeping, {mapped.relation_id: (State.READY, None)})

    async def check_target(self, unlogged: Unlogged) -> None:
        """Stop tables whose target is *unlogged*; continue tables whose target is logged again."""
        for mapped in list(self._unlogged):
            if mapped.mapping.target not in unlogged:
                self._unlogged.remove(mapped)
                if mapped in self._relations:
                    await self.remove(mapped)
        for mapped in list(self._relations):
            names = unlogged.get(mapped.mapping.target)
            # Until the first copy ends, the copy reports an unfit target.
            if names is None or mapped.skip_through_lsn == LSN_MAX:
                continue
            if mapped.obstacle is None or mapped in self._unlogged:
                self._unlogged.add(mapped)
                await self.stop(mapped, unlogged_error(mapped.mapping.target, names))
