"""The positions that streamer stores in the target, and the times."""

import asyncio
from typing import Any
from unittest import mock

import pytest

from streamer.bookkeeping.positions import AcknowledgedPosition
from streamer.control.progress_tracker import ProgressTracker
from streamer.runtime.session import stored_position as module
from streamer.runtime.session.stored_position import (
    QUIET_SECONDS,
    REQUEST_SECONDS,
    SMALL_BYTES,
    STORE_SECONDS,
    StoredPosition,
)
from streamer.source.history_check import HistoryCheck
from streamer.source.stream.feedback import FAR_BYTES
from streamer.target.fencing_token import FencingToken
from streamer.util.lsn import Lsn

START = 1000


class Storing:
    """A position whose bookkeeping records the stored positions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        clock = mock.Mock(monotonic=lambda: self.now)
        monkeypatch.setattr(module, "time", clock)
        self.stored: list[int] = []
        self.due = asyncio.Event()
        self.tracker = ProgressTracker(Lsn(START))
        record: Any = mock.Mock(acknowledged_lsn=Lsn(START))
        self.position = StoredPosition(
            mock.Mock(acknowledge=self._acknowledge),
            FencingToken(1, "token", 1, "session"),
            record,
            self.tracker,
            HistoryCheck(None, Lsn(START)),
            mock.Mock(arrived_seconds=None),
            self.due,
        )

    async def _acknowledge(self, fence: FencingToken, position: AcknowledgedPosition) -> None:
        assert position.stored_lsn == (self.stored or [START])[-1]
        self.stored.append(position.lsn)

    def hears_of(self, lsn: int) -> bool:
        """Let a keepalive tell that the source is at *lsn*; return whether to store that now."""
        self.due.clear()
        self.tracker.keepalive(Lsn(lsn))
        self.position.moved()
        return self.due.is_set()

    async def moves_to(self, lsn: int) -> bool:
        """Let the source be at *lsn*; return whether that is stored."""
        self.tracker.keepalive(Lsn(lsn))
        count = len(self.stored)
        await self.position.store(0)
        return len(self.stored) > count


@pytest.fixture
async def storing(monkeypatch: pytest.MonkeyPatch) -> Storing:
    made = Storing(monkeypatch)
    assert await made.moves_to(START + 1), "nothing was stored in this attempt"
    return made


async def test_a_position_that_moves_a_little_is_stored_every_fifteen_seconds(
    storing: Storing,
) -> None:
    assert not await storing.moves_to(START + 200)
    storing.now += STORE_SECONDS
    assert await storing.moves_to(START + 300)
    assert not await storing.moves_to(START + 400)


async def test_a_position_that_somebody_waits_for_is_stored_at_once(storing: Storing) -> None:
    storing.position.is_requested = True
    assert await storing.moves_to(START + 200)
    assert not await storing.moves_to(START + 300)


async def test_positions_are_stored_as_long_as_a_client_asks_for_them(storing: Storing) -> None:
    """The awaited position can be the second."""
    assert not storing.position.is_due_soon
    storing.position.store_soon()
    for lsn in (200, 300):
        assert storing.position.is_due_soon
        assert await storing.moves_to(START + lsn)
    storing.now += REQUEST_SECONDS
    assert not storing.position.is_due_soon
    assert not await storing.moves_to(START + 400)


async def test_much_wal_without_a_change_is_acknowledged_at_once(storing: Storing) -> None:
    assert await storing.moves_to(START + 1 + SMALL_BYTES)


async def test_sixteen_megabytes_without_a_change_do_not_wait(storing: Storing) -> None:
    assert not storing.hears_of(START + FAR_BYTES)
    assert storing.hears_of(START + 1 + FAR_BYTES)


async def test_the_last_keepalive_of_a_burst_is_stored_without_another(
    storing: Storing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.01)
    assert not storing.hears_of(START + 1 + SMALL_BYTES)
    assert not storing.hears_of(START + 2 + SMALL_BYTES), "one timer is enough"
    async with asyncio.timeout(5):
        await storing.due.wait()


async def test_a_position_that_moves_a_little_starts_no_timer(storing: Storing) -> None:
    assert not storing.hears_of(START + SMALL_BYTES)
    assert storing.position._alarm is None
    storing.now += QUIET_SECONDS
    assert storing.hears_of(START + SMALL_BYTES)


async def test_a_position_that_does_not_move_is_not_stored(storing: Storing) -> None:
    storing.now += STORE_SECONDS
    assert not await storing.moves_to(START + 1)


@pytest.mark.parametrize("is_awaited", [False, True])
async def test_positions_gather_unless_commits_at_the_source_wait_for_them(
    storing: Storing, monkeypatch: pytest.MonkeyPatch, is_awaited: bool
) -> None:
    waits: list[float] = []

    async def wait_for_event(event: object, seconds: float) -> bool:
        waits.append(seconds)
        return False

    monkeypatch.setattr(module, "wait_for_event", wait_for_event)
    storing.position.is_awaited = is_awaited
    await storing.position.pause()
    assert bool(waits) is not is_awaited
