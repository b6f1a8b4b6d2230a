"""Metrics with a series for each table, up to a number of tables.

Sixty sources with 200 tables each would make 100,000 series. So above ``http.metrics_tables_max``
tables a scrape shows one series for all tables of a source, with an empty label ``table``. The
process still counts by table.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client.core import CounterMetricFamily, Metric, SummaryMetricFamily

SOURCE: Final = ("database", "sid")
TableLabels = tuple[str, str, str]
"""Database, sid (or an empty string) and name of a source table."""


class TableDetail:
    """Whether scrapes show series for each table.

    Once the tables exceed the limit, the series end permanently, so that series do not come and go.
    """

    def __init__(self, tables_max: int | None) -> None:
        self.tables_max = tables_max
        self.count_tables: Callable[[], int] = lambda: 0
        """Counts the tables of this process."""
        self._were_too_many = False

    @property
    def is_on(self) -> bool:
        if self.tables_max is not None and self.count_tables() > self.tables_max:
            self._were_too_many = True
        return not self._were_too_many


class TableCounter:
    """A counter by table and, with *label*, by a second label.

    The event loop counts and calls `read`; any thread may call `build` with the result.
    """

    def __init__(self, name: str, help_text: str, label: str | None, detail: TableDetail) -> None:
        self.name, self.help_text = name, help_text
        self.labels = (*SOURCE, "table") if label is None else (*SOURCE, "table", label)
        self._detail = detail
        self._values: dict[tuple[str, ...], int] = {}

    def add(self, number: int, *labels: str) -> None:
        """Count *number* for *labels*: the labels of a table, and the value of the second label."""
        self._values[labels] = self._values.get(labels, 0) + number

    def read(self) -> dict[tuple[str, ...], int]:
        """Return the values by labels."""
        if self._detail.is_on:
            return dict(self._values)
        sums: dict[tuple[str, ...], int] = defaultdict(int)
        for (database, sid, _, *second), value in self._values.items():
            sums[database, sid, "", *second] += value
        return sums

    def build(self, values: dict[tuple[str, ...], int]) -> Iterable[Metric]:
        family = CounterMetricFamily(self.name, self.help_text, labels=self.labels)
        for labels, value in values.items():
            family.add_metric(labels, value)
        return [family]

    def collect(self) -> Iterable[Metric]:
        return self.build(self.read())

    def describe(self) -> Iterable[Metric]:
        return self.build({})


class TableSeconds:
    """The time that the target takes for the windows of each table.

    A scrape shows the tables that took most time, so the number of series has a limit.
    """

    SHOWN: Final = 20

    def __init__(self, name: str, help_text: str) -> None:
        self.name, self.help_text = name, help_text
        self._values: dict[TableLabels, tuple[float, int]] = {}
        """The seconds and the number of windows of each table."""

    def add(self, seconds: float, table: TableLabels) -> None:
        """Count a window of *table*."""
        total, count = self._values.get(table, (0.0, 0))
        self._values[table] = total + seconds, count + 1

    def by_source(self) -> dict[tuple[str, str], float]:
        """Return the seconds of each source, by database and sid."""
        sums: dict[tuple[str, str], float] = defaultdict(float)
        for (database, sid, _), (seconds, _) in self._values.items():
            sums[database, sid] += seconds
        return sums

    def read(self) -> list[tuple[TableLabels, float, int]]:
        """Return the slowest tables with seconds and number of windows."""
        values = ((table, seconds, count) for table, (seconds, count) in self._values.items())
        return heapq.nlargest(self.SHOWN, values, key=lambda value: value[1])

    def build(self, values: Iterable[tuple[TableLabels, float, int]]) -> Iterable[Metric]:
        family = SummaryMetricFamily(self.name, self.help_text, labels=(*SOURCE, "table"))
        for table, seconds, count in values:
            family.add_metric(table, count, seconds)
        return [family]

    def collect(self) -> Iterable[Metric]:
        return self.build(self.read())

    def describe(self) -> Iterable[Metric]:
        return self.build(())
