"""The figures of the demo: sums of the program's metrics, and the result of the comparison."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from streamer.commands.demo.demo_servers import DemoError

_SUMS: Final = {
    "streamer_changes_applied_total": "changes",
    "streamer_transactions_applied_total": "transactions",
    "streamer_lag_bytes": "lag_bytes",
    "streamer_commit_to_visible_seconds_count": "visible_count",
    "streamer_commit_to_visible_seconds_sum": "visible_seconds",
}


@dataclass(slots=True)
class Figures:
    """Metrics of the program, as sums over all sources; ``lag_seconds`` is the highest."""

    changes: float = 0
    transactions: float = 0
    lag_bytes: float = 0
    lag_seconds: float = 0
    visible_count: float = 0
    visible_seconds: float = 0

    def commit_to_visible_seconds(self, first: "Figures") -> float | None:
        """Return the mean time from commit at a source to commit at the target, since *first*."""
        count = self.visible_count - first.visible_count
        return (self.visible_seconds - first.visible_seconds) / count if count else None


async def read_figures(url: str) -> Figures:
    """Read ``/metrics`` at *url*. Raises DemoError if the program does not answer."""
    try:
        # The program runs on this machine, so a proxy of the environment does not apply.
        async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
            text = (await client.get(url)).raise_for_status().text
    except httpx.HTTPError as exc:
        raise DemoError(f"{url} does not answer: {exc}") from exc
    figures = Figures()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if (name := _SUMS.get(sample.name)) is not None:
                setattr(figures, name, getattr(figures, name) + sample.value)
            elif sample.name == "streamer_lag_seconds":
                figures.lag_seconds = max(figures.lag_seconds, sample.value)
    return figures


@dataclass(slots=True)
class TableOfShops:
    """A table of all shops, as ``streamer compare`` found it. ``rows``: row counts by sid."""

    source: str
    target: str
    rows: dict[str, int] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        return not self.differences


def gather_tables(compared: Iterable[dict[str, Any]]) -> tuple[TableOfShops, ...]:
    """Gather the tables of ``compare --json`` by name. Pure."""
    tables: dict[str, TableOfShops] = {}
    for row in compared:
        table = tables.setdefault(row["source"], TableOfShops(row["source"], row["target"]))
        table.rows[row["sid"]] = row["rows_source"]
        if not row["equal"]:
            counts = ", ".join(
                f"{row[kind]} {kind}" for kind in ("missing", "extra", "different", "undecided")
            )
            table.differences.append(f"{row['sid']}: {row['error'] or counts}")
    return tuple(tables.values())


@dataclass(slots=True)
class DemoReport:
    """The result of the demo."""

    rows_copied: int = 0
    sync_seconds: float = 0.0
    workload_seconds: float = 0.0
    drain_seconds: float = 0.0
    changes: int = 0
    transactions: int = 0
    peak_lag_seconds: float = 0.0
    peak_lag_bytes: int = 0
    commit_to_visible_seconds: float | None = None
    tables: tuple[TableOfShops, ...] = ()

    @property
    def is_equal(self) -> bool:
        return bool(self.tables) and all(table.is_equal for table in self.tables)

    @property
    def changes_per_second(self) -> float:
        return self.changes / self.workload_seconds if self.workload_seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "tables"}
        fields["changes_per_second"] = self.changes_per_second
        fields["equal"] = self.is_equal
        fields["tables"] = [
            {
                "table": table.source,
                "target": table.target,
                "rows": table.rows,
                "equal": table.is_equal,
                "differences": table.differences,
            }
            for table in self.tables
        ]
        return {
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in fields.items()
        }
