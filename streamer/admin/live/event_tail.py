"""``streamer events``: events of the running process, or of the bookkeeping without a process.

At the end of either stream, the command searches for a process again. So a tail continues over a
restart, without repeated states.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import datetime
from typing import Any, Final

from streamer.admin.live.events import Event, SeenState, as_state, changes_between, read_copies
from streamer.admin.service.mapping_client import find_process
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import is_installed
from streamer.bookkeeping.relation_records import read_relation_records
from streamer.bookkeeping.sources import read_source_records
from streamer.bookkeeping.verifications import read_verifications
from streamer.config.settings import Settings
from streamer.errors.error_classes import AdminConnectionError, Retry, StreamerError
from streamer.observability.logs import redact
from streamer.target.connection import TargetAddress
from streamer.util.quantities import format_bytes, format_latency

CHECK_SECONDS: Final = 1.0
READS_UNTIL_SEARCH: Final = 5
"""The number of reads of the bookkeeping after which the command tries the process again."""
FREQUENT: Final = ("lag", "rate")
"""Events that only `--all` shows, because lag and rates change every second."""


async def tail(settings: Settings, url: str | None, *, follow: bool) -> AsyncGenerator[Event]:
    """Yield the state of sources and tables, and with *follow* later changes.

    Raises every error before the first event, and later only errors that no retry can end.
    """
    states: dict[tuple[str, str | None], tuple[str, str | None]] = {}
    is_first = True
    while True:
        try:
            async with find_process(settings, url, may_be_static=True) as remote:
                events = _from_bookkeeping(settings) if remote is None else remote.events()
                async with aclosing(events):
                    async for name, data in events:
                        is_first = False
                        for event in _new_events(name, data, states):
                            yield event
                        if not follow:
                            return
        except AdminConnectionError:
            if is_first:
                raise
        except StreamerError as exc:
            if is_first or exc.retry is not Retry.TIMED:
                raise
        await asyncio.sleep(CHECK_SECONDS)


def _new_events(
    name: str,
    data: dict[str, Any],
    states: dict[tuple[str, str | None], tuple[str, str | None]],
) -> list[Event]:
    """Return the event, or the states of a snapshot; leave out states that *states* contains."""
    if name not in ("snapshot", "state"):
        return [(name, data)]
    events = []
    for state in data["states"] if name == "snapshot" else [data]:
        key, value = (state["source"], state["table"]), (state["state"], state["error"])
        if states.get(key) != value:
            states[key] = value
            events.append(("state", state))
    return events


async def _from_bookkeeping(settings: Settings) -> AsyncGenerator[Event]:
    bookkeeping = Bookkeeping(TargetAddress.parse(settings.target.url), "streamer events")
    try:
        earlier = await _read_state(bookkeeping)
        yield "snapshot", {"states": [as_state(*item) for item in earlier.states.items()]}
        for _ in range(READS_UNTIL_SEARCH):
            await asyncio.sleep(CHECK_SECONDS)
            later = await _read_state(bookkeeping)
            for event in changes_between(earlier, later):
                yield event
            earlier = later
    finally:
        await bookkeeping.close()


async def _read_state(bookkeeping: Bookkeeping) -> SeenState:
    seen = SeenState()
    if not await is_installed(bookkeeping):
        return seen
    labels = {}
    for source in await read_source_records(bookkeeping):
        labels[source.source_id] = source.label
        seen.states[source.label, None] = (source.state, source.error)
    relations = await read_relation_records(bookkeeping)
    for relation in relations:
        if (label := labels.get(relation.source_id)) is not None:
            seen.states[label, relation.source] = (relation.state, relation.error)
    verifications = await read_verifications(bookkeeping)
    for relation in relations:
        label, record = labels.get(relation.source_id), verifications.get(relation.relation_id)
        if label is not None and record is not None:
            seen.verified[label, relation.source] = record
    seen.progress = await read_copies(bookkeeping, {})
    return seen


def as_line(event: Event, now: datetime) -> str:
    """Return an event as a line for people. Pure."""
    name, data = event
    place = " ".join(str(data[key]) for key in ("source", "table") if data.get(key))
    match name:
        case "target":
            text = f"target {data['state']}" + (f": {data['error']}" if data["error"] else "")
        case "state":
            text = data["state"] + (f": {data['error']}" if data["error"] else "")
        case "progress":
            text = _progress(data)
        case "lag":
            behind = format_latency(data["lag_seconds"])
            text = f"lag {format_bytes(data['lag_bytes'])}, {behind}"
        case "verified":
            text = _verified(data)
        case "rate":
            text = f"{data['changes_per_second']:,.0f} changes/s"
        case _:
            fields = {key: value for key, value in data.items() if key not in ("source", "table")}
            text = f"{name} " + ", ".join(f"{key} {value}" for key, value in fields.items())
    line = f"{now:%Y-%m-%d %H:%M:%S}  {place + '  ' if place else ''}{text}".rstrip()
    return redact(line.replace("\n", "\\n").replace("\r", "\\r").replace("\x1b", "\\e"))


def _verified(data: dict[str, Any]) -> str:
    if data["error"]:
        return f"cannot be verified: {data['error']}"
    if data["differing_rows"]:
        return f"{data['differing_rows']:,} rows differ from the source"
    if data["undecided_rows"]:
        return f"verification left {data['undecided_rows']:,} rows undecided"
    return "verified: equal to the source"


def _progress(data: dict[str, Any]) -> str:
    text = f"copied {data['rows_copied']:,}"
    if data["rows_total"]:
        text += f" of about {data['rows_total']:,}"
    text += " rows"
    if data.get("seconds_left") is not None:
        text += f", {format_latency(data['seconds_left'])} left"
    return text
