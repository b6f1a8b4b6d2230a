"""Requests that arrive during a call share the next call."""

import asyncio

import pytest

from streamer.util.batched import Batched


class Reader:
    """Answers with upper case, one call for each `answer`."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.errors: list[Exception] = []
        self.began = asyncio.Event()
        self._answers = asyncio.Semaphore(0)

    def answer(self, count: int = 1) -> None:
        for _ in range(count):
            self._answers.release()

    async def read(self, keys: list[str]) -> dict[str, str]:
        self.calls.append(keys)
        self.began.set()
        await self._answers.acquire()
        if self.errors:
            raise self.errors.pop()
        return {key: key.upper() for key in keys if key != "missing"}


def asking(batched: Batched[str, str], *keys: str) -> list[asyncio.Task[str | None]]:
    return [asyncio.create_task(batched.get(key), name=key) for key in keys]


async def test_requests_during_a_read_share_the_next_one() -> None:
    reader = Reader()
    batched = Batched(reader.read)
    first = asking(batched, "a")
    await reader.began.wait()
    others = asking(batched, "b", "missing", "b", "a")
    reader.answer(2)
    assert [await task for task in [*first, *others]] == ["A", "B", None, "B", "A"]
    assert reader.calls == [["a"], ["b", "missing", "a"]], "the first read began before the others"


async def test_a_read_that_fails_ends_one_request_and_the_others_read_again() -> None:
    reader = Reader()
    reader.errors.append(OSError("gone"))
    batched = Batched(reader.read)
    tasks = asking(batched, "a", "b")
    reader.answer(2)
    with pytest.raises(OSError, match="gone"):
        await tasks[0]
    assert await tasks[1] == "B"
    assert reader.calls == [["a", "b"], ["a", "b"]]


async def test_a_request_that_is_cancelled_leaves_the_others_their_answer() -> None:
    reader = Reader()
    batched = Batched(reader.read)
    tasks = asking(batched, "a", "b")
    await reader.began.wait()
    tasks[0].cancel()
    reader.answer()
    assert await tasks[1] == "B"
    assert tasks[0].cancelled()
