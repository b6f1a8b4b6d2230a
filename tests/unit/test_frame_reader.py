"""The compiled reader of frames, over a libpq made of Python functions that a test controls."""

import ctypes
import struct
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from tests.support.compiled import compiled, needs_compiled

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs_compiled

_GET = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int
)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
LARGE = 100


class FakeLibpq:
    """Returns frames in separate memory, and finds memory that the reader does not free."""

    def __init__(self, frames: list[bytes | int]) -> None:
        self.frames: Iterator[bytes | int] = iter(frames)
        self.memory: dict[int, Any] = {}
        self._get, self._free = _GET(self.get_copy_data), _FREE(self.free_memory)
        assert compiled is not None
        addresses = [ctypes.cast(f, ctypes.c_void_p).value for f in (self._get, self._free)]
        self.reader = compiled.FrameReader(1, *addresses)

    def get_copy_data(self, _connection: int, buffer: Any, is_async: int) -> int:
        assert is_async == 1
        frame = next(self.frames, 0)
        if isinstance(frame, int):
            return frame
        made = ctypes.create_string_buffer(frame, max(1, len(frame)))
        buffer[0] = address = ctypes.addressof(made)
        self.memory[address] = made
        return len(frame)

    def free_memory(self, address: int) -> None:
        del self.memory[address]


def wal(lsn: int, payload: bytes) -> bytes:
    return b"w" + struct.pack(">QQq", lsn, lsn, 0) + payload


def keepalive(lsn: int, reply: int) -> bytes:
    return b"k" + struct.pack(">QqB", lsn, 0, reply)


def test_keepalives_are_taken_once_and_a_requested_reply_is_not_forgotten() -> None:
    libpq = FakeLibpq([keepalive(9, 1), wal(10, b"one"), keepalive(2**63 + 1, 0), 0, 0])
    payloads: list[bytes] = []
    assert libpq.reader.take_keepalive() is None
    assert libpq.reader.read(payloads, 100, 10_000, LARGE) == 0
    assert libpq.reader.read(payloads, 100, 10_000, LARGE) == 0
    assert libpq.reader.take_keepalive() == (2**63 + 1, True)
    assert libpq.reader.take_keepalive() is None
    assert payloads == [b"one"]
    assert libpq.reader.last_lsn == 10
    assert libpq.memory == {}


def test_payloads_arrive_in_order_and_memory_is_given_back() -> None:
    libpq = FakeLibpq([wal(10, b"one"), wal(11, b""), wal(12, b"three"), 0])
    payloads: list[bytes] = []
    assert libpq.reader.read(payloads, 100, 10_000, LARGE) == 0
    assert payloads == [b"one", b"", b"three"]
    assert libpq.reader.last_lsn == 12
    assert libpq.reader.taken_bytes == 3 * 25 + 8
    assert libpq.memory == {}


def test_a_burst_has_a_bound() -> None:
    libpq = FakeLibpq([wal(n, b"x" * 10) for n in range(10)])
    payloads: list[bytes] = []
    assert libpq.reader.read(payloads, 3, 10_000, LARGE) is None
    assert len(payloads) == 3
    assert libpq.reader.read(payloads, 100, 36, LARGE) is None  # the second frame exceeds the limit
    assert len(payloads) == 5


def test_the_end_and_a_failure_are_passed_on() -> None:
    for result in (-1, -2):
        assert FakeLibpq([result]).reader.read([], 10, 1000, LARGE) == result


@given(st.binary(min_size=1, max_size=LARGE + 50))
def test_any_frame_is_a_payload_or_is_handed_over_whole(frame: bytes) -> None:
    libpq = FakeLibpq([frame])
    payloads: list[bytes] = []
    found = libpq.reader.read(payloads, 1, 10_000, LARGE)
    if payloads:
        assert frame[:1] == b"w"
        assert payloads == [frame[25:]]
        assert len(frame) <= LARGE
    elif libpq.reader.take_keepalive() is not None:
        assert frame[:1] == b"k"
        assert len(frame) == 18
    else:
        view = memoryview(found)
        assert bytes(view) == frame
        assert view.readonly
        assert libpq.memory  # until the last reference to the frame ends
        view.release()
    del found
    assert libpq.memory == {}
