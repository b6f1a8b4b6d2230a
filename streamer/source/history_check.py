"""Recognizes a source's history by a transaction.

After a crash a slot falls back a little, because the server saves its position only at checkpoints.
The source then repeats transactions that the target already contains. A source that was restored to
an earlier time may by now have written past the stored position. Then neither system identifier nor
WAL position reveals the restore, but the source sends a different history. So streamer stores the
newest acknowledged transaction. If a stream begins before that transaction, the source must send
that transaction again, with the same xid and commit time. Whether a stream contains a transaction
depends on the catalogs as of the transaction, so the answer never changes.

Pure.
"""

import json
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Self

from streamer.util.lsn import Lsn

KEPT_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class CommittedTransaction:
    """A transaction: the end of the commit record, the xid, and the commit time of pgoutput (in
    microseconds).
    """

    end_lsn: Lsn
    xid: int
    commit_time: int
    with_origins: bool = field(default=False, compare=False)
    """Whether the stream forwarded transactions with an origin; otherwise a stream may lack the
    transaction.
    """

    def to_json(self) -> str:
        return json.dumps(
            {
                "end_lsn": str(self.end_lsn),
                "xid": self.xid,
                "commit_time": self.commit_time,
                "with_origins": self.with_origins,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        return cls(
            Lsn.parse(fields["end_lsn"]),
            fields["xid"],
            fields["commit_time"],
            fields.get("with_origins", False),
        )


class HistoryCheck:
    """Checks that the source sends the stored transaction again, and keeps later transactions to
    store.

    With many transactions in flight, the check keeps only some. For a position after an omitted
    transaction, the newest kept transaction would be too old. So `position_through` returns the end
    of the kept transaction instead.
    """

    def __init__(
        self, stored: CommittedTransaction | None, start_lsn: Lsn, *, with_origins: bool = False
    ) -> None:
        """*with_origins*: the stream forwards transactions that carry an origin."""
        is_missed = stored is not None and stored.with_origins and not with_origins
        comes = stored is not None and stored.end_lsn > start_lsn and not is_missed
        self._expected = stored if comes else None
        self._stored_lsn = stored.end_lsn if stored is not None else start_lsn
        self._kept: deque[CommittedTransaction] = deque()
        self._before_gap: set[Lsn] = set()
        """Ends of the kept transactions before a gap."""
        self._last_lsn: Lsn | None = None
        """The end of the last transaction before a gap that the check returned."""

    def saw_transaction(
        self, transaction: CommittedTransaction, *, has_changes: bool = True
    ) -> bool:
        """Return False if the stream passed the expected transaction without delivering it.

        Without *has_changes* the transaction is never the expected transaction, because the source
        may omit it next time. (`pgoutput` begins to stream a large transaction before it knows
        whether the rest is empty.)
        """
        expected = self._expected
        if expected is not None and transaction.end_lsn >= expected.end_lsn:
            if transaction != expected:
                return False
            self._expected = None
        if has_changes:
            self._kept.append(transaction)
            if len(self._kept) > KEPT_MAX:
                self._thin_out()
        return True

    @property
    def is_complete(self) -> bool:
        """Whether the source has sent the stored transaction again, if necessary."""
        return self._expected is None

    def saw_transactions(self, first: CommittedTransaction, last: CommittedTransaction) -> None:
        """Keep the first and the last of consecutive transactions with changes.

        Only a complete check may omit the transactions in between.
        """
        assert self.is_complete
        self._kept.append(first)
        if last != first:
            self._before_gap.add(first.end_lsn)
            self._kept.append(last)
        if len(self._kept) > KEPT_MAX:
            self._thin_out()

    def _thin_out(self) -> None:
        """Drop every second transaction, but keep the first and the newest."""
        transactions, newest = list(self._kept), self._kept[-1]
        self._kept.clear()
        for number, transaction in enumerate(transactions):
            if number % 2 and transaction is not newest:
                self._before_gap.discard(transaction.end_lsn)
                self._before_gap.add(self._kept[-1].end_lsn)
            else:
                self._kept.append(transaction)

    def position_through(self, lsn: Lsn) -> Lsn:
        """Return the newest position up to *lsn* for which the check keeps the last transaction."""
        at = self._last_lsn
        for transaction in self._kept:
            if transaction.end_lsn > lsn:
                break
            at = transaction.end_lsn if transaction.end_lsn in self._before_gap else None
        return lsn if at is None else at

    def saw_position(self, lsn: Lsn) -> bool:
        """Return False if the stream reached *lsn* without the expected transaction."""
        return self._expected is None or lsn < self._expected.end_lsn

    def newest_through(self, lsn: Lsn) -> CommittedTransaction | None:
        """Return, once, the newest transaction up to *lsn* to store."""
        newest = None
        while self._kept and self._kept[0].end_lsn <= lsn:
            newest = self._kept.popleft()
            self._last_lsn = newest.end_lsn if newest.end_lsn in self._before_gap else None
            self._before_gap.discard(newest.end_lsn)
        if newest is None or newest.end_lsn <= self._stored_lsn:
            return None
        self._stored_lsn = newest.end_lsn
        return newest
