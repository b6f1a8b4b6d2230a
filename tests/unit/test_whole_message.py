"""The server's answer to a transaction in a single message."""

import asyncio
import struct
from typing import Any

import pytest

from streamer.target.whole_message import WholeMessage, copy_data


class Transport:
    """Records the written bytes and the present protocol."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self.protocol, self.written = protocol, b""

    def set_protocol(self, protocol: asyncio.Protocol) -> None:
        self.protocol = protocol

    def write(self, data: bytes) -> None:
        self.written += data


class Driver(asyncio.Protocol):
    def __init__(self) -> None:
        self.received, self.is_lost = b"", False

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True


def answer(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">cI", kind, len(body) + 4) + body


NOTICE = answer(b"N", b"SNOTICE\0Mhello\0\0")
COMMITTED = b"".join(
    [
        answer(b"C", b"BEGIN\0"),
        answer(b"G", b"\0\0\0"),
        NOTICE,
        answer(b"C", b"COPY 1\0"),
        answer(b"T", b"\0\0"),
        answer(b"D", b"\0\0"),
        answer(b"C", b"COMMIT\0"),
        answer(b"Z", b"I"),
    ]
)
REFUSED = b"".join(
    [
        answer(b"C", b"BEGIN\0"),
        answer(b"E", "SERROR\0C23505\0Mschon da: ä\0\0".encode()),
        answer(b"Z", b"E"),
    ]
)


def sent() -> tuple[WholeMessage, Any, Any]:
    driver = Driver()
    transport = Transport(driver)
    message = WholeMessage(transport, driver)
    message.send("begin; copy t from stdin; commit", [copy_data([b"1\n", b"2\n"])])
    return message, transport, driver


async def test_rows_follow_their_statements_in_one_write() -> None:
    _, transport, _ = sent()
    assert transport.written == (
        answer(b"Q", b"begin; copy t from stdin; commit\0")
        + answer(b"d", b"1\n2\n")
        + answer(b"c", b"")
    )


@pytest.mark.parametrize("size", [1, 4, 7, 1000])
async def test_an_answer_in_pieces_of_any_size_gives_the_session_back(size: int) -> None:
    message, transport, driver = sent()
    waiting = asyncio.create_task(message.end())
    await asyncio.sleep(0)
    for start in range(0, len(COMMITTED), size):
        assert transport.protocol is message
        message.data_received(COMMITTED[start : start + size])
    await asyncio.wait_for(waiting, 10)
    assert (message.is_answered, message.error) == (True, None)
    assert message.tags == [b"BEGIN", b"COPY 1", b"COMMIT"]
    assert transport.protocol is driver
    assert driver.received == NOTICE


async def test_messages_after_the_answer_go_to_the_driver() -> None:
    message, _, driver = sent()
    message.data_received(REFUSED + NOTICE)
    await message.end()
    assert message.error == {"S": "ERROR", "C": "23505", "M": "schon da: ä"}
    assert driver.received == NOTICE


async def test_a_lost_connection_leaves_the_outcome_open() -> None:
    message, transport, driver = sent()
    waiting = asyncio.create_task(message.end())
    await asyncio.sleep(0)
    message.data_received(COMMITTED[:-3])
    message.connection_lost(None)
    await asyncio.wait_for(waiting, 10)
    assert not message.is_answered
    assert driver.is_lost
    assert transport.protocol is driver


async def test_a_caller_that_is_cancelled_can_still_wait_for_the_outcome() -> None:
    message, _, _ = sent()
    waiting = asyncio.create_task(message.end())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    again = asyncio.create_task(message.end())
    await asyncio.sleep(0)
    message.data_received(COMMITTED)
    await asyncio.wait_for(again, 10)
    assert message.is_answered
