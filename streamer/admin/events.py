"""What happens, to whoever listens: states, lag, progress of copies, changes of the mapping.

One task looks, once a second and only while somebody listens; what has changed goes to everybody's
own queue. Who does not keep up is cut off, and comes again with a new `snapshot`.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Protocol

import structlog

from streamer.apply.target import TargetAddress
from streamer.errors import StreamerError, UnreadyError
from streamer.observability.logs import redact
from streamer.progress.copies import CopyProgress, read_progress
from streamer.progress.store import Store
from streamer.runtime.supervisor import Supervisor

log = structlog.get_logger()

LOOK_SECONDS: Final = 1.0
COMMENT_SECONDS: Final = 15.0
"""Something is sent at least this often, so that a lost connection is noticed."""
QUEUE_MAX: Final = 1000
LISTENERS_MAX: Final = 100

Event = tuple[str, dict[str, Any]]


class Watched(Protocol):
    """What is looked at: an engine."""

    @property
    def supervisors(self) -> Sequence[Supervisor]: ...


@dataclass(slots=True)
class _Seen:
    """What everything was like at the last look."""

    states: dict[tuple[str, str | None], tuple[str, str | None]] = field(default_factory=dict)
    lags: dict[str, tuple[int, float]] = field(default_factory=dict)
    progress: dict[tuple[str, str], CopyProgress] = field(default_factory=dict)


class Events:
    """Tells listeners what happens."""

    def __init__(self, engine: Watched, address: TargetAddress) -> None:
        self._engine = engine
        self._address = address
        self._listeners: set[asyncio.Queue[Event | None]] = set()
        self._seen = _Seen()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    async def close(self) -> None:
        """End all streams; a server that stops waits for them."""
        self._is_closed = True
        for queue in list(self._listeners):
            self._end(queue)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def publish(self, name: str, data: dict[str, Any]) -> None:
        """Tell everybody."""
        for queue in list(self._listeners):
            try:
                queue.put_nowait((name, data))
            except asyncio.QueueFull:
                self._end(queue)

    def _end(self, queue: "asyncio.Queue[Event | None]") -> None:
        self._listeners.discard(queue)
        while queue.full():
            queue.get_nowait()
        queue.put_nowait(None)

    def subscribe(self) -> "asyncio.Queue[Event | None]":
        """Return a queue that is told from now on. Raises UnreadyError for too many."""
        if len(self._listeners) >= LISTENERS_MAX:
            raise UnreadyError("too many listen already", hint="close a page or two")
        queue: asyncio.Queue[Event | None] = asyncio.Queue(QUEUE_MAX)
        if self._is_closed:
            queue.put_nowait(None)
            return queue
        if self._task is None or self._task.done():
            self._seen = self._look()
            self._task = asyncio.create_task(self._watch(), name="events")
        queue.put_nowait(("snapshot", _as_snapshot(self._seen)))
        self._listeners.add(queue)
        return queue

    async def stream(self, queue: "asyncio.Queue[Event | None]") -> AsyncGenerator[str]:
        """Yield what is told, as text/event-stream."""
        try:
            while True:
                try:
                    async with asyncio.timeout(COMMENT_SECONDS):
                        event = await queue.get()
                except TimeoutError:
                    yield ": still here\n\n"
                    continue
                if event is None:
                    return
                yield f"event: {event[0]}\ndata: {json.dumps(event[1])}\n\n"
        finally:
            self._listeners.discard(queue)

    # ---- looking -------------------------------------------------------------------------------

    async def _watch(self) -> None:
        store = Store(self._address, "streamer events")
        try:
            while self._listeners:
                await asyncio.sleep(LOOK_SECONDS)
                now = self._look()
                now.progress = self._seen.progress
                if any(state == "copying" for state, _ in now.states.values()):
                    now.progress = await _read_progress(store, now.progress)
                for name, data in _changes(self._seen, now):
                    self.publish(name, data)
                self._seen = now
        finally:
            await store.close()

    def _look(self) -> _Seen:
        seen = _Seen()
        for supervisor in self._engine.supervisors:
            label, health = supervisor.source.label, supervisor.health
            seen.states[label, None] = (health.state, health.error)
            for table, state in health.table_states.items():
                seen.states[label, table] = (str(state), health.table_errors.get(table))
            if (pipeline := supervisor.pipeline) is not None:
                seconds = round(pipeline.lag_seconds(datetime.now(UTC)), 3)
                seen.lags[label] = (pipeline.lag_bytes, seconds)
        return seen


_NAMES_SQL: Final = """
select r.id as relation_id, s.database, s.sid, r.source
from streamer.relation r join streamer.source s on s.id = r.source_id where r.id = any ($1::int8[])
"""

_Progress = dict[tuple[str, str], CopyProgress]


async def _read_progress(store: Store, before: _Progress) -> _Progress:
    try:
        async with store.connection() as connection:
            copies = await read_progress(connection)
            rows = await connection.fetch(_NAMES_SQL, list(copies))
    except StreamerError:
        return before  # states tell that the target is gone
    return {
        (_label(row["database"], row["sid"]), row["source"]): copies[row["relation_id"]]
        for row in rows
    }


def _label(database: str, sid: str | None) -> str:
    return database if sid is None else f"{database}:{sid}"


def _state(key: tuple[str, str | None], value: tuple[str, str | None]) -> dict[str, Any]:
    error = redact(value[1]) if value[1] else None
    return {"source": key[0], "table": key[1], "state": value[0], "error": error}


def _lag(label: str, lag: tuple[int, float]) -> dict[str, Any]:
    return {"source": label, "lag_bytes": lag[0], "lag_seconds": lag[1]}


def _progress(copy: CopyProgress) -> dict[str, Any]:
    return {
        "rows_copied": copy.rows,
        "rows_total": copy.rows_total,
        "bytes_copied": copy.bytes,
        "bytes_total": copy.bytes_total,
        "rows_per_second": copy.rows_per_second,
        "seconds_left": copy.seconds_left,
    }


def _changes(before: _Seen, now: _Seen) -> Iterable[Event]:
    for key, value in now.states.items():
        if before.states.get(key) != value:
            yield "state", _state(key, value)
    for key in before.states.keys() - now.states.keys():
        yield "state", _state(key, ("removed", None))
    for label, lag in now.lags.items():
        if before.lags.get(label) != lag:
            yield "lag", _lag(label, lag)
    for (label, table), copy in now.progress.items():
        if before.progress.get((label, table)) != copy:
            yield "progress", {"source": label, "table": table} | _progress(copy)


def _as_snapshot(seen: _Seen) -> dict[str, Any]:
    return {
        "states": [_state(key, value) for key, value in seen.states.items()],
        "lag": [_lag(label, lag) for label, lag in seen.lags.items()],
    }
