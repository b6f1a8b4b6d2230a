"""Guards the preconditions of one source: its slot, its publications, replica identities.

The guard has its own connection, reads only catalogs and waits for no lock on a user's table. Mere
observations (partitions, heartbeats) have another connection and another task, see
`streamer.runtime.source_survey`. So a locked table cannot hide a lost slot.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import structlog

from streamer.apply.lane import MappedRelation
from streamer.error_reports import ErrorReport
from streamer.lsn import EVERYTHING, NOTHING, Lsn
from streamer.mapping.options import OnTableDropped
from streamer.mapping.renames import Obstacle
from streamer.mapping.resync import Resync
from streamer.mapping.rules import SourceMapping
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.dropped_tables import forget_dropped
from streamer.progress.relations import (
    demand_copy,
    fail_copy,
    read_bare,
    require_resync,
)
from streamer.progress.sources import set_source_state
from streamer.runtime.lag import Lag
from streamer.runtime.obstacles import Obstacles
from streamer.runtime.publications import Publishing, Verdicts
from streamer.runtime.relations import Relations
from streamer.runtime.renames import Following, Renamed, judge, rename_error
from streamer.runtime.services import Health
from streamer.source.catalog import SourceServer, flush_wal
from streamer.source.connection import Connection, connection, fetch_one, translating
from streamer.source.guard_query import GuardFacts, read_guard_facts
from streamer.source.slot import Slot, check_slot
from streamer.source.standbys import find_standby_wait
from streamer.source.timeline import check_same_server_plainly
from streamer.sync.coordinator import SyncCoordinator
from streamer.sync.states import State

if TYPE_CHECKING:
    from streamer.mapping.names import RelationName

log = structlog.get_logger()

STANDBY_SECONDS: Final = 4.0
"""How long changes may stay with the source before the guard asks why."""
GUARD_SECONDS: Final = 2.0
PAUSE_TIMES: Final = 20
"""After a look the guard pauses at least this many times as long as it took."""
_TIMEOUTS_SQL: Final = "set lock_timeout = '3s'; set statement_timeout = '60s'"


class SourceWatch:
    """The guard of one attempt to stream a source, and the consequences of its verdicts."""

    def __init__(
        self,
        source: SourceMapping,
        server: SourceServer,
        bookkeeping: Bookkeeping,
        relations: Relations,
        publishing: Publishing,
        health: Health,
        lag: Lag,
        source_id: int,
        *,
        target_namespace: str = "public",
        appeared: Callable[[str], None] = lambda _: None,
        unfollowed: Mapping[int, Obstacle] = MappingProxyType({}),
    ) -> None:
        """*appeared* is called with the source's label when a table has another name now.
        *unfollowed*: the obstacles of renamed tables, by relation id.
        """
        self._unfollowed = unfollowed
        self._target_namespace = target_namespace
        self._appeared = appeared
        self._source = source
        self._server = server
        self._bookkeeping = bookkeeping
        self._relations = relations
        self._obstacles = Obstacles(source, bookkeeping, relations)
        self._publishing = publishing
        self._health = health
        self._lag = lag
        self._source_id = source_id
        self._standby_wait: ErrorReport | None = None
        self._coordinator: SyncCoordinator | None = None
        self._newest_lsn: Callable[[], Lsn] = lambda: NOTHING
        self._blocked: dict[MappedRelation, ErrorReport | None] = {}
        self._is_unsettled = False
        self._knows_slot = False
        self._dropped: dict[MappedRelation, Lsn | None] = {}
        """Tables that a session dropped, with the end of their changes."""
        self._replaced: dict[MappedRelation, Lsn | None] = {}
        """The same, where another table has the name now."""
        self._successors: dict[MappedRelation, MappedRelation] = {}
        self._remove: Callable[[MappedRelation], Awaitable[None]] | None = None
        self.renamed: dict[MappedRelation, RelationName] = {}
        """Tables that have other names at the source now; a new attempt lets them follow."""

    def may_be_copied(self, mapped: MappedRelation) -> bool:
        """Whether *mapped*, which needs a copy, is published and needs no request for the copy."""
        if mapped.is_set_aside or mapped in self._blocked or self._is_away(mapped):
            return False
        # A pattern brought the new name of a table that is to follow.
        return mapped.mapping.source not in self.renamed.values()

    def _is_away(self, mapped: MappedRelation) -> bool:
        """Whether the source has no table of that name, but perhaps the table."""
        return mapped in self.renamed or mapped in self._dropped

    async def begin(self, plain: Connection) -> None:
        """Settle everything before the stream starts. Raises SourceContentionError too."""
        verdicts = await self._settle(plain)
        if verdicts.contention is not None:
            raise verdicts.contention

    def follow(
        self,
        coordinator: SyncCoordinator,
        newest_lsn: Callable[[], Lsn],
        remove: Callable[[MappedRelation], Awaitable[None]],
    ) -> None:
        """Let *coordinator* make the copies that become possible or necessary from now on.

        *newest_lsn* returns the end of the dispatched changes; *remove* takes a relation out of the
        stream.
        """
        self._remove = remove
        self._coordinator, self._newest_lsn = coordinator, newest_lsn
        self._publishing.is_being_copied = coordinator.is_at

    def know_slot(self, slot: Slot) -> None:
        """Report the slot, which a task of this source has just read and found usable."""
        self._knows_slot = True
        self._health.restart_lsn, self._health.safe_wal_bytes = (
            slot.restart_lsn,
            slot.safe_wal_bytes,
        )

    async def look(self, plain: Connection) -> None:
        """Settle everything now. Raises StreamerError."""
        await self._settle(plain)

    async def publish(self, relations: Iterable[MappedRelation]) -> None:
        """Publish *relations*, which need a copy; begin the copies of the published ones."""
        wanted = list(relations)
        for mapped in wanted:
            self._publishing.renew(mapped)
            self._blocked.setdefault(mapped, None)
        async with connection(self._source) as plain:
            await check_same_server_plainly(plain, self._server)
            await self._settle(plain)

    def replaced(self, mapped: MappedRelation) -> None:
        """The stream brings another table under the name of *mapped*, and nothing of it counts."""
        self._replaced.setdefault(mapped, None)

    async def run(self, looked: Callable[[], None]) -> None:
        """Guard until cancelled; *looked* is called after each look.

        Raises SlotMissingError, SlotInvalidatedError, SourceDivergedError, SourceConnectionError.
        """
        digest: str | None = None
        if self._knows_slot and not self._is_waiting:
            await asyncio.sleep(GUARD_SECONDS)  # the start has just looked at everything
        async with connection(self._source) as plain:
            await plain.execute(_TIMEOUTS_SQL)
            await check_same_server_plainly(plain, self._server)
            while True:
                began = time.monotonic()
                with translating(self._source.label):
                    names = [mapped.mapping.source for mapped in self._relations]
                    seen = await read_guard_facts(plain, self._source, names, self._server.version)
                    self._check_slot(seen)
                    self._relations.clock.measured(seen.clock_seconds, began, time.monotonic())
                    self._lag.saw_end(seen.flush_lsn, began)
                    await self._tell_standby_wait(plain)
                    await self._leave_replaced(plain)
                    self._expect_missing()
                    if seen.digest != digest or self._is_unsettled:
                        await self._settle(plain)
                        digest = seen.digest  # read before: the next look sees later changes
                    await self._let_go(plain)
                took = time.monotonic() - began
                looked()
                await asyncio.sleep(max(GUARD_SECONDS, PAUSE_TIMES * took))

    @property
    def _is_waiting(self) -> bool:
        """Whether a look has left something for the next one."""
        return bool(
            self._is_unsettled or self._blocked or self._dropped or self._replaced or self.renamed
        )

    def _check_slot(self, seen: GuardFacts) -> None:
        self._health.wal_end_lsn = max(self._health.wal_end_lsn, seen.flush_lsn)
        check_slot(seen.slot, self._source.slot, self._server.database)
        assert seen.slot is not None
        self.know_slot(seen.slot)

    async def _tell_standby_wait(self, plain: Connection) -> None:
        """Show that the source holds changes back until its standbys have them."""
        since = self._lag.undelivered_since
        error = None
        if since is not None and time.monotonic() - since > STANDBY_SECONDS:
            error = await find_standby_wait(plain, self._source)
        report = None if error is None else ErrorReport.of(error)
        if report == self._standby_wait:
            return
        self._standby_wait = report
        state = "streaming" if report is None else "waiting"
        self._health.state, self._health.error = state, report
        if error is not None:
            log.warning(str(error), source=self._source.label, **error.log_fields)
        await set_source_state(self._bookkeeping, self._source_id, state, report)

    async def _leave_replaced(self, plain: Connection) -> None:
        """Copy the tables that took the place of others, or stop, once the target has all changes
        of the former ones.
        """
        for mapped, end_lsn in list(self._replaced.items()):
            if end_lsn is None:
                self._replaced[mapped] = end_lsn = await flush_wal(plain)
            if mapped not in self._relations:
                del self._replaced[mapped]
                continue
            if not self._has_all(mapped, end_lsn) or self._successors.get(mapped) in self._dropped:
                continue
            self._is_unsettled = True
            if mapped.skip_through_lsn != EVERYTHING:  # not stopped, and no copy is requested
                await self._go_over_to_successor(mapped)
            del self._replaced[mapped]

    async def _go_over_to_successor(self, mapped: MappedRelation) -> None:
        if mapped.mapping.rule.on_table_dropped is OnTableDropped.STOP:
            error = self._publishing.replaced(mapped)
            await require_resync(self._bookkeeping, mapped.relation_id, error)
            self._stop(mapped, error)
            return
        mapped.resync = Resync()
        await demand_copy(self._bookkeeping, mapped.relation_id, mapped.resync)
        self._log_copy(mapped, "its table was dropped, and another one has the name")
        await self._copy_again(mapped, may_begin=False)
        mapped.relid = None  # the next look finds the table that the name has
        self._blocked.setdefault(mapped, None)

    def _expect_missing(self) -> None:
        """Request copies as soon as the source has the tables that they lacked."""
        while self._relations.missing:
            mapped = self._relations.missing.pop()
            if mapped.skip_through_lsn == EVERYTHING:
                mapped.relid = None  # the next look finds the table that the name has
            self._blocked.setdefault(mapped, None)
            self._is_unsettled = True

    async def _let_go(self, plain: Connection) -> None:
        """Forget dropped tables as soon as the target has all their changes."""
        for mapped, end_lsn in list(self._dropped.items()):
            if end_lsn is None:
                self._dropped[mapped] = end_lsn = await flush_wal(plain)
            if not self._has_all(mapped, end_lsn):
                continue
            assert self._coordinator is not None
            assert self._remove is not None
            rule, table = mapped.mapping.rule, str(mapped.mapping.source)
            closes = rule.on_table_dropped is OnTableDropped.CLOSE
            now = await fetch_one(plain, "select pg_catalog.clock_timestamp()::text as now")
            is_bare = bool(await read_bare(self._bookkeeping, [mapped.relation_id]))
            self._coordinator.give_up(mapped)
            await self._remove(mapped)
            del self._dropped[mapped]
            await forget_dropped(
                self._bookkeeping,
                mapped.relation_id,
                mapped.mapping.target,
                mapped.source.sid,
                ends_at=now["now"] if closes and not is_bare else None,
            )
            if is_bare:
                log.info(
                    "table is gone before its first copy", source=self._source.label, table=table
                )
                continue
            log.warning(
                "table was dropped at the source, and its target keeps the rows",
                source=self._source.label,
                table=table,
                on_table_dropped=rule.on_table_dropped.value,
            )

    def _has_all(self, mapped: MappedRelation, end_lsn: Lsn) -> bool:
        """Whether the target has the changes of *mapped* up to *end_lsn*, or cannot get them."""
        if mapped.skip_through_lsn == EVERYTHING:
            return True
        pending = self._relations.lane(mapped).pending.flush_lsn_max
        return self._newest_lsn() >= end_lsn and (pending is None or pending >= end_lsn)

    # ---- verdicts ------------------------------------------------------------------------------

    async def _settle(self, plain: Connection) -> Verdicts:
        verdicts = await self._publishing.settle(plain)
        self._is_unsettled = verdicts.contention is not None or verdicts.is_unsettled
        away = [*self._dropped, *self.renamed]
        self._dropped = {mapped: self._dropped.get(mapped) for mapped in verdicts.dropped}
        self._replaced |= dict.fromkeys(verdicts.replaced - self._replaced.keys())
        self._successors = verdicts.successors
        await self._judge_renames(verdicts)
        for mapped in away:
            if not self._is_away(mapped) and mapped in self._relations:
                self._blocked.setdefault(mapped, None)  # it has its name back
        for mapped, error in verdicts.stopped.items():
            self._stop(mapped, error)
        for mapped, reason in verdicts.copied.items():
            self._log_copy(mapped, reason)
            await self._copy_again(mapped, may_begin=mapped not in verdicts.blocked)
        for mapped, (reason, _) in verdicts.copied_at_point.items():
            self._log_copy(mapped, reason)
        if verdicts.contention is not None:
            log.warning("waiting", source=self._source.label, reason=str(verdicts.contention))
            return verdicts
        await self._block(verdicts.blocked)
        return verdicts

    async def _judge_renames(self, verdicts: Verdicts) -> None:
        """Stop the renamed tables that cannot follow, and have a new attempt for the others."""
        before, self.renamed = self.renamed, verdicts.renamed
        for mapped in before.keys() - self.renamed.keys():  # it has its name back
            if mapped.obstacle is not None and mapped in self._relations:
                await self._obstacles.remove(mapped)
        if not self.renamed:
            return
        moves = [
            Renamed(mapped.relation_id, mapped.mapping.source, mapped.mapping.target, now)
            for mapped, now in self.renamed.items()
        ]
        names = [mapped.mapping.source for mapped in self._relations]
        steps = await judge(self._bookkeeping, self._source, moves, names, self._target_namespace)
        for mapped, now in self.renamed.items():
            mapping = mapped.mapping
            step = self._unfollowed.get(mapped.relation_id, steps[mapped.relation_id])
            if isinstance(step, Following):
                self._appeared(self._source.label)
                continue
            found = rename_error(mapping.source, now, step)
            if mapped.skip_through_lsn == EVERYTHING:  # no changes of it are held
                if not mapped.is_set_aside:
                    verdicts.blocked[mapped] = ErrorReport.of(found)
                continue
            await self._obstacles.stop(mapped, found)

    def _stop(self, mapped: MappedRelation, error: ErrorReport) -> None:
        log.error(
            "table stopped",
            source=self._source.label,
            table=str(mapped.mapping.source),
            error=error.text,
            **error.log_fields,
        )
        self._relations.set_aside(mapped)
        if self._relations.state(mapped) is not State.PAUSED:
            self._relations.set_state(mapped, State.ERROR, error)

    def _log_copy(self, mapped: MappedRelation, reason: str) -> None:
        log.warning(
            "table is copied again",
            source=self._source.label,
            table=str(mapped.mapping.source),
            reason=reason,
        )

    async def _copy_again(self, mapped: MappedRelation, *, may_begin: bool) -> None:
        self._publishing.renew(mapped)
        is_paused = self._relations.state(mapped) is State.PAUSED
        if not is_paused:
            self._relations.set_state(mapped, State.INIT)
        if self._coordinator is None:  # the stream has not begun, and with it come the copies
            self._relations.hold_for_copy(mapped)
            return
        self._coordinator.give_up(mapped)
        await self._relations.hold_until_settled(mapped, self._newest_lsn())
        self._publishing.know_table(mapped)
        if not is_paused and may_begin:
            self._coordinator.request(mapped)

    async def _block(self, blocked: dict[MappedRelation, ErrorReport]) -> None:
        """Report the tables that cannot be copied yet, and copy those that can by now."""
        before, self._blocked = self._blocked, {}
        for mapped, error in blocked.items():
            if self._coordinator is not None and self._coordinator.is_at(mapped):
                continue  # the copy will say so, or the next look after it
            self._blocked[mapped] = error
            if before.get(mapped) == error:
                continue
            log.error(
                "table cannot be copied",
                source=self._source.label,
                table=str(mapped.mapping.source),
                error=error.text,
                **error.log_fields,
            )
            await fail_copy(self._bookkeeping, mapped.relation_id, error)
            self._relations.set_state(mapped, State.ERROR, error)
        for mapped in before:
            if mapped not in self._relations or self._coordinator is None:
                continue
            if self._relations.awaits_copy(mapped) and self.may_be_copied(mapped):
                if not mapped.is_held_to_point:
                    self._relations.set_state(mapped, State.INIT)
                self._coordinator.request(mapped)
