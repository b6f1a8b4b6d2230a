"""Decides which keys differ, from readings of both sides that change meanwhile. Pure.

A *round* is a reading of the source and then a reading of the target, each of all keys in question.
A source reading S has a position L: the source had flushed up to L every commit that S sees. A
target reading T has a position P: T contains all commits of the table up to P, and no later change.

*Equal.* The target's content of a key equals the source's content in the newest S with L ≤ P, or in
a later S. An older S does not count, because T contains later changes.

*Different.* From round i on, the key has the same row versions (table, ctid and xmin) on
each side, and both sides differ. Then three more facts make a real difference certain:

- a T of round m ≥ i has P ≥ L of round i. So T holds the source's row of round i or a later row;
- no transaction of round m that could be committing still runs before the S of a round n > m.
  Therefore the S of round n sees every commit that the T of round m holds. A source makes a
  commit visible after writing the commit record, with synchronous replication much later;
- a T of a round q ≥ n has P ≥ L of round n. A row that the source lacks at i and n, and had in
  between, is deleted at the target by then.

*Undecided* is a key with neither judgement when the time is over.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from streamer.util.lsn import Lsn

Row = tuple[str, tuple[str | None, ...]]
"""The version of a row by table, ctid and xmin, and the values or hashes of values."""
Rows = Mapping[int, Sequence[Row]]
"""The rows of keys, by the number of the key. A key without rows has no entry."""

UNKNOWN_COMMIT: Final = "*"
"""Stands for a transaction that may be committing, but whose xid is hidden."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A key whose rows differ: the numbers of missing, extra and different rows, and the differing
    columns.
    """

    missing: int
    extra: int
    different: int
    columns: tuple[int, ...]

    @property
    def kind(self) -> str:
        if self.different:
            return "different"
        return "missing" if self.missing else "extra"


def find_difference(
    source: Iterable[Row], target: Iterable[Row], *, keeps_more: bool
) -> Difference | None:
    """Compare the rows of a key as multisets; None if equal.

    *keeps_more*: ignore rows that only the target has.
    """
    source_counts, target_counts = Counter(v for _, v in source), Counter(v for _, v in target)
    lacking = list((source_counts - target_counts).elements())
    surplus = list((target_counts - source_counts).elements())
    different = min(len(lacking), len(surplus))
    columns: set[int] = set()
    for new, old in zip(lacking, surplus, strict=False):
        columns |= {n for n, (a, b) in enumerate(zip(new, old, strict=True)) if a != b}
    missing, extra = len(lacking) - different, len(surplus) - different
    if keeps_more:
        extra = 0
    if not missing and not extra and not different:
        return None
    return Difference(missing, extra, different, tuple(sorted(columns)))


@dataclass(frozen=True, slots=True)
class SourceReading:
    """``committing``: transactions that ran just before the reading and could be committing."""

    lsn: Lsn
    committing: frozenset[str]
    rows: Rows


@dataclass(frozen=True, slots=True)
class TargetReading:
    """``lsn``: None while the target table corresponds to no position, as during a copy."""

    lsn: Lsn | None
    rows: Rows


@dataclass(slots=True)
class _Round:
    """Positions of a round. The target's position is None before its reading, or if it has no
    position.
    """

    source_lsn: Lsn
    committing: frozenset[str]
    target_lsn: Lsn | None = None


@dataclass(slots=True)
class _Pending:
    """A key in question: the row versions on both sides, since round ``since``."""

    source_versions: tuple[str, ...] = ()
    target_versions: tuple[str, ...] = ()
    since: int = 0
    contents: list[tuple[Lsn, bytes]] = field(default_factory=list)
    """The contents of the key in the relevant readings of the source, with positions."""

    def add(self, lsn: Lsn, content: bytes) -> None:
        """Record a reading, unless equal to the last reading."""
        if not self.contents or self.contents[-1][1] != content:
            self.contents.append((lsn, content))

    def had_content(self, content: bytes, target_lsn: Lsn) -> bool:
        """Return whether the source had *content* in its newest reading up to *target_lsn*, or in a
        later reading. Drop older readings.
        """
        numbers = [n for n, (lsn, _) in enumerate(self.contents) if lsn <= target_lsn]
        del self.contents[: numbers[-1] if numbers else 0]
        return any(content == seen for _, seen in self.contents)


class Judge:
    """Judges a batch of keys, round by round."""

    def __init__(self, keys: Iterable[int], *, keeps_more: bool) -> None:
        self._keeps_more = keeps_more
        self._pending = {key: _Pending() for key in keys}
        self._rounds: list[_Round] = []
        self._source: Rows = {}
        self._is_broken = False
        """Whether the last target reading had no position, so that earlier readings do not
        count.
        """
        self.different: dict[int, Difference] = {}

    @property
    def pending(self) -> list[int]:
        """The keys that are neither equal nor different yet."""
        return list(self._pending)

    @property
    def has_changing(self) -> bool:
        """Whether rows of a pending key have changed since the first round."""
        return any(pending.since > 0 for pending in self._pending.values())

    @property
    def newest_lsn(self) -> Lsn:
        """The source's position at the last reading."""
        return self._rounds[-1].source_lsn

    @property
    def has_caught_up(self) -> bool:
        """Whether the target has reached the source's position of the first round."""
        return self._reaches(0, self._rounds[0].source_lsn) is not None

    def read_source(self, reading: SourceReading) -> None:
        """Begin a round with *reading* of the source."""
        self._rounds.append(_Round(reading.lsn, reading.committing))
        self._source = reading.rows
        number = len(self._rounds) - 1
        for key, pending in self._pending.items():
            rows = reading.rows.get(key, ())
            versions = _versions(rows)
            if versions != pending.source_versions or self._is_broken:
                pending.source_versions, pending.since = versions, number
            pending.add(reading.lsn, _content(rows))
        self._is_broken = False

    def sample_source(self, lsn: Lsn, rows: Rows) -> None:
        """Add values that the source contains between two rounds, for rows that change often."""
        for key, pending in self._pending.items():
            pending.add(lsn, _content(rows.get(key, ())))

    def read_target(self, reading: TargetReading) -> None:
        """End the round, and judge."""
        number = len(self._rounds) - 1
        self._rounds[-1].target_lsn = reading.lsn
        if reading.lsn is None:
            self._is_broken = True
            return
        certain_round = self._certain_round()
        for key, pending in list(self._pending.items()):
            rows = reading.rows.get(key, ())
            versions = _versions(rows)
            if versions != pending.target_versions:
                pending.target_versions, pending.since = versions, number
            difference = self._difference(key, rows)
            if difference is None or pending.had_content(_content(rows), reading.lsn):
                del self._pending[key]
            elif pending.since <= certain_round:
                self.different[key] = difference
                del self._pending[key]

    def _difference(self, key: int, target: Sequence[Row]) -> Difference | None:
        return find_difference(self._source.get(key, ()), target, keeps_more=self._keeps_more)

    def _certain_round(self) -> int:
        """Return the last round for which a difference is certain, if the key has not changed since
        that round.
        """
        return max(
            (first for first in range(len(self._rounds)) if self._is_certain(first)), default=-1
        )

    def _is_certain(self, first: int) -> bool:
        target_round = self._reaches(first, self._rounds[first].source_lsn)
        if target_round is None:
            return False
        running = None
        for number in range(target_round + 1, len(self._rounds)):
            committing = self._rounds[number].committing
            running = committing if running is None else running & committing
            if not running:
                return self._reaches(number, self._rounds[number].source_lsn) is not None
        return False

    def _reaches(self, first: int, lsn: Lsn) -> int | None:
        """Return the first round from *first* on whose target reading contains all changes up to
        *lsn*.
        """
        for number in range(first, len(self._rounds)):
            reached = self._rounds[number].target_lsn
            if reached is not None and reached >= lsn:
                return number
        return None


def _versions(rows: Sequence[Row]) -> tuple[str, ...]:
    return tuple(sorted(version for version, _ in rows))


def _content(rows: Sequence[Row]) -> bytes:
    values = sorted(repr(values) for _, values in rows)
    return hashlib.blake2b("\0".join(values).encode(), digest_size=16).digest()
