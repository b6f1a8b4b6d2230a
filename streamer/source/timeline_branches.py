"""The branches of a source's history: timelines and fork points.

Pure.
"""

from dataclasses import dataclass

from streamer.util.lsn import LSN_MAX, Lsn


@dataclass(frozen=True, slots=True)
class Branch:
    """A timeline, and the end of each ancestor, the oldest first.

    Each server numbers timelines independently. So two standbys that are promoted separately get
    the same number, and only the ends of their ancestors distinguish the branches.
    """

    timeline: int
    ends: tuple[tuple[int, Lsn], ...] = ()

    @classmethod
    def parse(cls, timeline: int, history: str) -> "Branch":
        """Read the text of a timeline history file, or the `text` of a branch."""
        lines = (line.partition("#")[0].split(None, 2) for line in history.splitlines())
        ends = [(int(f[0]), Lsn.parse(f[1])) for f in lines if len(f) >= 2 and f[0].isdigit()]
        return cls(timeline, tuple(ends))

    @property
    def text(self) -> str:
        """The ends, one on each line, in the format of the bookkeeping."""
        return "\n".join(f"{timeline} {lsn}" for timeline, lsn in self.ends)

    @property
    def has_ends(self) -> bool:
        """Whether the ends of the ancestors are known; the first timeline has no ancestors."""
        return self.timeline == 1 or bool(self.ends)

    def end_of(self, timeline: int) -> Lsn | None:
        """Return the end of an ancestor; None if *timeline* is not an ancestor."""
        return dict(self.ends).get(timeline)


@dataclass(frozen=True, slots=True)
class KnownServer:
    """The server and branch of a source that the bookkeeping stores, if any."""

    system_identifier: str | None = None
    branch: Branch | None = None
    database_oid: int | None = None


def common_end(stored: Branch, now: Branch) -> Lsn | None:
    """Return the point at which two branches fork; `LSN_MAX` if equal, None without a common
    part.
    """
    if not (stored.has_ends and now.has_ends):  # compare only the numbers
        return LSN_MAX if stored.timeline == now.timeline else now.end_of(stored.timeline)
    fork_lsn = None
    old, new = ([*b.ends, (b.timeline, LSN_MAX)] for b in (stored, now))
    for (timeline, end_lsn), (successor, other_end_lsn) in zip(old, new, strict=False):
        if timeline != successor:
            break
        fork_lsn = min(end_lsn, other_end_lsn)
        if end_lsn != other_end_lsn:
            break
    return fork_lsn


def is_same_or_continued(stored: Branch, now: Branch) -> bool:
    """Return whether *now* is the branch *stored*, or continues that branch."""
    return common_end(stored, now) == LSN_MAX or is_continued(stored, now)


def is_continued(stored: Branch, now: Branch) -> bool:
    """Return whether *now* is a later timeline that continues *stored*."""
    end_lsn = now.end_of(stored.timeline)
    return end_lsn is not None and common_end(stored, now) == end_lsn
