"""The status of a large fleet, without servers: for the fleet overview of the page.

As a program, the module serves the page with such a fleet: ``python -m tests.support.fleet PORT``.
With ``--picture``, the fleet has 60 sources on three processes, and a source in error.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streamer.admin.live.minute_series import FINE_SECONDS, Series
from streamer.admin.service.admin_service import AdminService
from streamer.commands import table_requests
from streamer.config import static_mapping
from streamer.errors.remedies import EVERY_TABLE, Remedy, at_target, run
from streamer.mapping.rules import Mapping

DATABASES = ("billing", "shop", "stock", "web")


def a_table(name: str, **values: Any) -> dict[str, Any]:
    """Return a table in the form of the status."""
    return {"source": f"public.{name}", "target": f"public.{name}", "type": "clone",
            "state": "ready", "error": None, "quarantined": 0, "rows_copied": 1,
            "rows_total": None, "end_lsn": "0/1", **values}  # fmt: skip


def a_source(database: str, sid: str | None, *tables: dict[str, Any], **values: Any) -> Any:
    """Return a source in the form of the status."""
    return {"database": database, "sid": sid, "state": "streaming", "slot": "s", "error": None,
            "hint": None, "lag_bytes": 0, "lag_seconds": 0.1, "retained_wal_bytes": 4096,
            "confirmed_flush_lsn": "0/1A2B3C", "tables": list(tables), "heartbeat_seconds": None,
            "backlog": None, "waiting_for": None, **values}  # fmt: skip


def large_fleet(sources: int = 200, tables: int = 100) -> list[dict[str, Any]]:
    """Return four groups of sources: a source in error, a source with a table in error, and a
    source that copies. A source waits for its turn, and a source has a table that no comparison can
    read.
    """
    fleet = []
    for number in range(sources):
        streamed = [a_table(f"table_{n:04}") for n in range(tables)]
        values: dict[str, Any] = {"lag_seconds": number / 1000}
        match number:
            case 17:
                again = Remedy.of("run: ", run("resync", EVERY_TABLE, database="shop", sid="t017"))
                values = {"state": "error", "error": "slot streamer_shop is gone",
                          "remedy": again.to_json(), "lag_seconds": None,
                          "retained_wal_bytes": None}  # fmt: skip
            case 33:
                streamed[7] |= {
                    "state": "error",
                    "error": "column note is missing",
                    "source": "public.broken",
                }
            case 50:
                streamed[0] |= {"state": "copying", "rows_copied": 500, "rows_total": 1000,
                           "bytes_copied": 5_000, "bytes_total": 20_000, "rows_per_second": 100.0}  # fmt: skip
            case 51:
                values["waiting_for"] = "its turn: number 2 of 3"
            case 66:
                streamed[3] |= {"verification_error": "its key differs"}
        fleet.append(a_source(DATABASES[number % 4], f"t{number:03}", *streamed, **values))
    return fleet


def pictured_fleet() -> list[dict[str, Any]]:
    """Return 60 tenants that three processes stream; a tenant has a table in error, two copy."""
    chance = random.Random(7)
    fleet = []
    for number in range(1, 61):
        streamed = [a_table(name) for name in ("customers", "items", "orders", "payments", "stock")]
        values: dict[str, Any] = {
            "lag_seconds": chance.uniform(0.02, 0.4),
            "retained_wal_bytes": chance.randrange(50_000, 900_000),
            "process": f"node-{number % 3 + 1}:1",
        }
        if number == 42:
            streamed[2] |= {
                "state": "error",
                "error": "column note is missing in the target",
                "remedy": Remedy.of(
                    "run at the target: ", at_target("alter table orders add column note text")
                ).to_json(),
            }
        elif number in (18, 37):
            streamed[2] |= {"state": "copying", "rows_copied": number * 20_000, "rows_total": 1_000_000,
                       "bytes_copied": number * 2_000_000, "bytes_total": 100_000_000,
                       "rows_per_second": 25_000.0}  # fmt: skip
        fleet.append(a_source("shop", f"tenant-{number:02}", *streamed, **values))
    return fleet


def mapping_of(fleet: list[dict[str, Any]], directory: Path) -> Mapping:
    """Return the mapping of a fleet."""
    groups: dict[str, list[str]] = {}
    for source in fleet:
        urls = groups.setdefault(source["database"], [])
        urls.append(f"    - {{url: host=127.0.0.1 port=1 dbname=x, sid: {source['sid']}}}")
    text = "\n".join(
        f"- database: {name}\n  urls:\n" + "\n".join(urls) + '\n  tables: {"*": }'
        for name, urls in groups.items()
    )
    config = directory / "fleet.yaml"
    config.write_text(f'target: {{url: "host=127.0.0.1 port=1"}}\nsources:\n{text}\n')
    return static_mapping.load(config)[1]


def show_fleet(service: AdminService, fleet: list[dict[str, Any]], directory: Path) -> None:
    """Give *service* the mapping and status of *fleet*."""
    service.mapping = mapping_of(fleet, directory)
    order = {source.label: number for number, source in enumerate(service.mapping.sources)}
    fleet.sort(key=lambda row: order[table_requests.SourceKey(row["database"], row["sid"]).label])

    async def status() -> dict[str, Any]:
        return {"sources": list(fleet), "target": {"state": "reachable", "error": None}}

    service.status = status  # type: ignore[method-assign]


def fill_history(series: Series[str], labels: Sequence[str], now: float) -> None:
    """Give each source half an hour of samples, with a rate that wanders."""
    chance = random.Random(8)
    rates = {label: chance.uniform(5, 60) for label in labels}
    for number in range(200):
        lag, wal = 0.1 + number % 7, 4096.0 * (1 + number % 90)
        for label in labels:
            rates[label] = max(0.0, rates[label] + chance.gauss(0, 6))
        at = now - (200 - number) * FINE_SECONDS
        series.add(at, {label: (lag, rates[label], wal) for label in labels})


async def serve(port: int, fleet: list[dict[str, Any]]) -> None:
    """Serve the page with a fleet whose requests all succeed, except those of a single source."""
    import uvicorn

    from streamer.admin.service import act_on_many_sources
    from tests.support.admin import admin

    async def request_each(
        address: Any, action: str, sources: list[table_requests.SourceKey], **options: Any
    ) -> list[table_requests.SourceOutcome]:
        return [
            table_requests.SourceOutcome(
                key.database, key.sid, 0, "no table to pause", "see the status"
            )
            if key.sid == "t017"
            else table_requests.SourceOutcome(key.database, key.sid, 100)
            for key in sources
        ]

    setattr(act_on_many_sources, "request_each", request_each)  # noqa: B010
    with tempfile.TemporaryDirectory() as name:
        async with admin(Path(name), "", is_alone=False) as made:
            show_fleet(made.service, fleet, Path(name))
            history = made.events.history
            history.start = lambda: None  # type: ignore[method-assign]  # the fleet has no engine
            labels = [source.label for source in made.service.mapping.sources]
            fill_history(history._series, labels, time.time())
            config = uvicorn.Config(made.app, port=port, log_level="warning", lifespan="off")
            await uvicorn.Server(config).serve()


if __name__ == "__main__":
    is_picture = "--picture" in sys.argv
    asyncio.run(serve(int(sys.argv[1]), pictured_fleet() if is_picture else large_fleet()))
