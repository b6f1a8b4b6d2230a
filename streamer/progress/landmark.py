"""Recognising a source's history by a transaction of it.

After a crash a slot falls back a little, because its position is saved at checkpoints only, and
the source sends again what the target has. A source that was restored to an earlier time looks the
same when it has written past its old position meanwhile: system identifier and WAL position tell
nothing, but what it sends is another history. So the newest acknowledged transaction is
remembered, and must come again, with its xid and commit time, whenever the stream begins before it.
Which transactions a stream has is decided by the catalogs of their own time, so it is the same
whenever it is read.

Pure.
"""

import json
from collections import deque
from dataclasses import dataclass
from typing import Final, Self

from streamer.lsn import Lsn

KEPT_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Landmark:
    """A transaction: where its commit record ends, its xid, its commit time (microseconds, as
    pgoutput gives it).
    """

    end_lsn: Lsn
    xid: int
    commit_time: int

    def to_json(self) -> str:
        return json.dumps(
            {"end_lsn": str(self.end_lsn), "xid": self.xid, "commit_time": self.commit_time}
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        return cls(Lsn.parse(fields["end_lsn"]), fields["xid"], fields["commit_time"])


class Landmarks:
    """Looks for the transaction that has to come again, and keeps those that may be next."""

    def __init__(self, stored: Landmark | None, start_lsn: Lsn) -> None:
        self._expected = stored if stored is not None and stored.end_lsn > start_lsn else None
        self._stored_lsn = stored.end_lsn if stored is not None else start_lsn
        self._kept: deque[Landmark] = deque()

    def came(self, landmark: Landmark, *, has_changes: bool = True) -> bool:
        """A transaction has come; False if the one that was expected cannot come any more.

        Without *has_changes* it may be left out another time (`pgoutput` sends an empty transaction
        if it was streamed before it was found to be empty), so it is never expected.
        """
        expected = self._expected
        if expected is not None and landmark.end_lsn >= expected.end_lsn:
            if landmark != expected:
                return False
            self._expected = None
        # Any transaction that is acknowledged serves.
        if has_changes and len(self._kept) < KEPT_MAX:
            self._kept.append(landmark)
        return True

    def passed(self, lsn: Lsn) -> bool:
        """Everything up to *lsn* has come; False if what was expected has not."""
        return self._expected is None or lsn < self._expected.end_lsn

    def newest_through(self, lsn: Lsn) -> Landmark | None:
        """Return the newest transaction up to *lsn* that is worth storing, once."""
        found = None
        while self._kept and self._kept[0].end_lsn <= lsn:
            found = self._kept.popleft()
        if found is None or found.end_lsn <= self._stored_lsn:
            return None
        self._stored_lsn = found.end_lsn
        return found
