"""When a reader pauses, and when the event loop blocks."""

import asyncio
import math
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from streamer.runtime.session import pipeline
from streamer.runtime.session.pipeline import Pipeline
from streamer.source.stream.replication_stream import Burst
from streamer.util.waiting import block_event_loop


class Ended(Exception):
    """The bursts of a test have ended."""


class Stream:
    """A source that delivers *bursts*; records each wait for data as a pause of None."""

    def __init__(self, bursts: list[Burst], pauses: list[float | None]) -> None:
        self._bursts, self._pauses = bursts, pauses

    def read(self) -> Burst:
        if not self._bursts:
            raise Ended
        return self._bursts.pop(0)

    async def wait_readable(self) -> None:
        self._pauses.append(None)


class Dispatcher:
    """Takes messages; a message ``commit`` ends a transaction."""

    has_passed_stop = False
    is_between_transactions = True

    def feed(self, payloads: list[bytes]) -> list[Any]:
        for payload in payloads:
            self.is_between_transactions = payload == b"commit"
        return []


async def pauses_after(
    monkeypatch: pytest.MonkeyPatch,
    bursts: list[list[bytes]],
    *,
    used: float = 0.0001,
    is_fast: bool = False,
    is_awaited: bool = False,
) -> list[float | None]:
    """Return the pauses of a reader: seconds, or None for a wait for data.

    *used*: the processor time from a burst to the next. *is_fast*: whether every rate is fast.
    """
    pauses: list[float | None] = []
    clock = iter(range(1000))

    async def record(seconds: float) -> None:
        pauses.append(round(seconds, 6))

    monkeypatch.setattr(time, "thread_time", lambda: next(clock) * used)
    monkeypatch.setattr(pipeline, "FAST_STREAM_RATE", 0 if is_fast else math.inf)
    monkeypatch.setattr(pipeline, "block_event_loop", record)
    monkeypatch.setattr(asyncio, "sleep", record)
    session = SimpleNamespace(
        stream=Stream([Burst(list(payloads)) for payloads in bursts], pauses),
        dispatcher=Dispatcher(),
        tables=None,
        services=SimpleNamespace(budget=SimpleNamespace(has_room=lambda _: True)),
        timeline_monitor=None,
        feedback=SimpleNamespace(answer=lambda _: False),
        position=SimpleNamespace(is_awaited=is_awaited),
    )
    reader = cast("Any", SimpleNamespace())
    reader._dispatch = lambda *args: Pipeline._dispatch(reader, *args)
    with pytest.raises(Ended):
        await Pipeline._read(reader, cast("Any", session))
    return pauses


WHOLE = [b"begin", b"row", b"commit"]


async def test_a_pause_follows_the_processor_time_and_has_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await pauses_after(monkeypatch, [WHOLE, []]) == [0.0009, None]
    assert await pauses_after(monkeypatch, [WHOLE, WHOLE], used=0.002) == [0.004, 0.004]


async def test_a_pause_of_a_fast_stream_is_longer_if_a_burst_took_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await pauses_after(monkeypatch, [WHOLE], is_fast=True) == [0.0009]
    assert await pauses_after(monkeypatch, [WHOLE], used=0.002, is_fast=True) == [0.03]


async def test_the_end_of_a_transaction_after_a_silence_is_read_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bursts = [[], [b"begin"], [b"row", b"commit"], []]
    assert await pauses_after(monkeypatch, bursts) == [None, None, 0.0009, None]


async def test_a_transaction_of_many_bursts_has_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    bursts = [[b"begin"], [b"row"], [b"row"], [b"commit"]]
    assert await pauses_after(monkeypatch, bursts) == [None, 0.0009, 0.0009, 0.0009]


async def test_no_pause_while_commits_at_the_source_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await pauses_after(monkeypatch, [WHOLE, WHOLE], is_awaited=True) == [None, None]


async def test_the_loop_blocks_after_callbacks_that_are_ready_and_the_times_overlap() -> None:
    events: list[str] = []
    asyncio.get_running_loop().call_soon(events.append, "ready before")
    began = time.monotonic()
    await asyncio.gather(block_event_loop(0.2), block_event_loop(0.2), block_event_loop(0.2))
    seconds = time.monotonic() - began
    assert events == ["ready before"]
    assert 0.2 <= seconds < 0.6
