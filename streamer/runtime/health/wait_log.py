"""Logs the reason of a long wait, every `REPORT_SECONDS` for as long as the wait lasts.

The states of sources and target, and the waits of tables, come from the process itself. The reason
why a start waits comes from the bookkeeping, as in `status`.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.sources import SourceRecord, read_source_records
from streamer.errors.command_lines import some_of
from streamer.errors.error_classes import StreamerError
from streamer.runtime.services import Health
from streamer.runtime.start_limit import START_TURN
from streamer.runtime.target_health import TargetHealth

log = structlog.get_logger()

REPORT_SECONDS: Final = 10.0
_WAITING_STATES: Final = ("starting", "waiting")
_COPY_STATES: Final = ("init", "copying", "catching_up")


_FIRST_COPIES: Final = "first copies"
_STARTS: Final = "starts"


@dataclass(frozen=True, slots=True)
class Wait:
    """The wait of a subject (``target``, a source, tables of a source), and the reason."""

    subject: str
    reason: str


class LongWaits:
    """Keeps the time at which the wait of each subject began. Pure."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def update(self, waits: Iterable[Wait], now: float) -> list[tuple[Wait, float]]:
        """Replace the known waits by *waits*; return the waits to report, with their seconds."""
        by_subject = {wait.subject: wait for wait in waits}
        self._since = {subject: self._since.get(subject, now) for subject in by_subject}
        return [
            (wait, now - self._since[subject])
            for subject, wait in by_subject.items()
            if now - self._since[subject] >= REPORT_SECONDS
        ]


def find_waits(
    target: TargetHealth,
    waiters: Sequence[tuple[str, Health]],
    sources: Iterable[SourceRecord] = (),
) -> list[Wait]:
    """Return all waits. Pure."""
    if not target.is_well:
        return [Wait("target", target.error or "no answer yet")]
    records = {record.label: record for record in sources}
    waits = []
    turns: dict[str, list[str]] = {}
    for label, health in waiters:
        if health.waiting_for is not None:
            subject = _STARTS if health.waiting_for == START_TURN else _FIRST_COPIES
            turns.setdefault(subject, []).append(label)
    for subject, labels in turns.items():
        further = f" and {len(labels) - 1} other sources" if len(labels) > 1 else ""
        waits.append(Wait(subject, f'a turn for source "{labels[0]}"{further}'))
    for label, health in waiters:
        record = records.get(label)
        if health.state in _WAITING_STATES and health.waiting_for is None:
            stored = record.error if record is not None and record.state == "starting" else None
            error = health.error or stored
            reason = "an answer of its server" if error is None else error.text
            waits.append(Wait(f'source "{label}"', reason))
        tables: dict[str, list[str]] = {}
        for table, wait in health.table_waits.items():
            if health.table_states.get(table) in _COPY_STATES:
                tables.setdefault(str(wait), []).append(table)
        for reason, names in tables.items():
            waits.append(Wait(f'source "{label}", {some_of(sorted(names))}', reason))
    return waits


async def report_waits(
    bookkeeping: Bookkeeping,
    target: TargetHealth,
    read_waiters: Callable[[], Sequence[tuple[str, Health]]],
) -> None:
    """Log long waits until cancelled."""
    long_waits = LongWaits()
    while True:
        waiters = read_waiters()
        sources: Sequence[SourceRecord] = ()
        if target.is_well and any(health.state in _WAITING_STATES for _, health in waiters):
            with contextlib.suppress(StreamerError):  # the next round reads the records again
                sources = await read_source_records(bookkeeping)
        waits = find_waits(target, waiters, sources)
        for wait, seconds in long_waits.update(waits, time.monotonic()):
            log.info(
                "still waiting", what=wait.subject, waiting_for=wait.reason, seconds=round(seconds)
            )
        await asyncio.sleep(REPORT_SECONDS)
