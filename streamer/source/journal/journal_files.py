"""A journal's files: segments in a directory, which the journal appends to, flushes in groups, and
deletes from the front.

When `Journal.write` returns, its records are on disk, so ``end_lsn`` may be acknowledged to the
source. `Journal.rewind` cuts off all data after ``end_lsn`` before the next write: an unfinished
transaction, a record torn by a crash, records whose flush failed. The source can send these changes
again.

A file gets its name when the first records are on disk. So a segment without a sound header is
damage, never the result of a crash. Damage after the last sound record of the last segment looks
like a torn record, though. Then the slot, which is ahead of the journal's end, shows the damage.
"""

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final, Self

from streamer.decode.large_values import LARGE_BYTES
from streamer.errors.error_classes import JournalError, SpoolError
from streamer.source.history_check import CommittedTransaction
from streamer.source.journal.gather_records import NewSegment
from streamer.source.journal.journal_records import (
    PREFIX_SIZE,
    Header,
    JournalIdentity,
    Kind,
    Record,
    decode,
    pack,
    rest_length,
)
from streamer.source.timeline_branches import Branch, common_end
from streamer.util.failpoints import failpoint
from streamer.util.lsn import INVALID_LSN, LSN_MAX, Lsn
from streamer.util.owned_directory import make_private

_SUFFIX: Final = ".journal"
_GONE: Final = ".gone"
_TRIAL_BYTES: Final = 1024 * 1024


def directory_of(spools: Path, slot: str) -> Path:
    """Return the directory of a slot's journal."""
    return spools / "journal" / slot


@dataclass(slots=True)
class Segment:
    """A file. ``size``: the bytes of whole records."""

    number: int
    path: Path
    start_lsn: Lsn
    branch: Branch
    size: int = 0


def read_record(descriptor: int, offset: int, size: int) -> tuple[Record, int] | None:
    """Read the record at *offset* of a file of *size*; return None without a sound record."""
    prefix = os.pread(descriptor, PREFIX_SIZE, offset)
    if len(prefix) < PREFIX_SIZE:
        return None
    length = PREFIX_SIZE + rest_length(prefix)
    if offset + length > size:
        return None
    result = decode(os.pread(descriptor, length, offset))
    return None if result is None else (result[0], offset + result[1])


