"""A journal as a stream, with the interface of
`streamer.source.stream.replication_stream.ReplicationStream`.

The stream returns only flushed records, and so only whole transactions. If the writer of the
journal loses the source and reconnects, the stream is not affected. The stream deletes records
whose changes the target contains.
"""

import os
import time

from streamer.errors.error_classes import JournalError, SourceConnectionError
from streamer.source.journal.journal_files import Journal, read_record
from streamer.source.journal.journal_records import Kind, unpack
from streamer.source.stream.replication_stream import BURST_BYTES_MAX, Burst
from streamer.source.timeline_branches import Branch, common_end, is_continued
from streamer.util.failpoints import failpoint
from streamer.util.lsn import INVALID_LSN, Lsn


class JournalStream:
    """Reads a journal, from the first segment with changes after *lsn*.

    The stream returns only records of *branch*, the history that the attempt began with. So the
    bookkeeping stores a new branch before the first change of that branch arrives.
    """

    def __init__(self, journal: Journal, lsn: Lsn, branch: Branch) -> None:
        self._journal = journal
        self._branch = branch
        self._segment = journal.segment_at(lsn)
        self._is_first = True
        self._offset = 0
        self.start_lsn = self._lsn = self._segment.start_lsn
        self._descriptor = os.open(self._segment.path, os.O_RDONLY)

    @property
    def _is_at_end(self) -> bool:
        return (self._segment.number, self._offset) >= self._journal.end

    @property
    def last_message_at(self) -> float:
        """Return the present time, because a file always answers."""
        return time.monotonic()

    async def wait_readable(self) -> None:
        """Wait until there are more records."""
        while self._is_at_end:
            self._journal.changed.clear()
            await self._journal.changed.wait()

    def read(self) -> Burst:
        """Return the flushed records, without waiting; the burst may be empty. Raises JournalError,
        and SourceConnectionError for records of a different branch.
        """
        burst = Burst()
        size = 0
        while size < BURST_BYTES_MAX and burst.wal_end_lsn is None and not self._is_at_end:
            if self._offset >= self._segment.size and self._segment.number < self._journal.end[0]:
                self._open_next_segment()
            start_offset = self._offset
            self._read_record(burst)
            size += self._offset - start_offset
        burst.has_more = not self._is_at_end
        failpoint("journal.read")
        return burst

    def _open_next_segment(self) -> None:
        segment = self._journal.segment_after(self._segment)
        if is_continued(self._branch, segment.branch):
            raise _another_branch(segment.branch)
        descriptor = os.open(segment.path, os.O_RDONLY)
        os.close(self._descriptor)
        self._descriptor, self._segment, self._offset = descriptor, segment, 0
        self._is_first = False

    def _read_record(self, burst: Burst) -> None:
        result = read_record(self._descriptor, self._offset, self._segment.size)
        if result is None or (result[0].kind is Kind.HEADER and result[0].lsn != self._lsn):
            raise JournalError(
                f"{self._segment.path} is damaged at byte {self._offset}",
                hint="later changes are lost: stop `run`, delete the journal's directory, start "
                "`run`, and resync the tables that `status` then names",
            )
        record, offset = result
        if record.lsn > (common_end(self._segment.branch, self._branch) or INVALID_LSN):
            raise _another_branch(self._segment.branch)
        self._offset = offset
        match record.kind:
            case Kind.RELATIONS if self._is_first:
                burst.payloads += unpack(record.body)
            case Kind.PART | Kind.COMMITS:
                burst.payloads += unpack(record.body)
            case Kind.POSITION:
                burst.wal_end_lsn = record.lsn
        self._lsn = max(self._lsn, record.lsn)

    def send_status(self, flush_lsn: Lsn, visible_lsn: Lsn, *, request_reply: bool = False) -> None:
        """Delete the segments up to *flush_lsn*, whose changes the target contains."""
        del visible_lsn, request_reply
        self._journal.trim(flush_lsn)

    async def stop(self, flush_lsn: Lsn) -> None:
        """End in order."""
        self.send_status(flush_lsn, flush_lsn)

    async def close(self) -> None:
        """Close the file; the journal stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _another_branch(branch: Branch) -> SourceConnectionError:
    return SourceConnectionError(
        "the journal continues with a different history of the source, of timeline "
        f"{branch.timeline}"
    )
