"""Dead connections, recognised by the activity of the server's session during a wait."""

import asyncio

import pytest

from streamer.errors.error_classes import TargetConnectionError
from streamer.target import silent_server as watch
from streamer.target.silent_server import Activity, SilenceMonitor, Unreachable

AT_WORK = Activity(is_waiting_for_us=False, since="active 1")
IDLE = Activity(is_waiting_for_us=True, since="idle 1")
REFUSED = TargetConnectionError("too many connections")
GONE = None


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "CHECK_SECONDS", 0.001)


async def severed_after(*answers: Activity | Exception | None, moves: bool = False) -> int | None:
    """Return the number of queries before the watch gave up the connection; None if the watch did
    not.
    """
    given = iter(answers)
    asked = 0
    over = asyncio.Event()
    was_severed = False

    async def ask() -> Activity | None:
        nonlocal asked
        try:
            answer = next(given)
        except StopIteration:
            over.set()
            await asyncio.Event().wait()
        asked += 1
        if moves:
            watched.progress += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    def sever() -> None:
        nonlocal was_severed
        was_severed = True
        over.set()

    watched = SilenceMonitor(ask, sever)
    with watched.waiting():
        await over.wait()
    return asked if was_severed else None


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        pytest.param([AT_WORK] * 5, None, id="a long statement"),
        pytest.param([GONE], 1, id="the session is gone"),
        pytest.param([Unreachable("")], 1, id="nobody answers"),
        pytest.param([REFUSED] * 5, None, id="it answers, if only to refuse"),
        pytest.param([AT_WORK, IDLE, IDLE], 3, id="it waits for us as we do for it"),
        pytest.param([IDLE, REFUSED, IDLE], None, id="it may have worked in between"),
        pytest.param(
            [IDLE, Activity(is_waiting_for_us=True, since="idle 2")], None, id="it has worked"
        ),
    ],
)
async def test_a_dead_connection_is_distinguished_from_a_long_statement(
    answers: list[Activity | Exception | None], expected: int | None
) -> None:
    assert await severed_after(*answers) == expected


async def test_a_connection_that_still_sends_is_not_stuck() -> None:
    assert await severed_after(IDLE, IDLE, IDLE, moves=True) is None


async def test_a_statement_that_is_answered_soon_needs_no_check() -> None:
    async def ask() -> Activity | None:
        raise AssertionError

    watched = SilenceMonitor(ask, lambda: pytest.fail("severed"))
    for _ in range(3):
        with watched.waiting():
            pass
    await asyncio.sleep(0)


async def test_bytes_that_leave_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "CHECK_SECONDS", 0.001)
    left = 100
    sent = asyncio.Event()

    async def ask() -> Activity | None:
        nonlocal left
        left -= 1
        if not left:
            sent.set()
        return IDLE

    watched = SilenceMonitor(ask, lambda: pytest.fail("severed"), lambda: left)
    with watched.waiting():
        await sent.wait()
