"""Executes the cases of a source's tables (`streamer.runtime.guards.reconcile`) in the running
process.

A case that a single check cannot finish stays open:

- *renamed*: until a new attempt lets the relation follow, or the table regains its name.
- *dropped*: until the target contains the last changes of the table.
- *replaced*: as *dropped*. Then the relation copies the table with the name now, or stops.
- *block*: until streamer can publish the table. The copy begins then.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

import structlog

from streamer.apply.lanes.lane import MappedRelation
from streamer.bookkeeping.relation_records import read_bare
from streamer.bookkeeping.relation_states import block_copy, demand_copy, require_resync
from streamer.control.resync_options import Resync
from streamer.copy.copy_coordinator import SyncCoordinator
from streamer.errors.error_reports import ErrorReport
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rename_targets import Following, Obstacle, Renamed, rename_error
from streamer.mapping.rule_options import OnTableDropped
from streamer.runtime.guards.follow_renames import judge_renames
from streamer.runtime.guards.publication_plan import Case, Fate
from streamer.runtime.guards.publications import Publishing, Reconciled
from streamer.runtime.guards.reconcile import stop_replaced
from streamer.runtime.services import Services
from streamer.runtime.tables.table_events import TableEvents
from streamer.runtime.tables.table_obstacles import Obstacles
from streamer.schema_changes.dropped_tables import forget_dropped
from streamer.source.catalog import SourceServer, flush_wal
from streamer.source.connection import Connection, connection, fetch_one
from streamer.source.server.timeline import check_same_server_by_query
from streamer.util.lsn import LSN_MAX, Lsn

log = structlog.get_logger()


@dataclass(slots=True)
class _Open:
    """An open case."""

    case: Case
    end_lsn: Lsn | None = None
    """The end of the changes of a dropped or replaced table, once known."""
    reported: ErrorReport | None = None
    """The last reported reason why no copy of the table can begin."""


class TableCases:
    """The open cases of one attempt to stream a source, and the consequences of all cases."""

    def __init__(
        self,
        server: SourceServer,
        services: Services,
        tables: TableEvents,
        publishing: Publishing,
        unfollowed: Mapping[int, Obstacle],
    ) -> None:
        """*unfollowed*: the obstacles of renamed tables, by relation id."""
        self._server = server
        self._services = services
        self._tables = tables
        self._relations = tables.relations
        self._publishing = publishing
        self._unfollowed = unfollowed
        self._bookkeeping = services.bookkeeping
        self._obstacles = Obstacles(tables.source, services.bookkeeping, tables.relations)
        self._open: dict[MappedRelation, _Open] = {}
        self._coordinator: SyncCoordinator | None = None
        self._remove: Callable[[MappedRelation], Awaitable[None]] | None = None
        self.is_incomplete = False
        """The last check has left tables to the next check."""

    @property
    def are_open(self) -> bool:
        """Whether a check has left tables to the next check."""
        return self.is_incomplete or bool(self._open)

    @property
    def has_renamed(self) -> bool:
        """Whether the source has renamed tables, whose relations follow in a new attempt."""
        return bool(self._open_cases(Fate.RENAMED))

    def may_be_copied(self, mapped: MappedRelation) -> bool:
        """Whether the copy that *mapped* needs may begin.

        An open case prevents the copy, unless a new table has replaced the source's table. After a
        loss of changes, the copy needs a request.
        """
        waiting = self._open.get(mapped)
        if mapped.state.is_lost or (waiting is not None and waiting.case.fate is not Fate.REPLACED):
            return False
        # A pattern added the new name of a renamed table whose relation is to follow.
        moves = self._open_cases(Fate.RENAMED).values()
        return all(waiting.case.name != mapped.mapping.source for waiting in moves)

    def follow(
        self,
        coordinator: SyncCoordinator,
        remove: Callable[[MappedRelation], Awaitable[None]],
    ) -> None:
        """Use *coordinator* for the copies that become possible or necessary from now on.

        *remove* removes a relation from the stream.
        """
        self._remove = remove
        self._coordinator = coordinator
        self._publishing.is_being_copied = coordinator.is_at

    async def begin(self, plain: Connection) -> None:
        """Reconcile all tables before the stream starts. Raises SourceContentionError too."""
        reconciled = await self.reconcile(plain)
        if reconciled.contention is not None:
            raise reconciled.contention

    async def publish(self, relations: Iterable[MappedRelation]) -> None:
        """Publish *relations*, which need a copy; begin the copies of the published relations."""
        for mapped in list(relations):
            self._publishing.renew(mapped)
            self._expect(mapped)
        async with connection(self._tables.source) as plain:
            await check_same_server_by_query(plain, self._server)
            await self.reconcile(plain)

    def replaced(self, mapped: MappedRelation) -> None:
        """Record that the stream sends a different table as *mapped*; its changes are dropped."""
        waiting = self._open.get(mapped)
        if waiting is None or waiting.case.fate is Fate.BLOCK:
            self._open[mapped] = _Open(Case(Fate.REPLACED))

    def _expect(self, mapped: MappedRelation) -> None:
        """Request the copy of *mapped* at the next check, if streamer can publish the table."""
        waiting = self._open.get(mapped)
        is_over = waiting is not None and waiting.case.fate is Fate.REPLACED
        if waiting is None or (is_over and mapped.skip_through_lsn == LSN_MAX):
            self._open[mapped] = _Open(Case(Fate.BLOCK))

    def _open_cases(self, fate: Fate) -> dict[MappedRelation, _Open]:
        return {m: waiting for m, waiting in self._open.items() if waiting.case.fate is fate}

    # ---- tables that are gone ------------------------------------------------------------------

    async def copy_replaced(self, plain: Connection) -> None:
        """Copy or stop relations of replaced tables once the target contains all former changes."""
        for mapped, waiting in self._open_cases(Fate.REPLACED).items():
            if mapped not in self._relations:
                del self._open[mapped]
                continue
            dropped = [relation.mapping.source for relation in self._open_cases(Fate.DROPPED)]
            if not await self._has_all(mapped, waiting, plain) or waiting.case.successor in dropped:
                continue
            self.is_incomplete = True
            is_in_sync = mapped.skip_through_lsn != LSN_MAX
            if is_in_sync:  # not stopped, and no copy is requested
                await self._switch_to_successor(mapped)
            self._open.pop(mapped, None)
            if is_in_sync and not mapped.state.is_lost:
                self._expect(mapped)

    async def _switch_to_successor(self, mapped: MappedRelation) -> None:
        if mapped.mapping.rule.on_table_dropped is OnTableDropped.STOP:
            error = stop_replaced(mapped.mapping, self._tables.source).error
            assert error is not None
            await self.stop(mapped, error)
            return
        mapped.become(mapped.state.with_options(Resync()))
        await demand_copy(self._bookkeeping, mapped.relation_id, Resync())
        self._log_copy(mapped, "its table was dropped, and another table has the name")
        await self._copy_again(mapped, may_begin=False)
        mapped.relid = None  # the next check finds the table with the name

    def expect_missing(self) -> None:
        """Request copies of missing tables as soon as the source contains these tables."""
        while self._relations.missing:
            mapped = self._relations.missing.pop()
            if mapped.skip_through_lsn == LSN_MAX:
                mapped.relid = None  # the next check finds the table with the name
            self._expect(mapped)
            self.is_incomplete = True

    async def delete_dropped(self, plain: Connection) -> None:
        """Delete relations of dropped tables as soon as the target contains all their changes."""
        for mapped, waiting in self._open_cases(Fate.DROPPED).items():
            if not await self._has_all(mapped, waiting, plain):
                continue
            assert self._coordinator is not None
            assert self._remove is not None
            rule, fields = mapped.mapping.rule, self._log_fields(mapped)
            closes = rule.on_table_dropped is OnTableDropped.CLOSE
            now = await fetch_one(plain, "select pg_catalog.clock_timestamp()::text as now")
            is_bare = bool(await read_bare(self._bookkeeping, [mapped.relation_id]))
            self._coordinator.give_up(mapped)
            quarantined = mapped.quarantine.count
            if not is_bare:
                self._relations.announce_drop(mapped)
            await self._remove(mapped)
            self._open.pop(mapped, None)
            await forget_dropped(
                self._bookkeeping,
                mapped.relation_id,
                mapped.mapping,
                ends_at=now["now"] if closes and not is_bare else None,
            )
            if is_bare:
                log.info("table was dropped before its first copy", **fields)
                continue
            log.warning(
                "table was dropped at the source, and its target keeps the rows",
                **fields,
                on_table_dropped=rule.on_table_dropped.value,
                changes_lost_in_quarantine=quarantined,
            )

    async def _has_all(self, mapped: MappedRelation, waiting: _Open, plain: Connection) -> bool:
        """Whether the target contains the last changes of *mapped*, or cannot get them."""
        if waiting.end_lsn is None:
            waiting.end_lsn = await flush_wal(plain)
        if mapped.skip_through_lsn == LSN_MAX:
            return True
        pending = self._relations.lane(mapped).pending.flush_lsn_max
        is_dispatched = self._tables.tracker.newest_lsn >= waiting.end_lsn
        return is_dispatched and (pending is None or pending >= waiting.end_lsn)

    # ---- cases ---------------------------------------------------------------------------------

    async def reconcile(self, plain: Connection) -> Reconciled:
        """Reconcile all tables now. Raises StreamerError."""
        reconciled = await self._publishing.reconcile(plain)
        self.is_incomplete = reconciled.is_incomplete
        named = self._store_open(reconciled.cases)
        cases = {**reconciled.cases, **await self._judge_renames(named)}
        for mapped, case in cases.items():
            if case.fate is Fate.STOP and case.error is not None:
                self._stop(mapped, case.error)
        for mapped, case in cases.items():
            if case.fate in (Fate.COPY, Fate.COPY_AT_POINT):
                self._log_copy(mapped, case.reason)
            if case.fate is Fate.COPY:
                await self._copy_again(mapped, may_begin=case.error is None)
        if reconciled.contention is not None:
            log.warning(
                "waiting", source=self._tables.source.label, reason=str(reconciled.contention)
            )
        else:
            await self._block(cases)
        return reconciled

    def _store_open(self, cases: Mapping[MappedRelation, Case]) -> list[MappedRelation]:
        """Store the cases that wait; return the tables that regained their names."""
        named = []
        for mapped, waiting in list(self._open.items()):
            fate = cases[mapped].fate if mapped in cases else None
            if waiting.case.fate in (Fate.RENAMED, Fate.DROPPED):
                if waiting.case.fate is Fate.RENAMED and fate is not Fate.RENAMED:
                    named.append(mapped)
                if fate not in (Fate.RENAMED, Fate.DROPPED):
                    del self._open[mapped]
                    if mapped in self._relations:
                        self._expect(mapped)
        for mapped, case in cases.items():
            if case.fate in (Fate.RENAMED, Fate.DROPPED, Fate.REPLACED):
                if mapped not in self._open_cases(case.fate):
                    self._open[mapped] = _Open(case)
                self._open[mapped].case = case
        return named

    async def _judge_renames(self, named: Iterable[MappedRelation]) -> dict[MappedRelation, Case]:
        """Stop the renamed tables that cannot follow, and request a new attempt for the rest.

        *named*: tables that regained their names. Return the cases of tables that cannot
        follow and whose changes streamer does not hold.
        """
        source = self._tables.source
        for mapped in named:
            if mapped.obstacle is not None and mapped in self._relations:
                await self._obstacles.remove(mapped)
        moves = {
            _renamed(mapped, name): mapped
            for mapped, waiting in self._open_cases(Fate.RENAMED).items()
            if (name := waiting.case.name) is not None
        }
        names = [mapped.mapping.source for mapped in self._relations]
        namespace = self._services.target_namespace
        verdicts = await judge_renames(self._bookkeeping, source, moves, names, namespace)
        cases = {}
        for move, mapped in moves.items():
            step = self._unfollowed.get(move.relation_id, verdicts[move])
            if isinstance(step, Following):
                self._services.tables_appeared(source.label)
                continue
            error = rename_error(move, step)
            if mapped.skip_through_lsn != LSN_MAX:
                await self._obstacles.stop(mapped, error)
            elif not mapped.state.is_lost:
                case = Case(Fate.RENAMED, name=move.now, error=ErrorReport.of(error))
                cases[mapped] = case
        return cases

    async def stop(self, mapped: MappedRelation, error: ErrorReport) -> None:
        """Stop *mapped* until an operator requests its copy; drop its changes until then."""
        await require_resync(self._bookkeeping, mapped.relation_id, error)
        self._stop(mapped, error)

    def _stop(self, mapped: MappedRelation, error: ErrorReport) -> None:
        log.error("table stopped", **self._log_fields(mapped), error=error.text, **error.log_fields)
        self._relations.drop_changes(mapped, error)

    def _log_copy(self, mapped: MappedRelation, reason: str) -> None:
        log.warning("table is copied again", **self._log_fields(mapped), reason=reason)

    def _log_fields(self, mapped: MappedRelation) -> dict[str, str]:
        return {"source": self._tables.source.label, "table": str(mapped.mapping.source)}

    async def _copy_again(self, mapped: MappedRelation, *, may_begin: bool) -> None:
        self._publishing.renew(mapped)
        state = mapped.state.to_copy_again()
        if self._coordinator is None:  # copies begin with the stream
            self._relations.become(mapped, state)
            return
        self._coordinator.give_up(mapped)
        await self._relations.become_when_applied(mapped, state)
        self._publishing.bind(mapped)
        if not state.is_paused and may_begin:
            self._coordinator.request(mapped)

    async def _block(self, cases: Mapping[MappedRelation, Case]) -> None:
        """Report the tables that cannot be copied yet, and copy tables whose obstacle is gone."""
        former, blocked = dict(self._open), self._open_cases(Fate.BLOCK)
        for mapped in blocked:
            del self._open[mapped]
        for mapped, case in cases.items():
            if case.error is None or case.fate is Fate.STOP:
                continue
            if self._coordinator is not None and self._coordinator.is_at(mapped):
                continue  # the copy, or the next check after the copy, reports the error
            waiting = self._open.setdefault(mapped, _Open(Case(Fate.BLOCK)))
            is_reported = mapped in former and former[mapped].reported == case.error
            waiting.reported = case.error
            if is_reported:
                continue
            log.error(
                "table cannot be copied",
                **self._log_fields(mapped),
                error=case.error.text,
                **case.error.log_fields,
            )
            await block_copy(self._bookkeeping, mapped.relation_id, case.error)
            self._relations.become(mapped, mapped.state.blocked(case.error))
        for mapped in blocked:
            if mapped not in self._relations or self._coordinator is None:
                continue
            if self._relations.awaits_copy(mapped) and self.may_be_copied(mapped):
                self._relations.become(mapped, mapped.state.unblocked())
                self._coordinator.request(mapped)


def _renamed(mapped: MappedRelation, name: RelationName) -> Renamed:
    mapping, is_disjoint = mapped.mapping, mapped.mapping.rule.is_disjoint
    names = mapping.source, mapping.target, name
    return Renamed(mapped.relation_id, *names, mapping.sid, is_disjoint)
