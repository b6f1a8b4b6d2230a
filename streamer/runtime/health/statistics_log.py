"""Logs a line of statistics for each source with changes, every `statistics_interval` seconds."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from streamer.observability.metrics import Metrics
from streamer.runtime.session.supervisor import Supervisor

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums of a source since the start of the process."""

    changes: int = 0
    transactions: int = 0
    target_seconds: float = 0.0


class StatisticsLog:
    """Keeps the totals of the last line of each source."""

    def __init__(
        self, metrics: Metrics, supervisors: Sequence[Supervisor], interval: float
    ) -> None:
        """*interval*: seconds between two lines; 0 for none."""
        self._metrics = metrics
        self._supervisors = supervisors
        self._interval = interval
        self._former: dict[str, Totals] = {}
        self._logged_at = time.monotonic()

    async def run(self) -> None:
        """Log until cancelled."""
        while self._interval:
            await asyncio.sleep(self._interval)
            self.log_sources()

    def log_sources(self) -> None:
        """Log a line for each source of this process with changes since the last call."""
        now = time.monotonic()
        seconds, self._logged_at = round(now - self._logged_at, 1), now
        transactions = self._metrics.transactions_of_sources()
        target_seconds = self._metrics.apply_seconds.by_source()
        for supervisor in self._supervisors:
            label = supervisor.source.label
            names = supervisor.source.database, supervisor.source.sid or ""
            totals = Totals(
                self._metrics.changes_of_sources.get(label, 0),
                transactions.get(names, 0),
                target_seconds.get(names, 0.0),
            )
            former = self._former.get(label, Totals())
            self._former[label] = totals
            if (totals.changes, totals.transactions) != (former.changes, former.transactions):
                log.info("statistics", **_fields(supervisor, totals, former), seconds=seconds)


def _fields(supervisor: Supervisor, totals: Totals, former: Totals) -> dict[str, Any]:
    pipeline = supervisor.pipeline
    fields = {
        "source": supervisor.source.label,
        "changes": totals.changes - former.changes,
        "transactions": totals.transactions - former.transactions,
        "target_seconds": round(totals.target_seconds - former.target_seconds, 3),
        "lag_seconds": None if pipeline is None else round(pipeline.lag_seconds(), 3),
        "retained_wal_bytes": supervisor.retained_wal_bytes,
    }
    return {name: value for name, value in fields.items() if value is not None}
