"""How far the program is: bookkeeping while it copies, metrics while it streams."""

import time
import urllib.request
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

import psycopg
from prometheus_client.parser import text_string_to_metric_families

from streamer.commands.demo.stage import DemoError
from streamer.waiting import in_thread

_SYNC_SQL: Final = """
select count(*) filter (where r.state = 'ready') as ready,
       coalesce(sum(case when r.state = 'copying' then p.rows_copied else r.rows_copied end), 0)
         + (select coalesce(sum(tuples_processed), 0) from pg_stat_progress_copy
             where command = 'COPY FROM') as rows_copied,
       (select min(error) from streamer.source where state = 'error') as source_error,
       min(r.source || ': ' || r.error) filter (where r.state = 'error') as relation_error
  from streamer.relation r
  left join (select relation_id, sum(rows_copied) as rows_copied from streamer.sync_partition
              where finished_at is not null group by relation_id) p on p.relation_id = r.id
"""


@dataclass(frozen=True, slots=True)
class SyncProgress:
    """The progress of the copies, uncommitted rows included."""

    rows_copied: int = 0
    tables_ready: int = 0


class CopyWatch:
    """The bookkeeping in the target, read over a separate connection."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: psycopg.AsyncConnection[tuple[Any, ...]] | None = None

    async def __aenter__(self) -> Self:
        self._connection = await psycopg.AsyncConnection.connect(self._url, autocommit=True)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def _row(self, sql: str) -> tuple[Any, ...]:
        assert self._connection is not None
        cursor = await self._connection.execute(sql.encode())
        (row,) = await cursor.fetchall()
        return row

    async def read(self) -> SyncProgress:
        """Return how far the copy is. Raises DemoError when it stopped."""
        (exists,) = await self._row("select to_regclass('streamer.request') is not null")
        if not exists:
            return SyncProgress()
        ready, rows, source_error, relation_error = await self._row(_SYNC_SQL)
        if error := source_error or relation_error:
            raise DemoError(f"streamer stopped: {error}")
        return SyncProgress(int(rows), ready)

    async def rows_copied(self) -> int:
        """Return the number of copied rows in all."""
        (rows,) = await self._row("select sum(rows_copied)::int8 from streamer.relation")
        return int(rows)


@dataclass(slots=True)
class Flow:
    """The metrics of one source."""

    changes: int = 0
    transactions: int = 0
    lag_bytes: int = 0
    lag_seconds: float = 0.0
    visible_count: float = 0.0
    visible_seconds: float = 0.0


@dataclass(slots=True)
class Sample:
    """The metrics at one moment, by sid."""

    taken_at: float = 0.0
    flows: dict[str, Flow] = field(default_factory=dict)

    @property
    def changes(self) -> int:
        return sum(flow.changes for flow in self.flows.values())

    @property
    def transactions(self) -> int:
        return sum(flow.transactions for flow in self.flows.values())

    @property
    def lag_bytes(self) -> int:
        return sum(flow.lag_bytes for flow in self.flows.values())

    @property
    def lag_seconds(self) -> float:
        return max((flow.lag_seconds for flow in self.flows.values()), default=0.0)

    def commit_to_visible_seconds(self, since: "Sample") -> float | None:
        """Return how long a transaction took on average from commit there to commit here."""
        count = seconds = 0.0
        for sid, flow in self.flows.items():
            before = since.flows.get(sid, Flow())
            count += flow.visible_count - before.visible_count
            seconds += flow.visible_seconds - before.visible_seconds
        return seconds / count if count else None


_FIELDS: Final = {
    "streamer_changes_applied_total": "changes",
    "streamer_transactions_applied_total": "transactions",
    "streamer_lag_bytes": "lag_bytes",
    "streamer_lag_seconds": "lag_seconds",
    "streamer_commit_to_visible_seconds_count": "visible_count",
    "streamer_commit_to_visible_seconds_sum": "visible_seconds",
}
_SUMS: Final = ("changes", "transactions", "lag_bytes")


def parse_metrics(text: str) -> dict[str, Flow]:
    """Read the metrics of each source from ``/metrics``."""
    flows: dict[str, Flow] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = _FIELDS.get(sample.name)
            if name is not None:
                flow = flows.setdefault(sample.labels["sid"], Flow())
                value = int(sample.value) if name in _SUMS else sample.value
                setattr(flow, name, getattr(flow, name) + value)
    return flows


class ScrapedMetrics:
    """The program's ``/metrics``."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/metrics"
        # It is on this machine, so ignore a proxy of the environment.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    async def read(self) -> Sample:
        """Return the present metrics. Raises DemoError if the program does not answer."""
        return Sample(time.monotonic(), parse_metrics(await in_thread(self._fetch)))

    def _fetch(self) -> str:
        try:
            with self._opener.open(self._url, timeout=10) as answer:
                return str(answer.read().decode())
        except OSError as exc:
            raise DemoError(f"{self._url} does not answer: {exc}") from exc
