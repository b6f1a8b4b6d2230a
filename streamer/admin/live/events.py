"""Events for listeners: states, lag, rates, progress of copies, changes of the mapping.

A task reads the states once a second and puts the changes into the queue of every listener. A
listener whose queue overflows is disconnected; on reconnect it receives a new `snapshot`. The last
rates and errors stay in memory for later listeners. Without listeners the task queries no server.
"""

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, Protocol

import structlog

from streamer.admin.live.charts import Row, marks_of
from streamer.admin.live.past_errors import PastError, PastErrors
from streamer.admin.live.past_events import PastEvent, past_event
from streamer.admin.live.path_of_change import PathFacts
from streamer.admin.live.source_history import SampledEngine, SourceHistory
from streamer.admin.live.table_activity import ChangeActivity, TableActivity
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.copies import CopyProgress, read_progress
from streamer.bookkeeping.relation_records import read_labels
from streamer.bookkeeping.verifications import VerificationRecord
from streamer.errors.error_classes import StreamerError, UnreadyError
from streamer.errors.error_reports import ErrorReport, error_fields
from streamer.observability.logs import redact
from streamer.runtime.check_pace import pause_after
from streamer.runtime.target_health import TargetHealth
from streamer.target.connection import TargetAddress

log = structlog.get_logger()

CHECK_SECONDS: Final = 1.0
COMMENT_SECONDS: Final = 15.0
"""The longest pause between comments, by which a listener detects a lost connection."""
QUEUE_MAX: Final = 1000
LISTENERS_MAX: Final = 100
RATES_MAX: Final = 120
"""The number of seconds of stored rates of a source."""
PAST_MAX: Final = 1000
"""The number of events for the events page."""

Event = tuple[str, dict[str, Any]]
ShownState = tuple[str, ErrorReport | None]
"""State and error of a source or table."""


class Watched(SampledEngine, Protocol):
    """The observed object, which is an engine."""

    @property
    def target(self) -> TargetHealth: ...


