"""Lag, changes and held bytes over the last day, of the tables that changed lately or that a page
shows.

A process may have 100,000 tables, so the history keeps the first `TABLES_MAX` active tables. An
active table replaces a table that has been idle for `IDLE_SECONDS`. streamer does not store these
values in the database, so a restart clears the history.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from streamer.admin.live.minute_series import Point, Series
from streamer.bookkeeping.minutes import Values
from streamer.mapping.relation_names import RelationName, parse_name
from streamer.observability.metrics import Metrics
from streamer.runtime.session.supervisor import Supervisor

TABLES_MAX: Final = 256
IDLE_SECONDS: Final = 600.0
TABLE_FIELDS: Final = ("lag_seconds", "changes_per_second", "held_bytes")

Table = tuple[str, str]
"""The label of a source, and a table of the source."""


class Sampled(Protocol):
    """The sampled object, which is an engine."""

    @property
    def supervisors(self) -> Sequence[Supervisor]: ...

    @property
    def metrics(self) -> Metrics: ...


class TableHistory:
    def __init__(self, engine: Sampled) -> None:
        self._engine = engine
        self._series: Series[Table] = Series()
        self._names: dict[Table, RelationName] = {}
        """The sampled tables."""
        self._active_at: dict[Table, float] = {}
        """The time of the last activity of each sampled table, the oldest first."""
        self._counts: dict[Table, int] | None = None
        """The number of changes at the last sample; None before the first sample."""

    def follow(self, source: str, table: str, now: float) -> None:
        """Start to sample a table that a page shows, if this process streams the table."""
        pipeline = next(
            (s.pipeline for s in self._engine.supervisors if s.source.label == source), None
        )
        if pipeline is not None and pipeline.table_figures(parse_name(table)) is not None:
            self._mark_active((source, table), now, idle_since=now)

    def sample(self, now: float, seconds: float) -> None:
        """Add a sample of each table. *seconds*: the time since the last sample."""
        counts = {
            table: number for table, (number, _) in self._engine.metrics.changes_of_tables.items()
        }
        earlier = counts if self._counts is None else self._counts
        for table, number in counts.items():
            if number != earlier.get(table, 0):
                self._mark_active(table, now, idle_since=now - IDLE_SECONDS)
        supervisors = {s.source.label: s for s in self._engine.supervisors}
        for table in [table for table in self._names if table[0] not in supervisors]:
            self._forget(table)
        samples = {}
        for table, name in self._names.items():
            changes = counts.get(table, 0) - earlier.get(table, 0)
            rate = None if self._counts is None else max(0, changes) / seconds
            samples[table] = _values(supervisors[table[0]], name, rate)
        self._series.add(now, samples)
        self._counts = counts

    def points(self, source: str, table: str, since: float) -> list[Point]:
        """Return times and values of a table after *since*, the oldest first."""
        return self._series.points((source, table), since=since)

    def _mark_active(self, table: Table, now: float, idle_since: float) -> None:
        """Sample *table*. If the history is full, *table* replaces a table without activity since
        *idle_since*.
        """
        if self._active_at.pop(table, None) is None:
            if len(self._names) >= TABLES_MAX:
                oldest, active_at = next(iter(self._active_at.items()))
                if active_at > idle_since:
                    return
                self._forget(oldest)
            self._names[table] = parse_name(table[1])
        self._active_at[table] = now

    def _forget(self, table: Table) -> None:
        del self._names[table], self._active_at[table]
        self._series.retain(self._names)


def _values(supervisor: Supervisor, name: RelationName, rate: float | None) -> Values:
    pipeline = supervisor.pipeline
    figures = None if pipeline is None else pipeline.table_figures(name)
    return (None, rate, None) if figures is None else (figures[0], rate, float(figures[1]))
