"""Checks the link between source and target: slot, publications, and the positions that both sides
store.

streamer stores positions and fingerprints in the target before it relies on them. A comparison at
every start, and while streaming, finds all breaks of the link: a moved slot, a changed publication,
a restored server. streamer never continues across a gap: the source stops, and its error names the
tables to resync.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

import structlog

from streamer.apply.lanes.lane import MappedRelation
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.positions import reset_acknowledged
from streamer.bookkeeping.relation_states import require_resync_of_source
from streamer.bookkeeping.sources import SourceRecord, set_source, set_source_state
from streamer.control.resync_options import after_loss
from streamer.errors.error_classes import (
    SlotInUseError,
    SlotInvalidatedError,
    SlotMissingError,
    SlotWaitError,
    SourceConnectionError,
    SourceDivergedError,
    SourceError,
    UnpublishedError,
)
from streamer.errors.error_reports import ErrorReport
from streamer.errors.remedies import Remedy, resync_source, then_resync
from streamer.mapping.rules import SourceMapping
from streamer.runtime.guards.missed_scripts import MissedScripts
from streamer.runtime.wal_retention.backlog_guard import BacklogGuard
from streamer.source.catalog import SourceServer, check_same_history
from streamer.source.connection import Connection
from streamer.source.journal.journal_files import Journal
from streamer.source.journal.journal_stream import JournalStream
from streamer.source.server.idle_connections import IdleConnections
from streamer.source.server.timeline import check_same_server_by_query
from streamer.source.server.wait_limits import Reported
from streamer.source.slot_and_publications.slot import (
    ExportedSnapshot,
    Slot,
    ahead_of_target,
    check_slot,
    create_slot,
    drop_slot,
    end_former_reader,
    read_slot,
    require_own,
    set_failover,
)
from streamer.source.stream.replication_stream import ChangeStream, ReplicationStream, StreamOptions
from streamer.source.timeline_branches import Branch, common_end, is_continued
from streamer.util.failpoints import failpoint
from streamer.util.lsn import INVALID_LSN, LSN_MAX, Lsn
from streamer.util.repeated_notices import end_notice, give_notice

log = structlog.get_logger()

_NO_HISTORY: Final = "no timeline history file from the server; comparing timeline numbers only"


class SlotCheck:
    """Checks the slot of a source, for one attempt to stream the source."""

    def __init__(
        self,
        source: SourceMapping,
        server: SourceServer,
        bookkeeping: Bookkeeping,
        record: SourceRecord,
        relations: Iterable[MappedRelation],
        guard: BacklogGuard,
        journal: Journal | None,
        branch: Branch,
    ) -> None:
        """*journal*: the input in place of the slot, if any. *branch*: the source's history."""
        self._branch = branch
        self._guard = guard
        self._journal = journal
        self._source = source
        self._server = server
        self._bookkeeping = bookkeeping
        self._record = record
        self._relations = relations
        self._reported = Reported()
        self._scripts = MissedScripts(source, server, bookkeeping, record.source_id)

    def _synced(self) -> list[MappedRelation]:
        """Return the relations that need no further copy."""
        return [m for m in self._relations if m.skip_through_lsn != LSN_MAX]

    @property
    def held_lsn(self) -> Lsn:
        """The end of the newest change that the target contains."""
        return max((mapped.end_lsn for mapped in self._synced()), default=INVALID_LSN)

    @property
    def reads_slot(self) -> bool:
        """Whether the changes come from the slot; otherwise they come from a journal."""
        return self._journal is None

    async def check(self) -> None:
        """Refuse a source that cannot continue at the target's position. Raises
        SourceDivergedError.
        """
        synced, record = self._synced(), self._record
        if not synced:
            return
        try:
            if record.system_identifier == self._server.system_identifier:
                if self._journal is not None:
                    self._check_journal(self._journal)
                record = await self._follow_fork(record, synced)
            check_same_history(self._server, record.system_identifier, record.acknowledged_lsn)
        except SourceDivergedError as exc:
            exc.remedy = self._resync_hint(synced)
            raise

    def _check_journal(self, journal: Journal) -> None:
        """Refuse a journal with changes from after the fork. Raises SourceDivergedError, and
        SourceConnectionError if the journal's writer and this attempt met different servers.
        """
        now = self._branch
        fork_lsn = common_end(journal.branch, now) or INVALID_LSN
        if journal.end_lsn <= fork_lsn:
            return
        if journal.changes_end_lsn <= fork_lsn or is_continued(now, journal.branch):
            raise SourceConnectionError(
                f"the source is on timeline {now.timeline}, and its journal on timeline "
                f"{journal.branch.timeline}"
            )
        raise SourceDivergedError(
            f"the source failed over to timeline {now.timeline}, which forked at {fork_lsn}, and "
            "its journal has changes after that point"
        )

    async def _follow_fork(
        self, record: SourceRecord, synced: list[MappedRelation]
    ) -> SourceRecord:
        """Follow the source's new timeline, if the target contains no change from after the fork.

        The acknowledged position may lie past the fork even if no applied change does, because it
        follows keepalives. The slot must be at the fork or before it: a later slot has not seen the
        new primary's earlier commits. Raises SourceDivergedError.
        """
        timeline, stored_timeline = self._branch.timeline, record.timeline
        if stored_timeline is None:
            return record
        if self._branch.has_ends:
            end_notice(_NO_HISTORY, self._source.label)
        else:
            give_notice(log.warning, _NO_HISTORY, self._source.label, timeline=timeline)
        stored_branch = Branch.parse(stored_timeline, record.timeline_history or "")
        fork_lsn = common_end(stored_branch, self._branch)
        if fork_lsn == LSN_MAX:
            return record
        if fork_lsn is None:
            raise SourceDivergedError(
                f"the source is on timeline {timeline}, which does not descend from timeline "
                f"{stored_timeline}, the last source timeline that streamer followed"
            )
        ahead = [str(mapped.mapping.source) for mapped in synced if mapped.end_lsn > fork_lsn]
        if ahead:
            raise SourceDivergedError(
                f"the source failed over to timeline {timeline}, which forked at {fork_lsn}, and "
                f"the target has changes after that point: {', '.join(ahead)}"
            )
        log.warning(
            "the source failed over, and lost no change that the target has",
            source=self._source.label,
            timeline=timeline,
            fork_lsn=str(fork_lsn),
        )
        if record.acknowledged_lsn > fork_lsn:
            await reset_acknowledged(self._bookkeeping, record.source_id, fork_lsn)
            self._record = replace(record, acknowledged_lsn=fork_lsn, last_transaction=None)
        return self._record

    # ---- the slot ------------------------------------------------------------------------------

    async def open_slot(self, plain: Connection) -> tuple[Lsn, ExportedSnapshot | None]:
        """Return the start position, after checking or creating the slot; with a new slot, its
        snapshot.

        Raises an error that names the tables to resync.
        """
        await self._scripts.record_forked(self._record.acknowledged_lsn, self._branch)
        await self._scripts.refuse()
        name, record, synced = self._source.slot, self._record, self._synced()
        slot = await read_slot(plain, name)
        require_own(slot, self._source, self._server)
        is_foreign = slot is not None and slot.is_foreign(self._server.database)
        is_all_copied = not synced and not any(m.state.is_to_mark_synced for m in self._relations)
        is_all_copied = is_all_copied and not self._guard.journaling.outlives_copies
        if not is_foreign and is_all_copied and (slot is None or record.acknowledged_lsn):
            # All tables get a new copy, so begin at the end of the WAL. Earlier WAL may be
            # unreadable, as after DROP PUBLICATION before PostgreSQL 18.
            return await self._make_slot(plain)
        try:
            start_lsn = check_slot(slot, name, self._server.database)
            if self._journal is not None:
                start_lsn = self._journal.segment_at(record.acknowledged_lsn).start_lsn
            else:
                self._check_position(slot, start_lsn)
                await self._end_former_reader(plain)
        except (SourceDivergedError, SlotMissingError, SlotInvalidatedError) as exc:
            if is_foreign:  # another program's slot: streamer neither uses nor drops the slot
                if synced:
                    exc.remedy = then_resync(exc.remedy, self._resync_hint(synced))
                raise
            if not synced:
                return await self._make_slot(plain)
            raise await self._lost(exc, synced) from None
        await self._store_identity()
        if slot is not None and self._journal is None:
            await set_failover(self._source, slot, self._server)
        if record.acknowledged_lsn < start_lsn:
            await reset_acknowledged(self._bookkeeping, record.source_id, start_lsn)
        return start_lsn, None

    async def _store_identity(self) -> None:
        record, branch = self._record, self._branch
        identity = {
            "system_identifier": self._server.system_identifier,
            "timeline": branch.timeline,
            "database_oid": self._server.database_oid,
        }
        if branch.has_ends or any(getattr(record, name) != identity[name] for name in identity):
            identity["timeline_history"] = branch.text
        if any(getattr(record, name) != value for name, value in identity.items()):
            await set_source(self._bookkeeping, record.source_id, **identity)

    async def open_stream(
        self,
        sources: IdleConnections,
        start_lsn: Lsn,
        *,
        binary: bool,
        on_slot: Callable[[Slot], None],
    ) -> ChangeStream:
        """Begin to read at *start_lsn*, which `open_slot` has returned.

        Calls *on_slot* with the slot, unless the changes come from a journal.
        """
        failpoint("slot.checked")
        if self._journal is not None:
            return JournalStream(self._journal, start_lsn, self._branch)
        source = self._source
        publications = (source.publication, source.publication_inserts)
        options = StreamOptions.for_version(
            self._server.version, source, publications, binary=binary
        )
        stream = await ReplicationStream.start(
            source, source.slot, start_lsn, options, server=self._server
        )
        try:
            async with sources.connection(source) as plain:
                on_slot(await self._check_taken(plain, start_lsn))
        except BaseException:
            await stream.close()
            raise
        return stream

    async def _check_taken(self, plain: Connection, start_lsn: Lsn) -> Slot:
        """Return the slot; refuse a slot that another process, such as the journal of a replica,
        has moved since `open_slot`.

        PostgreSQL begins at the slot's position then, without an error. From here on only this
        process can move the slot. Raises SlotInUseError.
        """
        await check_same_server_by_query(plain, self._server)
        slot = await read_slot(plain, self._source.slot)
        confirmed_lsn = check_slot(slot, self._source.slot, self._server.database)
        expected_lsn = max(start_lsn, self._record.acknowledged_lsn)
        if confirmed_lsn > expected_lsn:
            raise SlotInUseError(
                f'another process moved replication slot "{self._source.slot}" from {expected_lsn} '
                f"to {confirmed_lsn} before this process read it"
            )
        assert slot is not None
        return slot

    async def _lost(self, error: SourceError, synced: list[MappedRelation]) -> SourceError:
        """Return the error for a lost link: only a copy of *synced* restores the link."""
        if not isinstance(error, SlotMissingError) or self._guard.given_up is None:
            if (journal_error := self._guard.journaling.error) is not None:
                error.message += f" ({journal_error.text})"
            error.remedy = self._resync_hint(synced)
            return error
        given_up = SlotMissingError(self._guard.given_up, hint=self._resync_hint(synced))
        report = ErrorReport.of(given_up)
        await require_resync_of_source(self._bookkeeping, self._record.source_id, report)
        return given_up

    def _check_position(self, slot: Slot | None, start_lsn: Lsn) -> None:
        problem = ahead_of_target(self._source.slot, start_lsn, self._record.acknowledged_lsn)
        if problem is None:
            return
        if slot is not None and slot.active_pid is not None:
            raise SlotInUseError(f"{problem}: another process reads the slot into its journal")
        raise SourceDivergedError(
            f"{problem}: the target was restored to an earlier time, a session moved the slot, or "
            "another machine has the journal with the missing changes"
        )

    async def _end_former_reader(self, plain: Connection) -> None:
        # Another program may read a slot that was never streamed.
        if self._record.acknowledged_lsn != INVALID_LSN and not self._guard.journaling.is_active:
            await end_former_reader(plain, self._source.slot)

    def history_mismatch(self) -> SourceDivergedError:
        """Return the error for a source that sends different transactions than before."""
        self._guard.journaling.distrust()
        return SourceDivergedError(
            "the source and the target have different histories: the source was restored to an "
            "earlier time and has written since",
            hint=self._resync_hint(self._synced()),
        )

    def undecodable(self, error: SourceError) -> UnpublishedError:
        """Return the error for *error*, of a source whose publications make decoding fail.

        A publication is missing, two publications have different column lists of a table, or a row
        filter fails. A change of the publications does not help, because the source reads the
        catalog as of each change.
        """
        hint = self._resync_hint(self._synced() or self._relations)
        return UnpublishedError(error.message, hint=hint)

    def _resync_hint(self, relations: Iterable[MappedRelation]) -> Remedy:
        lost = list(relations)
        return resync_source(
            [mapped.mapping.source for mapped in lost],
            *after_loss(mapped.mapping.type for mapped in lost),
            database=self._source.database,
            sid=self._source.sid,
        )

    async def _report_wait(self, awaited: str) -> None:
        step = f"the creation of a slot waits for {awaited}"
        if self._reported.is_new(awaited):
            log.warning("the start waits", source=self._source.label, waiting_for=step)
        wait = ErrorReport(step, SlotWaitError.code)
        await set_source_state(
            self._bookkeeping, self._record.source_id, "starting", wait, waiting_for=awaited
        )

    async def _make_slot(self, plain: Connection) -> tuple[Lsn, ExportedSnapshot]:
        await self._guard.journaling.discard()
        self._journal = None
        await drop_slot(plain, self._source.slot)
        snapshot = await create_slot(
            self._source, self._source.slot, self._server, report=self._report_wait
        )
        failpoint("sync.slot_created")
        try:
            await self._scripts.record_left_out(snapshot)
            await self._store_identity()
            await reset_acknowledged(
                self._bookkeeping, self._record.source_id, snapshot.consistent_point
            )
            failpoint("sync.slot_stored")
            await self._scripts.refuse()
        except BaseException:
            await snapshot.close()
            raise
        return snapshot.consistent_point, snapshot
