"""A window of changes of a history table as chains: the changes of each key, in order.

A chain lists the versions of a row that begin in the window, with times. Sets can write chains: a
statement ends the open versions, and a COPY writes all new versions. A change that a chain cannot
express raises `NotFoldable`, and the worker then applies the window in exact order. Such changes
are a change of the key, a TRUNCATE, and a value that only the target has. A chain also cannot
express an INSERT of a pending row, or an UPDATE or DELETE of a deleted row. Pure.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any, Final

from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.apply.rows.fold import Counts, NotFoldable, read_changes
from streamer.decode.pgoutput import DELETE, INSERT, UPDATE, from_datetime
from streamer.decode.tuples import PendingRow, Row, is_partial, merge

BEGIN_TIME: Final = from_datetime(datetime(1900, 1, 1, tzinfo=UTC))
"""`HISTORY_BEGIN` as a commit time: microseconds since 2000."""
OPEN_TIME: Final = from_datetime(datetime(9999, 1, 1, tzinfo=UTC))
"""`HISTORY_OPEN` as a commit time."""
ITEMS: Final = 4
"""Items of a chain for each change: commit time, kind, the number of the change, and the row."""

Chain = list[Any]
Version = tuple[int, PendingRow, int, int, bool]
"""The number of the change that begins the version, the row, the beginning, the end, and whether a
delete ended the version.
"""


@dataclass(slots=True)
class Versions:
    """Changes of one history table under one definition, as chains by key."""

    plan: ApplyPlan
    chains: dict[Any, Chain] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    change_count: int = 0

    def add(self, payloads: list[bytes], times: list[int], stops: list[int]) -> None:
        """Add changes of some transactions, in order. Raises NotFoldable, ProtocolError.

        *times*: the commit time of each transaction. *stops*: the end of its changes in *payloads*.
        """
        folder, counts, position = self.plan.folder, [0, 0, 0], 0
        while position < len(payloads):
            transaction = bisect_right(stops, position)
            if folder is not None:
                start, number = position, self.change_count
                position = folder.chain(
                    payloads, position, times, stops, transaction, number, self.chains, counts
                )
                self.change_count += position - start
                if position == len(payloads):
                    break
                transaction = bisect_right(stops, position)
            self._add(times[transaction], payloads[position])
            self.change_count += 1
            position += 1
        self.counts.insert += counts[0]
        self.counts.update += counts[1]
        self.counts.delete += counts[2]

    def _add(self, commit_time: int, payload: bytes) -> None:
        if not isinstance(payload, bytes):
            raise NotFoldable  # a large value is still on disk
        (change,) = read_changes(self.plan, [payload])
        kind, row = change.kind, change.new if change.new is not None else change.old
        if row is None:
            raise NotFoldable
        get_key = self.plan.get_key
        key = get_key(row)
        if kind == UPDATE and change.old is not None and get_key(change.old) != key:
            raise NotFoldable
        chain = self.chains.setdefault(key, [])
        if chain and (kind == INSERT) != (chain[1 - ITEMS] == DELETE):
            raise NotFoldable
        if kind != DELETE and is_partial(row):
            if kind == INSERT or not chain:
                raise NotFoldable
            row = merge(row, self._read(chain[-1]))
        chain += (commit_time, kind, self.change_count, row)
        self.counts.count([payload])

    def in_order_of_keys(self) -> list[tuple[Any, Chain]]:
        """Return keys and chains in the order of keys, which the target finds faster."""
        try:
            return sorted(self.chains.items(), key=itemgetter(0))
        except TypeError:  # keys with NULL have no order
            return list(self.chains.items())

    def _read(self, pending: PendingRow) -> Row:
        return self.plan.read_row(pending)[0] if isinstance(pending, bytes) else pending


def is_reinserted(chain: Chain) -> bool:
    """Return whether an insert of the row follows an earlier change of the row."""
    return len(chain) > ITEMS and INSERT in chain[ITEMS + 1 :: ITEMS]


def new_versions(chain: Chain, last_end: int | None) -> Iterator[Version]:
    """Yield the versions that begin with the changes of *chain*, in order.

    *last_end*: the end of the key's last closed version, if there is a closed version. If the chain
    begins with an update or a delete, the target has an open version that began earlier.
    """
    row: PendingRow | None = None
    first_time, kind, number, changed = chain[:ITEMS]
    since = until = first_time
    if kind == INSERT:
        since = until = BEGIN_TIME if last_end is None else max(since, last_end)
    if kind != DELETE:
        row = changed
    for n in range(ITEMS, len(chain), ITEMS):
        time, kind, next_number, changed = chain[n : n + ITEMS]
        # A source's commit times may decrease from commit to commit, and no version may end before
        # its beginning.
        until = max(until, time)
        if kind == INSERT and last_end is not None:
            until = max(until, last_end)
        if row is not None:
            yield number, row, since, until, kind == DELETE
        since, number = until, next_number
        row = None if kind == DELETE else changed
    if row is not None:
        yield number, row, since, OPEN_TIME, False
