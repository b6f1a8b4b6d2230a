"""Reconciles a source with the target before its stream: names, tables, publications, slot."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from streamer.bookkeeping.bookkeeping_schema import read_installation
from streamer.bookkeeping.relation_records import read_relation_records
from streamer.bookkeeping.sources import read_writers
from streamer.errors.error_classes import MappingError
from streamer.mapping.relation_names import RelationName, parse_name
from streamer.mapping.rules import RelationMapping
from streamer.mapping.shared_targets import (
    Clashes,
    TableWriter,
    find_clashes,
    new_table_error,
)
from streamer.runtime.guards.follow_renames import follow_renames
from streamer.runtime.guards.publications import Publishing
from streamer.runtime.guards.slot_check import SlotCheck
from streamer.runtime.guards.source_monitor import SourceMonitor
from streamer.runtime.guards.table_cases import TableCases
from streamer.runtime.session.attempt import Attempt
from streamer.runtime.session.choose_transport import choose_transport
from streamer.runtime.session.registrar import Registrar
from streamer.runtime.session.source_capture import SourceCapture
from streamer.runtime.session.start_waits import StartWaits, copies_all
from streamer.runtime.tables.relations import forget_unmapped, resolve_at
from streamer.runtime.tables.table_events import TableEvents
from streamer.source.catalog import SourceRelation, SourceServer
from streamer.source.connection import Connection
from streamer.source.server.database_encoding import read_conversion
from streamer.source.slot_and_publications.ownership import mark_publications, unproven_rows
from streamer.source.slot_and_publications.slot import ExportedSnapshot
from streamer.source.timeline_branches import Branch
from streamer.util.lsn import INVALID_LSN, Lsn

if TYPE_CHECKING:
    from streamer.bookkeeping.sources import SourceRecord
    from streamer.mapping.rename_targets import Obstacle

_JOURNAL_OBSTACLE: Final = "changes come from a journal, which is in text format"


@dataclass(frozen=True, slots=True)
class ReconciledSource:
    """The results of reconciling source and target."""

    registrar: Registrar
    monitor: SourceMonitor
    slot_check: SlotCheck
    capture: SourceCapture
    start_lsn: Lsn
    snapshot: ExportedSnapshot | None
    """The snapshot of a slot that this attempt created."""


@dataclass(frozen=True, slots=True)
class SourceReconciler:
    """The steps for one attempt. ``record``: the record of the source. ``branch``: its history."""

    attempt: Attempt
    tables: TableEvents
    server: SourceServer
    record: "SourceRecord"
    branch: Branch
    waits: StartWaits
    opened: contextlib.AsyncExitStack
    """Closes the snapshot if the opening of the session fails."""

    async def reconcile(self, plain: Connection) -> ReconciledSource:
        """Run the steps over *plain*. Raises StreamerError."""
        source, services, guard = self.attempt.source, self.attempt.services, self.attempt.guard
        bookkeeping, relations = services.bookkeeping, self.tables.relations
        installation = await read_installation(bookkeeping)
        has_position = self.record.acknowledged_lsn != INVALID_LSN
        owned_objects = await guard.owner.check_owner(
            plain,
            source,
            installation,
            has_position=has_position,
            is_taken_over=source.label in services.take_over,
        )
        capture = SourceCapture(source, self.server.version)
        await capture.create(plain)
        journal = await guard.journaling.choose_journal(
            plain, self.server, self.branch, self.record.acknowledged_lsn
        )
        has_journal = journal is not None
        registrar, monitor = await self._register(plain, capture, has_journal=has_journal)
        uncopied = [mapped.mapping.source for mapped in relations if mapped.state.is_to_mark_synced]
        # Without a stored position, streamer has acknowledged nothing, so a journal contains all
        # changes since the creation of the slot.
        unproven = unproven_rows(
            owned_objects, source, installation, uncopied, has_position=has_position or has_journal
        )
        if unproven is not None:
            raise unproven
        slot_check = SlotCheck(
            source, self.server, bookkeeping, self.record, relations, guard, journal, self.branch
        )
        await slot_check.check()
        await monitor.cases.begin(plain)
        if any(
            relations.awaits_copy(mapped)
            and not mapped.state.is_to_mark_synced
            and monitor.cases.may_be_copied(mapped)
            for mapped in relations
        ):
            services.launcher.prepare()  # Spark starts while the source creates the slot
        await mark_publications(plain, source, installation)
        await capture.publish(plain)
        start_lsn, snapshot = await slot_check.open_slot(plain)
        if snapshot is not None:
            self.opened.push_async_callback(snapshot.close)
        # `--take-over` stays in force until here: a retry before the target has stored the server
        # and the slot would otherwise refuse both.
        services.take_over.discard(source.label)
        await capture.send_baseline(plain, bookkeeping, list(relations))
        return ReconciledSource(registrar, monitor, slot_check, capture, start_lsn, snapshot)

    async def _register(
        self, plain: Connection, capture: SourceCapture, *, has_journal: bool
    ) -> tuple[Registrar, SourceMonitor]:
        """Register the tables of the source; return their registrar and the source's monitor."""
        source, services, tables = self.attempt.source, self.attempt.services, self.tables
        await self._forget_left_out(plain)
        mappings, definitions, unfollowed = await self._resolve(plain)
        if not copies_all(mappings):
            self.waits.end_turn()
        await forget_unmapped(services.bookkeeping, self.record.source_id, mappings)
        transport = await choose_transport(
            source,
            self.server,
            services.bookkeeping,
            mappings,
            definitions,
            known_obstacle=_JOURNAL_OBSTACLE if has_journal else self.attempt.binary_obstacle,
        )
        conversion = None if transport.is_binary else await read_conversion(plain)
        publishing = Publishing(
            source, self.server, services.bookkeeping, tables.relations, captures=capture.is_on
        )
        cases = TableCases(self.server, services, tables, publishing, unfollowed)
        monitor = SourceMonitor(self.server, services, tables, cases, self.attempt.health)
        tables.relations.set_groups(await tables.relations.read_groups(mappings))
        registrar = Registrar(services, tables, publishing, transport, conversion)
        await registrar.register(mappings, definitions, may_resume=True)
        if self.attempt.unapplied and self.attempt.unapplied[0] is source:
            del self.attempt.unapplied[0]
        return registrar, monitor

    async def _forget_left_out(self, plain: Connection) -> None:
        """Forget relations that unapplied rules left out, even if the present rules map them again.

        An operator removes a table from the rules and adds the table again to get a new copy.
        """
        unapplied, bookkeeping = self.attempt.unapplied, self.attempt.services.bookkeeping
        present = [number for number, s in enumerate(unapplied) if s is self.attempt.source]
        superseded = unapplied[: present[0]] if present else []
        for source in superseded:
            with contextlib.suppress(MappingError):  # these rules are not in force any more
                records = await read_relation_records(bookkeeping, self.record.source_id)
                names = [parse_name(record.source) for record in records]
                namespace = self.attempt.services.target_namespace
                mappings, _, _ = await resolve_at(plain, source, namespace, names)
                await forget_unmapped(bookkeeping, self.record.source_id, mappings)
        del unapplied[: len(superseded)]

    async def _resolve(
        self, plain: Connection
    ) -> tuple[
        Sequence[RelationMapping], dict[RelationName, SourceRelation], "dict[int, Obstacle]"
    ]:
        """Rename relations whose table was renamed. Return the mapped tables of the source with
        their definitions, and the obstacles of relations that keep their former names.
        """
        source, services = self.attempt.source, self.attempt.services
        bookkeeping, source_id = services.bookkeeping, self.record.source_id
        unfollowed = await follow_renames(
            plain,
            source,
            bookkeeping,
            await read_relation_records(bookkeeping, source_id),
            self.server.version,
            services.target_namespace,
        )
        records = await read_relation_records(bookkeeping, source_id)
        stored_names = {parse_name(record.source) for record in records}
        mappings, definitions, self.tables.refused = await resolve_at(
            plain, source, services.target_namespace, stored_names
        )
        new = [
            mapping for mapping in mappings if stored_names and mapping.source not in stored_names
        ]
        clashes = await self._find_clashes(new)
        self.tables.clash = next(iter(clashes.values()), None)
        mappings = [mapping for mapping in mappings if mapping.source not in clashes]
        # A new table may have the former name of a renamed table, which the relation still has.
        definitions = {
            name: relation for name, relation in definitions.items() if name not in unfollowed.names
        }
        return mappings, definitions, unfollowed.refused

    async def _find_clashes(self, new: Sequence[RelationMapping]) -> Clashes:
        """Return the *new* tables that would write rows of another running source."""
        label = self.attempt.source.label
        clashes: dict[RelationName, MappingError] = {}
        tables = [(mapping.target, mapping.sid) for mapping in new]
        by_table = await read_writers(self.attempt.services.bookkeeping, tables) if new else []
        for mapping, stored in zip(new, by_table, strict=True):
            writer = TableWriter(label, mapping.sid, mapping.rule.is_disjoint)
            writers = [writer, *(present for present in stored if present.label != label)]
            for clash in find_clashes(mapping.target, writers):
                clashes[mapping.source] = new_table_error(mapping.source, clash)
        return clashes
