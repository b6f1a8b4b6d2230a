"""The cost of the page for 200 sources with 20,000 tables: ``python -m benchmarks.fleet_page``.

The benchmark needs no server. Times are processor time in milliseconds.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from streamer.admin.live import fleet_overview
from streamer.admin.live.events import Events
from streamer.admin.live.minute_series import Series
from streamer.observability.metrics import Metrics
from streamer.postgres.secret import Secret
from streamer.runtime.services import Health
from streamer.runtime.target_health import TargetHealth
from streamer.target.connection import TargetAddress
from tests.support.admin import admin
from tests.support.fleet import large_fleet, show_fleet

ROUNDS = 5


def spent(work: Callable[[], Any]) -> float:
    """Return the least processor time of some rounds, in milliseconds."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return round(best * 1000, 2)


async def pages() -> dict[str, Any]:
    """Return size and processor time of answers to an open page."""
    answers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        async with admin(Path(name), "", is_alone=False) as made, made.client(None) as client:
            show_fleet(made.service, large_fleet(), Path(name))
            made.events.history.start = lambda: None  # type: ignore[method-assign]
            _fill(made.events.history._series)
            for path in ("/", "/api/sources", "/source?database=shop&sid=t017",
                         "/api/sources/history?database=shop&sid=t017"):  # fmt: skip
                await client.get(path)
                began = time.process_time()
                for _ in range(ROUNDS):
                    answer = await client.get(path)
                took = (time.process_time() - began) / ROUNDS
                answers[path] = {"bytes": len(answer.content), "ms": round(took * 1000, 1)}
    return answers


def _fill(series: Series[str]) -> None:
    labels = [f"{row['database']}:{row['sid']}" for row in large_fleet(tables=10)]
    for slot in range(360):
        series.add(1_800_000_000 + slot * 10, dict.fromkeys(labels, (0.1, float(slot % 9), 4096.0)))


async def idle() -> dict[str, float]:
    """Return the processor time that a second and a sample cost without a page."""
    supervisors = []
    for number in range(200):
        health = Health("streaming")
        health.table_states = {f"public.table_{n:04}": "ready" for n in range(100)}
        supervisors.append(
            SimpleNamespace(
                source=SimpleNamespace(label=f"shop:t{number:03}"),
                health=health,
                condition=("streaming", None),
                pipeline=SimpleNamespace(lag_bytes=0, lag_seconds=lambda now: 0.0),
                retained_wal_bytes=4096,
                runs_elsewhere=False,
            )
        )
    engine: Any = SimpleNamespace(
        supervisors=supervisors,
        metrics=Metrics(),
        target=TargetHealth(),
        bookkeeping=None,
        workers=[],
    )
    events = Events(engine, TargetAddress.parse(Secret("host=127.0.0.1")), list)
    events._seen = events._read_state()
    series: Series[str] = Series()
    clock = 1_800_000_000
    values = events.history._read(10.0)

    def add() -> None:
        nonlocal clock
        clock += 10
        series.add(clock, values)

    return {
        "look at 20,000 tables, each second": spent(events._read_state),
        "sample of 200 sources, each 10 s": spent(lambda: events.history._read(10.0)) + spent(add),
    }


def main() -> None:
    sources = large_fleet()
    print(
        json.dumps(
            {
                "survey of 20,000 tables": spent(lambda: fleet_overview.fleet_overview_of(sources)),
                "answers": asyncio.run(pages()),
                "idle": asyncio.run(idle()),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
