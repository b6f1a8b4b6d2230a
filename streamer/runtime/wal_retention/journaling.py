"""The life of a source's journal: when the process writes, reads and deletes the journal.

A journal begins at the slot's position (`begin`). From then on a reader fills the journal from the
slot, with or without a target. The pipeline reads from the journal while the journal exists. When
the target has caught up, writing stops (`stop_writing`), and the pipeline reads to the end and
restarts. `choose_journal` then sees that the target contains the whole journal. The journal is
deleted, and the pipeline reads the slot.

A restart would end the copies of the pipeline. So while a copy runs, the journal begins *beside*
the pipeline, from a temporary copy of the slot. The pipeline still reads the slot, and acknowledges
the changes that the journal contains (`acknowledged_lsn`). When the target contains all of these
changes, the journal is deleted without a restart. If the pipeline ends before, the next pipeline
reads the journal, which then continues from the slot.

After a crash, `judge` decides. streamer continues a journal only if the journal contains all
changes between the target's position and the position that the source may have discarded. Only this
check proves the absence of a gap. A lost journal shows because the slot is ahead of the target.
"""

import asyncio
import contextlib
import enum
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import structlog

from streamer.errors.error_classes import (
    JournalError,
    Retry,
    SlotInUseError,
    SourceConnectionError,
    SourceDivergedError,
    SpoolError,
    StreamerError,
)
from streamer.errors.error_reports import ErrorReport
from streamer.mapping.rules import SourceMapping
from streamer.runtime.slot_owner import SlotOwner
from streamer.runtime.wal_retention.journal_writer import Journaler
from streamer.source.catalog import SourceServer, check_same_history, read_server
from streamer.source.connection import Connection, connection
from streamer.source.journal.gather_records import Gatherer
from streamer.source.journal.journal_files import (
    Journal,
    directory_of,
    remove_journal,
    try_directory,
)
from streamer.source.journal.journal_records import JournalIdentity
from streamer.source.server.primaries_after_failover import require_successor
from streamer.source.server.timeline import check_same_server_by_query, read_branch, read_timeline
from streamer.source.slot_and_publications.slot import check_slot, read_slot, sync_slot_name
from streamer.source.stream.replication_stream import ReplicationStream, StreamOptions
from streamer.source.timeline_branches import Branch, KnownServer, common_end
from streamer.util.backoff import Backoff
from streamer.util.containment import contained
from streamer.util.failpoints import failpoint
from streamer.util.lsn import INVALID_LSN, Lsn
from streamer.util.waiting import in_thread

log = structlog.get_logger()

MANUAL_RETRY_SECONDS: Final = 15.0
BEGIN_SECONDS: Final = 10.0
"""How long the journal waits for the slot to become free, and the pipeline for the journal."""


class Verdict(enum.Enum):
    """The next step for a journal."""

    READ = enum.auto()
    NOT_NEEDED = enum.auto()
    HOLE = enum.auto()


def judge(acknowledged_lsn: Lsn, start_lsn: Lsn, end_lsn: Lsn, confirmed_lsn: Lsn) -> Verdict:
    """Return the next step for a journal.

    The target contains all changes up to *acknowledged_lsn*, the journal all from *start_lsn* to
    *end_lsn*, and the slot all from *confirmed_lsn* on. Pure.
    """
    if acknowledged_lsn == INVALID_LSN:  # an empty target begins with the oldest change
        acknowledged_lsn = start_lsn
    if start_lsn <= acknowledged_lsn and confirmed_lsn <= end_lsn:
        return Verdict.READ
    return Verdict.NOT_NEEDED if confirmed_lsn <= acknowledged_lsn else Verdict.HOLE


