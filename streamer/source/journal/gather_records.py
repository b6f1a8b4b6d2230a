"""Converts the source's messages to records that a journal can write and read again.

The journal requests no streaming, so the source sends whole committed transactions, one by one. The
gatherer omits transactions that the journal already contains. A slot falls back a little when the
server crashes, and the source then sends transactions again. The repeated transactions also
identify the source's history, as in `streamer.source.history_check`.

Pure.
"""

from dataclasses import dataclass
from typing import Final

from streamer.decode import pgoutput
from streamer.errors.error_classes import ProtocolError
from streamer.source.history_check import CommittedTransaction, HistoryCheck
from streamer.source.journal.journal_records import Kind, Record, pack
from streamer.util.lsn import Lsn

RECORD_BYTES: Final = 1024 * 1024
SEGMENT_BYTES: Final = 64 * 1024 * 1024

_INSIDE: Final = pgoutput.ROW_KINDS | {
    pgoutput.ORIGIN,
    pgoutput.TYPE,
    pgoutput.TRUNCATE,
    pgoutput.MESSAGE,
}


@dataclass(frozen=True, slots=True)
class NewSegment:
    """The next records go to a new file, which begins with the known relations."""

    relations: tuple[bytes, ...]


class Gatherer:
    """Gathers the messages of one START_REPLICATION. ``end_lsn``: the LSN up to which all changes
    have arrived.
    """

    def __init__(self, end_lsn: Lsn, last: CommittedTransaction | None, start_lsn: Lsn) -> None:
        """The journal ends at *end_lsn*, after the transaction *last*. The stream begins at
        *start_lsn*, which is not after *end_lsn*.
        """
        self.end_lsn = end_lsn
        self.size = 0
        """The approximate size of the records that the caller has not popped yet, in bytes."""
        self._last = last
        self._history = HistoryCheck(last, start_lsn)
        self._transaction: pgoutput.Begin | None = None
        self._is_recorded = False
        self._relations: dict[bytes, bytes] = {}
        self._newer_relations: dict[bytes, bytes] = {}
        self._messages: list[bytes] = []
        self._complete_count = 0
        self._message_bytes = 0
        self._segment_bytes = 0
        self._records: list[Record | NewSegment] = []
        self._position: Lsn | None = None

    @property
    def is_between_transactions(self) -> bool:
        return self._transaction is None

    def feed(self, payloads: list[bytes]) -> bool:
        """Add messages in order; return False if the source has a different history.

        Raises ProtocolError.
        """
        for payload in payloads:
            kind = payload[0] if payload else 0
            if kind == pgoutput.BEGIN:
                if self._transaction is not None:
                    raise ProtocolError("BEGIN inside a transaction")
                self._transaction = begin = pgoutput.parse_begin(payload)
                self._is_recorded = begin.final_lsn < self.end_lsn
                if not self._is_recorded:
                    self._add(payload)
            elif kind == pgoutput.COMMIT:
                if not self._commit(payload):
                    return False
            elif kind == pgoutput.RELATION:
                # The source sends a definition only once, so keep definitions within skipped
                # transactions.
                self._newer_relations[payload[1:5]] = payload
                self._add(payload)
            elif kind == pgoutput.MESSAGE and not payload[1]:
                continue  # streamer's own messages are transactional
            elif self._transaction is None or kind not in _INSIDE:
                raise ProtocolError(f"pgoutput message {chr(kind)!r} out of place")
            elif not self._is_recorded:
                self._add(payload)
        return True

    def _add(self, payload: bytes) -> None:
        self._messages.append(payload)
        self._message_bytes += len(payload)
        self.size += len(payload)
        if self._message_bytes >= RECORD_BYTES:
            self._finish_record(may_be_part=True)

    def _commit(self, payload: bytes) -> bool:
        begin = self._transaction
        if begin is None:
            raise ProtocolError("COMMIT outside a transaction")
        commit = pgoutput.parse_commit(payload)
        if commit.commit_lsn != begin.final_lsn:
            raise ProtocolError(
                f"COMMIT at {commit.commit_lsn} does not belong to the transaction "
                f"that was to commit at {begin.final_lsn}"
            )
        self._transaction = None
        transaction = CommittedTransaction(commit.end_lsn, begin.xid, begin.commit_time)
        if not self._history.saw_transaction(transaction):
            return False
        if self._is_recorded:
            return True
        self._messages.append(payload)
        self._message_bytes += len(payload)
        self.size += len(payload)
        self.end_lsn, self._last = commit.end_lsn, transaction
        self._relations |= self._newer_relations
        self._newer_relations.clear()
        self._complete_count = len(self._messages)
        if self._message_bytes >= RECORD_BYTES:
            self._finish_record(may_be_part=False)
        return True

    def keepalive(self, wal_end_lsn: Lsn) -> bool:
        """Record that the source has reached *wal_end_lsn*; return False if the source has a
        different history. Call only between transactions.
        """
        if not self._history.saw_position(wal_end_lsn):
            return False
        if wal_end_lsn > self.end_lsn:
            self.end_lsn = self._position = wal_end_lsn
        return True

    def _finish_record(self, *, may_be_part: bool) -> None:
        count = self._complete_count
        if count:
            self._emit(Kind.COMMITS, count)
            if self._segment_bytes >= SEGMENT_BYTES:
                self._segment_bytes = 0
                self._records.append(NewSegment(tuple(self._relations.values())))
        if may_be_part and self._message_bytes >= RECORD_BYTES:
            self._put_position()  # first, because a cut removes a PART and all later records
            self._emit(Kind.PART, len(self._messages))

    def _put_position(self) -> None:
        position, self._position = self._position, None
        if position is not None and position == self.end_lsn:
            self._records.append(Record(Kind.POSITION, lsn=position))

    def _emit(self, kind: Kind, count: int) -> None:
        body = pack(self._messages[:count])
        del self._messages[:count]
        self._message_bytes = sum(map(len, self._messages))
        self._complete_count = 0
        self._segment_bytes += len(body)
        if kind is Kind.PART or self._last is None:
            self._records.append(Record(kind, body))
        else:
            last = self._last
            self._records.append(Record(kind, body, last.end_lsn, last.xid, last.commit_time))

    def pop_records(self) -> list[Record | NewSegment]:
        """Return the complete records, and large portions of an unfinished transaction."""
        self._finish_record(may_be_part=False)
        self._put_position()
        records, self._records = self._records, []
        self.size = self._message_bytes
        return records