@dataclass(slots=True)
class SeenState:
    """The states at the last read."""

    states: dict[tuple[str, str | None], ShownState] = field(default_factory=dict)
    lags: dict[str, tuple[int, float]] = field(default_factory=dict)
    progress: dict[tuple[str, str], CopyProgress] = field(default_factory=dict)
    changes: dict[str, int] = field(default_factory=dict)
    """The number of changes applied since the process began."""
    rates: dict[str, float] = field(default_factory=dict)
    verified: dict[tuple[str, str], VerificationRecord] = field(default_factory=dict)
    """The last comparisons, by source and table."""
    removals: dict[tuple[str, str | None], ErrorReport] = field(default_factory=dict)
    """Why streamer no longer streams a table, by source and table."""
    target: dict[str, Any] | None = None
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Subscription:
    """The events that a listener subscribes to.

    ``source``: the label of the only source to send. ``is_brief``: leave out lag, rates, progress
    and the states of the snapshot, which the fleet overview reads itself.
    """

    source: str | None = None
    is_brief: bool = False

    def has(self, name: str, data: dict[str, Any]) -> bool:
        """Whether the listener wants an event."""
        if self.is_brief and name in _FIGURES:
            return False
        return self.source is None or data.get("source") in (None, self.source)

    def snapshot(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Return the subscribed part of a snapshot."""
        if self.is_brief:
            return whole | {"states": [], "lag": [], "rates": []}
        return whole | {
            part: [item for item in whole[part] if self.has(part, item)]
            for part in ("states", "lag", "rates")
        }


_FIGURES: Final = frozenset({"lag", "rate", "progress"})


class Events:
    """Sends events to listeners."""

    def __init__(
        self,
        engine: Watched,
        address: TargetAddress,
        read_labels: Callable[[], Iterable[str]],
    ) -> None:
        """*read_labels* returns the labels of the sources, see `SourceHistory`."""
        self.history = SourceHistory(engine, read_labels)
        self._engine = engine
        self._address = address
        self._listeners: dict[asyncio.Queue[Event | None], Subscription] = {}
        self._seen = SeenState()
        self._rates: dict[str, deque[float]] = {}
        self._errors = PastErrors()
        self._activity = ChangeActivity()
        self._past: deque[PastEvent] = deque(maxlen=PAST_MAX)
        self._started_at: datetime | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Begin to poll, unless polling has begun."""
        if not self._is_closed:
            self._started_at = self._started_at or datetime.now(UTC)
            self.history.start()
        if not self._is_closed and (self._task is None or self._task.done()):
            self._seen = self._read_state()
            self._task = asyncio.create_task(self._poll(), name="events")

    def errors(self, source: str, table: str | None = None) -> list[PastError]:
        """Return the last errors of a source, or of its table *table*, the newest first."""
        return list(self._errors.of(source, table))

    def activity(self, source: str, table: str) -> TableActivity | None:
        """Return the time of a table's last change, and its rate; None without a change."""
        return self._activity.find(
            self._engine.metrics.changes_of_tables, source, table, datetime.now(UTC)
        )

    def past(self) -> list[PastEvent]:
        """Return the last events, the newest first."""
        return list(reversed(self._past))

    def marks(self, source: str | None = None, table: str | None = None) -> list[Row]:
        """Return the events to mark in the charts of a source, of its table *table*, or of the
        fleet.
        """
        now = datetime.now(UTC)
        return marks_of(self.past(), now, self._started_at, source=source, table=table)

    def path_facts(self, held_tables: int, held_bytes: int) -> PathFacts:
        """Return this process's facts about changes on their way to the target."""
        work, target = self.history.work.summarize(), self._engine.target
        pipelines = [s.pipeline for s in self._engine.supervisors if s.pipeline is not None]
        undelivered = [pipeline.undelivered for pipeline in pipelines]
        ages = [part.seconds for part in undelivered if not part.is_full]
        return PathFacts(
            lag_seconds=max((pipeline.lag_seconds() for pipeline in pipelines), default=0.0),
            undelivered_bytes=sum(part.size for part in undelivered),
            undelivered_seconds=max(ages, default=0.0),
            is_full=any(part.is_full for part in undelivered),
            queued_bytes=work.queued_bytes,
            held_bytes=held_bytes,
            held_tables=held_tables,
            use=work.use,
            commits_per_second=work.commits_per_second,
            waits=target.waits.workers,
            target_error=target.error,
        )

    def source_states(self) -> dict[tuple[str, str | None], ShownState]:
        """Return `known_states` of the sources, without the tables."""
        return {(s.source.label, None): s.condition for s in self._engine.supervisors}

    def known_states(self) -> dict[tuple[str, str | None], ShownState]:
        """Return state and error of sources and tables, as known to this process now."""
        return self._read_state().states

    @property
    def target(self) -> dict[str, Any]:
        """Return the state of the target, as known to this process now."""
        return self._engine.target.to_json() | {
            "silent_seconds": self._engine.target.silent_seconds
        }

    async def close(self) -> None:
        """End all streams; a server that stops waits for their end."""
        self._is_closed = True
        await self.history.close()
        for queue in list(self._listeners):
            self._end(queue)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def publish(self, name: str, data: dict[str, Any]) -> None:
        """Send an event to every subscribed listener."""
        if (event := past_event(name, data, datetime.now(UTC))) is not None:
            self._past.append(event)
        for queue, subscription in list(self._listeners.items()):
            if not subscription.has(name, data):
                continue
            try:
                queue.put_nowait((name, data))
            except asyncio.QueueFull:
                self._end(queue)

    def _end(self, queue: "asyncio.Queue[Event | None]") -> None:
        self._listeners.pop(queue, None)
        while queue.full():
            queue.get_nowait()
        queue.put_nowait(None)

    def subscribe(
        self, subscription: "Subscription | None" = None
    ) -> "asyncio.Queue[Event | None]":
        """Return a queue that receives the events of *subscription* from now on, by default all.

        Raises UnreadyError for too many listeners.
        """
        subscription = subscription or Subscription()
        if len(self._listeners) >= LISTENERS_MAX:
            raise UnreadyError("too many clients listen already", hint="close a page or two")
        queue: asyncio.Queue[Event | None] = asyncio.Queue(QUEUE_MAX)
        if self._is_closed:
            queue.put_nowait(None)
            return queue
        self.start()
        self._read_early()
        queue.put_nowait(("snapshot", subscription.snapshot(self._as_snapshot())))
        self._listeners[queue] = subscription
        return queue

    async def stream(
        self, queue: "asyncio.Queue[Event | None]", may_go_on: Callable[[], bool] = lambda: True
    ) -> AsyncGenerator[str]:
        """Yield events as text/event-stream, for as long as the listener's credentials allow."""
        try:
            while True:
                event: Event | None = None
                is_late = False
                try:
                    async with asyncio.timeout(COMMENT_SECONDS):
                        event = await queue.get()
                except TimeoutError:
                    is_late = True
                if not may_go_on():
                    return
                if is_late:
                    yield ": still here\n\n"
                    continue
                if event is None:
                    return
                yield f"event: {event[0]}\ndata: {json.dumps(event[1])}\n\n"
        finally:
            self._listeners.pop(queue, None)

    # ---- reading states ------------------------------------------------------------------------

    async def _poll(self) -> None:
        bookkeeping = Bookkeeping(self._address, "streamer events")
        pause = CHECK_SECONDS
        try:
            while True:
                await asyncio.sleep(pause)
                now = self._read_state()
                now.progress = self._seen.progress
                is_copying = any(state == "copying" for state, _ in now.states.values())
                if not self._listeners:
                    await bookkeeping.close()
                elif is_copying:
                    now.progress = await read_copies(bookkeeping, now.progress)
                began = time.thread_time()
                self._remember(now)
                for name, data in changes_between(self._seen, now):
                    self.publish(name, data)
                self._seen = now
                pause = pause_after(time.thread_time() - began, CHECK_SECONDS)
        finally:
            await bookkeeping.close()

    def _remember(self, now: SeenState) -> None:
        """Add the present rates and errors to the values in memory."""
        self.history.work.sample()
        self._activity.remember(self._engine.metrics.changes_of_tables, datetime.now(UTC))
        seconds = max(now.at - self._seen.at, 0.001)
        for label, changes in now.changes.items():
            earlier = self._seen.changes.get(label, changes)
            now.rates[label] = round((changes - earlier) / seconds, 1)
            self._rates.setdefault(label, deque(maxlen=RATES_MAX)).append(now.rates[label])
        for label in self._rates.keys() - now.changes.keys():
            del self._rates[label]
        self._remember_errors(now)

    def _remember_errors(self, now: SeenState) -> None:
        for (label, table), (_, error) in now.states.items():
            before_error = self._seen.states.get((label, table), ("", None))[1]
            if error is not None and error != before_error:
                self._errors.add(PastError(datetime.now(UTC), label, table, redact(error.text)))

    def _read_early(self) -> None:
        """Publish the changes since the last read, so that a snapshot shows this moment.

        The interval of rates stays regular: the next regular read compares with the previous one.
        """
        earlier, now = self._seen, self._read_state()
        now.at, now.changes, now.rates = earlier.at, earlier.changes, earlier.rates
        now.progress = earlier.progress
        self._remember_errors(now)
        for name, data in changes_between(earlier, now):
            self.publish(name, data)
        self._seen = now

    def _as_snapshot(self) -> dict[str, Any]:
        seen = self._seen
        return {
            "target": seen.target,
            "states": [as_state(key, value) for key, value in seen.states.items()],
            "lag": [_lag(label, lag) for label, lag in seen.lags.items()],
            "rates": [
                {"source": label, "changes_per_second": list(rates)}
                for label, rates in self._rates.items()
            ],
        }

    def _read_state(self) -> SeenState:
        seen = SeenState(at=asyncio.get_running_loop().time(), target=self._engine.target.to_json())
        applied = self._engine.metrics.changes_of_sources
        for supervisor in self._engine.supervisors:
            label, health = supervisor.source.label, supervisor.health
            seen.states[label, None] = supervisor.condition
            seen.changes[label] = applied.get(label, 0)
            for table, state in health.table_states.items():
                seen.states[label, table] = (str(state), health.table_errors.get(table))
            for table, reason in health.removals.items():
                seen.removals[label, table] = reason
            for table, record in health.verifications.items():
                seen.verified[label, table] = record
            if (pipeline := supervisor.pipeline) is not None:
                seconds = round(pipeline.lag_seconds(), 3)
                seen.lags[label] = (pipeline.lag_bytes, seconds)
        return seen


_Progress = dict[tuple[str, str], CopyProgress]


async def read_copies(bookkeeping: Bookkeeping, earlier: _Progress) -> _Progress:
    """Return the progress of copies, by source and table; *earlier* during an outage."""
    try:
        async with bookkeeping.connection() as connection:
            copies = await read_progress(connection)
            labels = await read_labels(connection, list(copies))
    except StreamerError:
        return earlier  # the states say that the target is unreachable
    return {label: copies[relation_id] for relation_id, label in labels.items()}


def as_state(key: tuple[str, str | None], value: ShownState) -> dict[str, Any]:
    state, error = value
    shown = None if error is None else replace(error, text=redact(error.text))
    return {"source": key[0], "table": key[1], "state": state} | error_fields(shown)


def _lag(label: str, lag: tuple[int, float]) -> dict[str, Any]:
    return {"source": label, "lag_bytes": lag[0], "lag_seconds": lag[1]}


def _verification(record: VerificationRecord) -> dict[str, Any]:
    verified_at = record.verified_at
    return {
        "verified_at": None if verified_at is None else verified_at.isoformat(),
        "differing_rows": record.differing_rows,
        "undecided_rows": record.undecided_rows,
        "error": None if record.error is None else redact(record.error),
    }


def _progress(copy: CopyProgress) -> dict[str, Any]:
    return {
        "rows_copied": copy.rows,
        "rows_total": copy.rows_total,
        "bytes_copied": copy.bytes,
        "bytes_total": copy.bytes_total,
        "rows_per_second": copy.rows_per_second,
        "seconds_left": copy.seconds_left,
    }


def changes_between(earlier: SeenState, now: SeenState) -> Iterable[Event]:
    if now.target is not None and now.target != earlier.target:
        yield "target", now.target
    for key, value in now.states.items():
        if earlier.states.get(key) != value:
            yield "state", as_state(key, value)
    for key in earlier.states.keys() - now.states.keys():
        yield "state", as_state(key, ("removed", now.removals.get(key)))
    for (label, table), record in now.verified.items():
        if earlier.verified.get((label, table)) != record:
            yield "verified", {"source": label, "table": table} | _verification(record)
    for label, lag in now.lags.items():
        if earlier.lags.get(label) != lag:
            yield "lag", _lag(label, lag)
    for label, rate in now.rates.items():
        if rate != earlier.rates.get(label, 0.0):
            yield "rate", {"source": label, "changes_per_second": rate}
    for (label, table), copy in now.progress.items():
        if earlier.progress.get((label, table)) != copy:
            yield "progress", {"source": label, "table": table} | _progress(copy)