class Journaling:
    """The journal of a source, if the source has a journal. The source's guard runs `run`."""

    def __init__(
        self, source: SourceMapping, spools: Path, owner: SlotOwner, *, is_lasting: bool
    ) -> None:
        self.source = source
        self._owner = owner
        self._is_lasting = is_lasting
        self.journal: Journal | None = None
        self.error: ErrorReport | None = None
        """The error that keeps the journal from growing."""
        self._path = directory_of(spools, source.slot)
        self._is_damaged = False
        self._is_trusted = False
        self._is_decided = asyncio.Event()
        self._active = asyncio.Event()
        self._begun = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None
        self._server = KnownServer()
        self.is_beside = False
        """Whether streamer fills the journal from a copy of the slot, while the pipeline reads the
        slot.
        """
        self.flushed: asyncio.Event | None = None
        """Set after each flush, for a pipeline that acknowledges changes of the journal."""

    @property
    def is_active(self) -> bool:
        """Whether the slot is, or should be, read into the journal."""
        return self._active.is_set()

    @property
    def size_bytes(self) -> int:
        return 0 if self.journal is None else self.journal.size_bytes

    @property
    def outlives_copies(self) -> bool:
        """Whether to continue the journal although every table of the source needs a copy.

        Otherwise a new slot replaces the journal, and the changes that wait for the next copy fill
        a new journal. A journal of an earlier process never counts as trusted.
        """
        return self.journal is not None and self._is_trusted and self.error is None

    def distrust(self) -> None:
        """Record that the source has a different history than the target or the journal."""
        self._is_trusted = False

    async def run(self) -> None:
        """Continue an existing journal, and write a journal whenever the guard requests it."""
        backoff = Backoff()
        try:
            await self._open()
            while True:
                await self._active.wait()
                self._writing = asyncio.create_task(
                    self._write(), name=f"journal {self.source.label}"
                )
                try:
                    await asyncio.wait([self._writing])
                finally:
                    self._writing.cancel()
                    await asyncio.wait([self._writing])
                error = _error_of(self._writing)
                self._writing = None
                if error is None:
                    backoff = Backoff()
                    continue
                self.error = ErrorReport.of(error)
                backoff.log(log, f'the journal of "{self.source.label}" is not written', error)
                is_timed = error.retry is Retry.TIMED
                await asyncio.sleep(backoff.next_seconds() if is_timed else MANUAL_RETRY_SECONDS)
        finally:
            if self.journal is not None:
                self.journal.close()
            self._is_decided.clear()  # the next attempt opens the journal again

    async def _open(self) -> None:
        backoff = Backoff()
        while not self._is_decided.is_set():
            try:
                await in_thread(self._open_files)
            except JournalError as exc:
                # The comparison of slot and target decides whether the journal is needed.
                self.error, self._is_damaged = ErrorReport.of(exc), True
                log.error("the journal cannot be read", source=self.source.label, error=str(exc))
            except StreamerError as exc:
                self.error = ErrorReport.of(exc)
                backoff.log(log, f'the journal of "{self.source.label}" cannot be read', exc)
                await backoff.wait()
                continue
            self._is_decided.set()
        if self.journal is not None:
            log.info(
                "resuming journal",
                source=self.source.label,
                bytes=self.journal.size_bytes,
                start_lsn=str(self.journal.start_lsn),
                end_lsn=str(self.journal.end_lsn),
            )
            self._begun.set()
            self._active.set()

    # ---- writing -------------------------------------------------------------------------------

    def change(self, source: SourceMapping) -> None:
        """Use a new url from now on."""
        former, self.source = self.source, source
        if source.url != former.url and self._writing is not None:
            self._writing.cancel()  # `run` starts the task again

    async def prepare(self) -> None:
        """Check that the process can begin a journal. Raises SpoolError."""
        if not self._is_lasting:
            raise SpoolError(
                "a journal needs a directory that survives a restart",
                hint="set spool.directory, and restart",
            )
        if self._is_damaged:
            problem = "" if self.error is None else self.error.text
            raise SpoolError(f"streamer does not overwrite the existing journal: {problem}")
        await in_thread(try_directory, self._path)

    def begin(self, *, beside: bool = False) -> None:
        """Read the slot into the journal from now on, as soon as the slot is free.

        *beside*: read a copy of the slot, while the pipeline reads the slot itself.
        """
        if self.is_beside and not beside and self._writing is not None:
            self._writing.cancel()  # `run` starts the task again
        self.is_beside = beside
        self._active.set()

    async def stop_writing(self) -> None:
        """Stop reading the slot. Returns when no task reads the slot."""
        self._active.clear()
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])
        self.error = None

    async def _write(self) -> None:
        async with connection(self.source, replication=True) as replication:
            server = await read_server(replication)
            branch = await read_branch(replication, server)
            if server.in_recovery:
                # A standby's timeline can change during the stream.
                await self._write_from(server, branch, lambda: _check_timeline(replication, branch))
                return
        await self._write_from(server, branch, None)

    async def _write_from(
        self,
        server: SourceServer,
        branch: Branch,
        check_timeline: Callable[[], Awaitable[None]] | None,
    ) -> None:
        source = self.source
        async with connection(source) as plain:
            await check_same_server_by_query(plain, server)
            if not self.is_beside:
                await self._until_free(plain)
            await self._owner.verify(plain, source)
            start_lsn = await self._check(plain, server, branch)
            if self.journal is not None:
                await in_thread(self.journal.rewind)
            # Whole transactions only, in order, as text: every target accepts this form.
            options = StreamOptions.for_version(
                server.version,
                source,
                (source.publication, source.publication_inserts),
                streaming=False,
            )
            stream = await ReplicationStream.start(
                source,
                source.slot,
                start_lsn,
                options,
                server=server,
                name_of_copy=sync_slot_name(source.slot) if self.is_beside else None,
            )
            try:
                failpoint("journal.slot_taken")
                # From here on only this process can move the slot.
                start_lsn = await self._check(plain, server, branch)
                if self.is_beside:
                    start_lsn = stream.start_lsn  # the pipeline moves the slot
                if self.journal is None:
                    await self._create(server, branch, start_lsn)
                else:
                    await in_thread(self.journal.turn, branch)
                await self._run(stream, server, start_lsn, check_timeline)
            finally:
                await stream.close()

    async def _until_free(self, plain: Connection) -> None:
        """Wait briefly until the pipeline releases the slot."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEGIN_SECONDS):
                # The server sends no event when a slot becomes free.
                while (slot := await read_slot(plain, self.source.slot)) and slot.active_pid:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)

    async def _check(self, plain: Connection, server: SourceServer, branch: Branch) -> Lsn:
        """Return the slot's position; refuse a slot that the journal does not join."""
        slot = await read_slot(plain, self.source.slot)
        confirmed_lsn = check_slot(slot, self.source.slot, server.database)
        journal = self.journal
        require_successor(self.source, server, self._server)
        if journal is not None:
            fork_lsn = common_end(journal.branch, branch) or INVALID_LSN
            end_lsn = min(journal.end_lsn, fork_lsn)
            check_same_history(server, journal.identity.system_identifier, end_lsn)
            if journal.changes_end_lsn > fork_lsn:
                raise SourceDivergedError(
                    f"the source is on timeline {branch.timeline}, which forked at {fork_lsn}, and "
                    f"the journal has changes up to {journal.changes_end_lsn}"
                )
            if confirmed_lsn > end_lsn:
                raise SourceDivergedError(
                    f'replication slot "{self.source.slot}" is at {confirmed_lsn}, ahead of '
                    f"{end_lsn}, where its journal ends"
                )
        return confirmed_lsn

    async def _create(self, server: SourceServer, branch: Branch, start_lsn: Lsn) -> None:
        identity = JournalIdentity(server.system_identifier, self.source.slot)
        await in_thread(self._create_files, identity, start_lsn, branch)
        log.warning(
            "journaling started: streamer reads the slot into files now",
            source=self.source.label,
            directory=str(self._path),
            lsn=str(start_lsn),
        )

    def _open_files(self) -> None:
        self.journal = Journal.open(self._path)

    def _create_files(self, identity: JournalIdentity, start_lsn: Lsn, branch: Branch) -> None:
        self.journal = Journal.create(self._path, identity, start_lsn, branch)
        self._is_trusted = True

    async def _run(
        self,
        stream: ReplicationStream,
        server: SourceServer,
        start_lsn: Lsn,
        check_timeline: Callable[[], Awaitable[None]] | None,
    ) -> None:
        journal = self.journal
        assert journal is not None
        self._begun.set()
        self.error = None
        journaler = Journaler(
            journal,
            stream,
            Gatherer(journal.end_lsn, journal.last, start_lsn),
            label=self.source.label,
            wal_sender_timeout_seconds=server.wal_sender_timeout_seconds,
            check_timeline=check_timeline,
            flushed=self._wake_pipeline,
        )
        await journaler.run()

    # ---- for the pipeline -----------------------------------------------------------------------

    def _wake_pipeline(self) -> None:
        if self.is_beside and self.flushed is not None:
            self.flushed.set()

    def acknowledged_lsn(self, stored_lsn: Lsn, received_lsn: Lsn) -> Lsn:
        """Return the position that a pipeline may acknowledge to the source.

        The target contains all changes up to *stored_lsn*, and the pipeline has received all up to
        *received_lsn*.
        """
        if not self.is_beside or self.journal is None:
            return stored_lsn
        return max(stored_lsn, min(received_lsn, self.journal.end_lsn))

    async def choose_journal(
        self, plain: Connection, server: SourceServer, branch: Branch, acknowledged_lsn: Lsn
    ) -> Journal | None:
        """Return the journal to read from, if a journal exists and the target needs it.

        Delete the journal if the target or the slot has all of its changes. After a gap the journal
        stays, and the comparison with the slot reports the gap.
        """
        if self.is_beside:
            self.begin()  # the former pipeline has left the slot
        try:
            async with asyncio.timeout(2 * BEGIN_SECONDS):
                await self._is_decided.wait()
                if self.is_active:
                    await self._begun.wait()
        except TimeoutError:
            raise SlotInUseError(
                f'the journal of "{self.source.label}" has not begun: '
                f"{'another program reads the slot' if self.error is None else self.error.text}"
            ) from None
        self._server = KnownServer(server.system_identifier, branch)
        journal = self.journal
        slot = await read_slot(plain, self.source.slot)
        if slot is None or slot.confirmed_flush_lsn is None:
            return None
        if self._is_damaged and slot.confirmed_flush_lsn <= acknowledged_lsn:
            await self.discard()  # the target or the source contains all of its changes
        if journal is None or journal.identity.system_identifier != server.system_identifier:
            return None
        verdict = judge(
            acknowledged_lsn, journal.start_lsn, journal.end_lsn, slot.confirmed_flush_lsn
        )
        is_done = not self.is_active and journal.end_lsn <= acknowledged_lsn
        if verdict is Verdict.NOT_NEEDED or (verdict is Verdict.READ and is_done):
            await self.discard()
            return None
        if verdict is Verdict.HOLE:
            return None
        self.begin()
        return journal

    async def discard(self) -> None:
        """Delete the journal, if any."""
        await self.stop_writing()
        journal, self.journal = self.journal, None
        self._begun.clear()
        self._is_damaged = self._is_trusted = self.is_beside = False
        if journal is None:
            await in_thread(remove_journal, self._path)
            return
        await in_thread(journal.remove)
        log.info("journal drained and deleted", source=self.source.label)


async def _check_timeline(replication: Connection, branch: Branch) -> None:
    """Refuse a standby's changes after its timeline has changed. Raises SourceConnectionError."""
    timeline = await read_timeline(replication)
    if timeline != branch.timeline:
        raise SourceConnectionError(
            f"the server switched from timeline {branch.timeline} to {timeline}"
        )


def _error_of(task: "asyncio.Task[None]") -> StreamerError | None:
    """Return why *task* ended; None if its owner cancelled it."""
    if task.cancelled():
        return None
    exc = task.exception()
    leaves = _leaves(exc) if exc is not None else []
    errors = [leaf for leaf in leaves if isinstance(leaf, StreamerError)]
    if exc is not None and len(errors) < len(leaves):
        try:
            with contained("writing the journal"):
                raise exc
        except StreamerError as defect:
            return defect
    return errors[0] if errors else None


def _leaves(exc: BaseException) -> list[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        return [leaf for inner in exc.exceptions for leaf in _leaves(inner)]
    return [exc]