class Journal:
    """The journal of a source. Its methods block, so call each method in a thread, and only one at
    a time, except `trim` and the methods that only read.
    """

    def __init__(self, path: Path, identity: JournalIdentity, lock: int) -> None:
        """Use `create` or `open`."""
        self.path = path
        self.identity = identity
        self.changed = asyncio.Event()
        """The writer sets this event when there are more records to read."""
        self._lock = lock
        self._segments: list[Segment] = []
        self._descriptor = -1
        self.end_lsn: Lsn
        """All changes up to here are on disk; streamer may acknowledge this position."""
        self.last: CommittedTransaction | None = None
        """The last transaction in the journal."""
        self.end: tuple[int, int] = (0, 0)
        """The end for readers: number of the segment, bytes in the segment."""

    # ---- beginning and ending ------------------------------------------------------------------

    @classmethod
    def create(cls, path: Path, identity: JournalIdentity, start_lsn: Lsn, branch: Branch) -> Self:
        """Begin a journal of *branch* at *start_lsn*. Raises SpoolError."""
        with _saying(path):
            make_private(path)
            journal = cls(path, identity, _lock(path))
            try:
                journal._remove_stray_files()
                journal.end_lsn = start_lsn
                journal._begin_segment((), branch)
                for directory in (path.parent, path.parent.parent):
                    _flush_directory(directory)
            except BaseException:
                journal.close()
                raise
        failpoint("journal.created")
        return journal

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """Open an existing journal; return None without a journal. Raises JournalError for a
        damaged journal, SpoolError for an unreadable journal or the journal of another process.
        """
        with _saying(path):
            shutil.rmtree(path.with_name(f"{path.name}{_GONE}"), ignore_errors=True)
            if not _files(path):
                return None
            lock = _lock(path)
            try:
                return cls._open(path, lock)
            except BaseException:
                os.close(lock)
                raise

    @classmethod
    def _open(cls, path: Path, lock: int) -> Self | None:
        segments: list[Segment] = []
        newest: Header | None = None
        for number, file in sorted(_files(path).items(), reverse=True):
            if segments and number != segments[0].number - 1:
                break  # the journal is deleted, though the directory may still list older segments
            header, start_lsn = _read_header(file, number)
            if newest is not None and header.identity != newest.identity:
                raise JournalError(f"{file} belongs to another journal", hint=_HINT)
            newest = newest or header
            segments.insert(0, Segment(number, file, start_lsn, header.branch, file.stat().st_size))
        if newest is None:
            return None
        journal = cls(path, newest.identity, lock)
        journal._segments = segments
        journal._find_end(newest)
        return journal

    def _find_end(self, header: Header) -> None:
        """Find the last complete record of the last segment."""
        segment = self._segments[-1]
        self.end_lsn, self.last = segment.start_lsn, header.last
        descriptor = os.open(segment.path, os.O_RDONLY)
        try:
            offset = complete = 0
            while (result := read_record(descriptor, offset, segment.size)) is not None:
                record, offset = result
                if record.kind is not Kind.PART:
                    complete = offset
                    self._follow(record)
        finally:
            os.close(descriptor)
        segment.size = complete
        self.end = (segment.number, complete)

    def _follow(self, record: Record) -> None:
        if record.kind is Kind.COMMITS:
            self.last = CommittedTransaction(record.lsn, record.xid, record.commit_time)
        if record.kind in (Kind.COMMITS, Kind.POSITION):
            self.end_lsn = max(self.end_lsn, record.lsn)

    def close(self) -> None:
        """Close the files."""
        self._close_descriptor()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> None:
        """Delete the journal, because the target contains all its changes or needs a new copy."""
        with _saying(self.path):
            remove_journal(self.path)
        self.close()

    # ---- writing -------------------------------------------------------------------------------

    def rewind(self) -> None:
        """Cut off all data after the end, and flush the remaining data. Raises SpoolError."""
        with _saying(self.path):
            self._close_descriptor()
            self._remove_stray_files()
            segment = self._segments[-1]
            self._descriptor = os.open(segment.path, os.O_RDWR)
            os.ftruncate(self._descriptor, segment.size)
            os.fsync(self._descriptor)
            _flush_directory(self.path)

    @property
    def branch(self) -> Branch:
        """The branch of the source's history to which the end of the journal belongs."""
        return self._segments[-1].branch

    @property
    def changes_end_lsn(self) -> Lsn:
        """The end of the changes. After this end the journal contains only positions that the
        source reached.
        """
        last_lsn = INVALID_LSN if self.last is None else self.last.end_lsn
        return max(last_lsn, self._segments[-1].start_lsn)

    def turn(self, branch: Branch) -> None:
        """Continue with changes of *branch*, in a new segment; call `rewind` first.

        The branch forked after ``changes_end_lsn``. Positions past the fork are removed, because
        the branch contains changes there. Raises SpoolError.
        """
        fork_lsn = common_end(self.branch, branch)
        if fork_lsn == LSN_MAX:
            return
        with _saying(self.path):
            self._cut_positions(fork_lsn or INVALID_LSN)
            self._begin_segment((), branch)

    def _cut_positions(self, lsn: Lsn) -> None:
        segment = self._segments[-1]
        self.end_lsn, offset, end = segment.start_lsn, 0, 0
        while (result := read_record(self._descriptor, offset, segment.size)) is not None:
            record, offset = result
            if record.kind is Kind.POSITION and record.lsn > lsn:
                break
            end = offset
            self._follow(record)
        segment.size = end
        self.end = (segment.number, end)
        os.ftruncate(self._descriptor, end)
        os.fsync(self._descriptor)

    def write(self, items: list[Record | NewSegment]) -> None:
        """Append, and flush complete records. Raises SpoolError; the caller then calls `rewind` and
        continues after ``end_lsn``.
        """
        with _saying(self.path):
            written: list[Record] = []
            for item in items:
                if isinstance(item, NewSegment):
                    self._append(written)
                    written = []
                    self._begin_segment(item.relations, self.branch)
                else:
                    written.append(item)
            self._append(written)

    def _append(self, records: list[Record]) -> None:
        if not records:
            return
        segment = self._segments[-1]
        offset = os.fstat(self._descriptor).st_size
        offset += _write(self._descriptor, records, offset)
        failpoint("journal.written")
        complete = [record for record in records if record.kind is not Kind.PART]
        if not complete:
            return
        os.fsync(self._descriptor)
        trailing = records[records.index(complete[-1]) + 1 :]
        segment.size = offset - sum(record.size for record in trailing)
        for record in complete:
            self._follow(record)
        self.end = (segment.number, segment.size)
        failpoint("journal.flushed")

    def _begin_segment(self, relations: tuple[bytes, ...], branch: Branch) -> None:
        number = self._segments[-1].number + 1 if self._segments else 1
        header = Header(self.identity, number, self.last, branch).encode()
        records = [Record(Kind.HEADER, header, self.end_lsn)]
        if relations:
            records.append(Record(Kind.RELATIONS, pack(relations)))
        path = self.path / f"{number:010d}{_SUFFIX}"
        unnamed = path.with_suffix(".new")
        descriptor = os.open(unnamed, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600)
        try:
            size = _write(descriptor, records, 0)
            os.fsync(descriptor)
            unnamed.rename(path)
            _flush_directory(self.path)
        except BaseException:
            os.close(descriptor)
            raise
        self._close_descriptor()
        self._descriptor = descriptor
        self._segments.append(Segment(number, path, self.end_lsn, branch, size))
        self.end = (number, size)
        failpoint("journal.segment_begun")

    def _remove_stray_files(self) -> None:
        current_paths = {segment.path for segment in self._segments}
        for file in [*_files(self.path).values(), *self.path.glob("*.new")]:
            if file not in current_paths:
                file.unlink()

    def _close_descriptor(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    # ---- reading and trimming ------------------------------------------------------------------

    @property
    def start_lsn(self) -> Lsn:
        """The journal or the source contains every transaction committed from here on."""
        return self._segments[0].start_lsn

    @property
    def size_bytes(self) -> int:
        return sum(segment.size for segment in list(self._segments))

    def segment_at(self, lsn: Lsn) -> Segment:
        """Return the segment at which a reader starts after it has applied all changes up to
        *lsn*.
        """
        candidate = self._segments[0]
        for segment in self._segments:
            if segment.start_lsn <= lsn:
                candidate = segment
        return candidate

    def segment_after(self, segment: Segment) -> Segment:
        """Return the segment after *segment*, which is not the last segment."""
        return self._segments[segment.number + 1 - self._segments[0].number]

    def trim(self, lsn: Lsn) -> None:
        """Delete the segments without changes after *lsn*, except the last segment."""
        while len(self._segments) > 1 and self._segments[1].start_lsn <= lsn:
            self._segments[0].path.unlink(missing_ok=True)
            self._segments.pop(0)
            failpoint("journal.trimmed")


_HINT: Final = "check that disk for errors; the journal's contents may be lost"


def _files(path: Path) -> dict[int, Path]:
    """Return the segment files in a directory by number; ignore foreign files."""
    files = path.glob(f"*{_SUFFIX}")
    return {int(file.stem): file for file in files if re.fullmatch("[0-9]{1,18}", file.stem)}


def _read_header(file: Path, number: int) -> tuple[Header, Lsn]:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        result = read_record(descriptor, 0, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
    if result is None or result[0].kind is not Kind.HEADER:
        raise JournalError(f"{file} is damaged", hint=_HINT)
    header = Header.decode(result[0].body)
    if header is None:
        raise JournalError(
            f"{file} was written by another version of streamer",
            hint="run that version until the journal is empty",
        )
    if header.number != number:
        raise JournalError(f"{file} is damaged: its header has number {header.number}", hint=_HINT)
    return header, result[0].lsn


def remove_journal(path: Path) -> None:
    """Delete the journal in a directory, if present: entirely, or not at all."""
    discarded = path.with_name(f"{path.name}{_GONE}")
    shutil.rmtree(discarded, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        path.rename(discarded)
        failpoint("journal.discarding")
        _flush_directory(path.parent)
    shutil.rmtree(discarded, ignore_errors=True)


def has_journal(path: Path) -> bool:
    """Whether a directory has a journal's files, and no deletion of the journal has begun."""
    return not path.name.endswith(_GONE) and bool(_files(path))


def move_journal(path: Path, place: Path) -> None:
    """Move a journal that no process uses to the empty *place*: entirely, or not at all.

    Raises SpoolError.
    """
    with _saying(path):
        lock = _lock(path)
        try:
            make_private(place.parent)
            remove_journal(place)
            path.rename(place)
            for directory in (place.parent, place.parent.parent, path.parent):
                _flush_directory(directory)
        finally:
            os.close(lock)


def try_directory(path: Path) -> None:
    """Check that a journal can begin at *path*. Raises SpoolError."""
    with _saying(path):
        make_private(path.parent)
        trial = path.with_name(f"{path.name}.trial")
        descriptor = os.open(trial, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600)
        try:
            _write_bytes(descriptor, bytes(_TRIAL_BYTES), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            trial.unlink()


def _lock(path: Path) -> int:
    lock = os.open(path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise SpoolError(f"another process uses the journal in {path}") from None
    return lock


def _write(descriptor: int, records: list[Record], offset: int) -> int:
    """Write records in order; return the number of bytes."""
    begin = offset
    small: list[bytes] = []
    for part in chain.from_iterable(record.encode() for record in records):
        if len(part) > LARGE_BYTES:  # joining would copy the part
            offset += _write_bytes(descriptor, b"".join(small), offset)
            offset += _write_bytes(descriptor, part, offset)
            small.clear()
        else:
            small.append(part)
    return offset + _write_bytes(descriptor, b"".join(small), offset) - begin


def _write_bytes(descriptor: int, data: bytes, offset: int) -> int:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        offset += count
        view = view[count:]
    return len(data)


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _saying(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise SpoolError(
            f"cannot use the journal in {path}: {exc.strerror}",
            hint="free disk space there; until then the source keeps its WAL",
        ) from exc
