"""Waits grow up to a bound, and the log reports each error once."""

import asyncio
import random
from typing import Any

import pytest

from streamer.util.backoff import Backoff


@pytest.fixture
def no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)


@pytest.mark.usefixtures("no_jitter")
def test_the_delay_doubles_up_to_its_bound() -> None:
    backoff = Backoff(first=0.1, most=1.0)
    assert [round(backoff.next_seconds(), 3) for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_the_wait_is_between_half_and_the_whole_of_the_delay() -> None:
    seconds = [Backoff(first=2.0, most=2.0).next_seconds() for _ in range(200)]
    assert all(1.0 <= wait <= 2.0 for wait in seconds)
    assert max(seconds) - min(seconds) > 0.1, "processes must not stay in step"


async def test_wait_waits_that_long(monkeypatch: pytest.MonkeyPatch, no_jitter: None) -> None:
    waits: list[float] = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", note)
    backoff = Backoff(first=0.5, most=4)
    await backoff.wait()
    await backoff.wait()
    assert waits == [0.5, 1.0]


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def warning(self, what: str, **fields: Any) -> None:
        self.lines.append((what, fields["error"]))


def test_a_failure_that_stays_the_same_is_logged_once() -> None:
    log, backoff = Log(), Backoff()
    for text in ("refused", "refused", "timeout", "refused"):
        backoff.log(log, "waiting", OSError(text))
    assert [error for _, error in log.lines] == ["refused", "timeout", "refused"]
