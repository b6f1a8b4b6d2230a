"""Sources copy in order and a few at a time; sessions open a few at a time."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from streamer.copy.source_turns import CopyingSource, CopyTurn, CopyTurns
from streamer.runtime.start_limit import Starts


def source_at(source: str, at: str = "1", *, is_first: bool = True) -> CopyingSource:
    """A source of the server *at*."""
    return CopyingSource(source, (at, 1, 1), is_first)


class Asking:
    """Sources that ask for turns, as tasks."""

    def __init__(self, at_once: int, per_server: int | None = None) -> None:
        self.turns = CopyTurns(at_once, per_server)
        self.got: list[str] = []
        self.told: dict[str, str] = {}
        self._tasks: dict[str, asyncio.Task[CopyTurn]] = {}

    async def ask(
        self, name: str, *, priority: int = 0, size: int = 0, at: str = "1", is_first: bool = True
    ) -> None:
        async def tell(reason: str) -> None:
            self.told[name] = reason

        copying = source_at(name.split("/")[0], at, is_first=is_first)

        async def acquire() -> CopyTurn:
            turn = await self.turns.acquire(copying, priority, size, tell)
            self.got.append(name)
            return turn

        self._tasks[name] = asyncio.create_task(acquire(), name=name)
        await self.settle()

    async def end(self, name: str) -> None:
        self._tasks[name].result().end()
        await self.settle()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


async def test_the_highest_priority_comes_first_and_then_the_smallest() -> None:
    asking = Asking(1)
    await asking.ask("running")
    await asking.ask("large", size=100)
    await asking.ask("small", size=10)
    await asking.ask("important", size=1000, priority=1)
    await asking.ask("small too", size=10)
    for name in ("running", "important", "small", "small too"):
        await asking.end(name)
    assert asking.got == ["running", "important", "small", "small too", "large"]


async def test_no_more_sources_than_the_limit_have_a_turn() -> None:
    asking = Asking(2)
    for name in "abcd":
        await asking.ask(name)
    assert asking.got == ["a", "b"]
    await asking.end("b")
    assert asking.got == ["a", "b", "c"]


async def test_a_source_that_copies_gets_another_turn_at_once() -> None:
    asking = Asking(1)
    await asking.ask("a")
    await asking.ask("b")
    await asking.ask("a/2")
    assert asking.got == ["a", "a/2"]
    await asking.end("a")
    assert asking.got == ["a", "a/2"], "its other turn has not ended"
    await asking.end("a/2")
    assert asking.got == ["a", "a/2", "b"]


async def test_a_source_that_gives_up_leaves_its_place_to_the_next() -> None:
    asking = Asking(1)
    for name in "abc":
        await asking.ask(name)
    await asking.cancel("b")
    await asking.end("a")
    assert asking.got == ["a", "c"]


async def test_a_turn_that_comes_to_a_cancelled_source_goes_on_to_the_next() -> None:
    turns = CopyTurns(1)
    first = await turns.acquire(source_at("a"), 0, 0, _no_reason)
    second = asyncio.create_task(turns.acquire(source_at("b"), 0, 0, _ignore), name="b")
    third = asyncio.create_task(turns.acquire(source_at("c"), 0, 0, _ignore), name="c")
    await asyncio.sleep(0)
    first.end()
    first.end()  # a second end has no effect
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    (await third).end()


async def test_a_server_lets_some_of_its_sources_copy_and_other_servers_go_ahead() -> None:
    asking = Asking(3, per_server=1)
    await asking.ask("a", at="1")
    await asking.ask("b", at="1", size=10)
    await asking.ask("c", at="2", size=99)
    assert asking.got == ["a", "c"], "a source of another server passes"
    assert (
        asking.told["b"]
        == "its turn: 1 source copies at this server first (sync.sources_per_server: 1)"
    )
    await asking.ask("a/2", at="1", is_first=False)
    assert asking.got == ["a", "c", "a/2"], "tables of a source do not wait for each other"
    await asking.end("a")
    assert asking.got == ["a", "c", "a/2"], "first and later copies count together"
    await asking.end("a/2")
    assert asking.got == ["a", "c", "a/2", "b"]


async def test_first_and_later_copies_have_a_limit_each() -> None:
    asking = Asking(1)
    await asking.ask("a")
    await asking.ask("b", is_first=False)
    await asking.ask("c")
    await asking.ask("d", is_first=False)
    assert asking.got == ["a", "b"]
    assert asking.told["d"] == "its turn: 1 source copies first (sync.sources_at_once: 1)"
    await asking.end("b")
    assert asking.got == ["a", "b", "d"]


async def test_a_free_turn_is_there_at_once_or_not_at_all() -> None:
    asking = Asking(1)
    free = asking.turns.acquire_free(source_at("a"))
    assert free is not None
    assert asking.turns.acquire_free(source_at("a")) is not None, (
        "a source that copies gets another"
    )
    assert asking.turns.acquire_free(source_at("b")) is None
    await asking.ask("b")
    assert asking.turns.acquire_free(source_at("a")) is None, "others wait"


async def test_a_free_turn_that_ends_goes_to_the_next_in_order() -> None:
    asking = Asking(1)
    free = asking.turns.acquire_free(source_at("a"))
    await asking.ask("large", size=100)
    await asking.ask("small", size=10)
    assert free is not None
    free.end()
    await asking.settle()
    assert asking.got == ["small"]


async def test_a_waiting_source_shows_how_many_sources_come_first() -> None:
    asking = Asking(1)
    await asking.ask("a", size=5)
    await asking.ask("c", size=2048)
    assert asking.told["c"] == "its turn: 1 source copies first (sync.sources_at_once: 1)"
    await asking.ask("b", size=1024)
    assert asking.told["c"] == (
        "its turn: 2 sources copy first (sync.sources_at_once: 1); earlier waiting sources have "
        "1.0 kB"
    )
    await asking.end("a")
    assert asking.told["c"] == "its turn: 1 source copies first (sync.sources_at_once: 1)"


async def _no_reason(reason: str) -> None:
    raise AssertionError(f"nothing to wait for: {reason}")


async def _ignore(reason: str) -> None:
    pass


# ---- starts ------------------------------------------------------------------------------------


async def test_a_few_sources_at_a_time_open_their_sessions() -> None:
    starts, opening, most = Starts(2, 60), 0, 0
    may_end = asyncio.Event()

    async def start() -> None:
        nonlocal opening, most
        async with starts.permit():
            opening += 1
            most = max(most, opening)
            await may_end.wait()
            opening -= 1

    tasks = [asyncio.create_task(start(), name="start") for _ in range(6)]
    await asyncio.sleep(0)
    assert opening == 2
    may_end.set()
    await asyncio.gather(*tasks)
    assert most == 2


@pytest.mark.parametrize("seconds", [0.0, 60.0])
async def test_a_source_that_waits_for_its_server_keeps_no_other_waiting(seconds: float) -> None:
    """The start returns its permit after a time, or when the start reports a wait."""
    starts = Starts(1, seconds)
    never = asyncio.Event()

    async def wait_for_server(leaves: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        async with starts.permit() as leave:
            await leaves(leave)
            await never.wait()

    async def leave_at_once(leave: Callable[[], None]) -> None:
        if seconds:
            leave()

    waiting = asyncio.create_task(wait_for_server(leave_at_once), name="waits")
    await asyncio.sleep(0)
    async with asyncio.timeout(30), starts.permit():
        assert not waiting.done()
    waiting.cancel()
    await asyncio.wait([waiting])
    async with asyncio.timeout(30), starts.permit():
        pass
