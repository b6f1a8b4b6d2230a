"""How much WAL a source retains for streamer, and how severe the backlog is."""

import enum
from dataclasses import asdict, dataclass
from typing import Any, Final

from streamer.mapping.rule_options import OnMaxRetainedWal
from streamer.mapping.rules import SourceMapping
from streamer.source.slot_and_publications.retained_wal import RetainedWal


class Level(enum.StrEnum):
    """The severity of a backlog."""

    OK = "ok"
    WARNING = "warning"
    THROTTLED = "throttled"
    OVER = "over"


_BEGINS_AT: Final = {Level.OVER: 1.0, Level.THROTTLED: 0.8, Level.WARNING: 0.5}
_HYSTERESIS: Final = 0.1
LIMIT_BYTES_MIN: Final = 1024 * 1024


def level_of(ratio: float, former: Level = Level.OK) -> Level:
    """Return the level for *ratio*, the part of the limit that is in use. Pure.

    A level ends a little below the ratio at which it begins, so that the level does not oscillate.
    """
    order = list(Level)
    for level, begins_at in _BEGINS_AT.items():
        reached = order.index(former) >= order.index(level)
        if ratio >= begins_at - (_HYSTERESIS if reached else 0):
            return level
    return Level.OK


def limit_of(source: SourceMapping, retained: RetainedWal | None) -> int | None:
    """Return how much WAL *source* may retain until the policy acts; None: any amount. Pure.

    A journal begins before the server removes the WAL and so invalidates the slot.
    """
    limit = source.max_retained_wal_bytes
    keep_size = None if retained is None else retained.keep_size_bytes
    if keep_size is None or source.on_max_retained_wal is not OnMaxRetainedWal.SPOOL:
        return limit
    half = max(keep_size // 2, LIMIT_BYTES_MIN)
    return half if limit is None else min(limit, half)


@dataclass(frozen=True, slots=True)
class Backlog:
    """The backlog of a source for operators. ``spooled_bytes``: the size of its journal."""

    limit_bytes: int | None
    retained_bytes: int
    state: Level
    policy: str
    spooled_bytes: int

    @classmethod
    def of(
        cls, source: SourceMapping, retained: RetainedWal | None, stored: dict[str, Any] | None
    ) -> "Backlog | None":
        """Return the backlog from the new measurement *retained* and the earlier backlog *stored*.

        None without a limit and a journal.
        """
        spooled_bytes = 0 if stored is None else int(stored["spooled_bytes"])
        if limit_of(source, retained) is None and not spooled_bytes:
            return None
        former = Level.OK if stored is None else Level(stored["state"])
        return cls.measured(source, retained, spooled_bytes, former)

    @classmethod
    def measured(
        cls, source: SourceMapping, retained: RetainedWal | None, spooled_bytes: int, former: Level
    ) -> "Backlog":
        """Return the backlog of a source whose earlier level was *former*."""
        limit = limit_of(source, retained)
        size = 0 if retained is None else retained.retained_bytes
        level = level_of(size / limit, former) if limit else Level.OK
        return cls(limit, size, level, source.on_max_retained_wal.value, spooled_bytes)

    @property
    def ratio(self) -> float:
        return self.retained_bytes / self.limit_bytes if self.limit_bytes else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
