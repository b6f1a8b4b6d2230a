"""The compiled pump of copies, over a libpq made of Python functions that a test controls."""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support.compiled import compiled, needs_compiled

pytestmark = needs_compiled

_GET = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int
)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PUT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
_CONSUME = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
SOURCE, TARGET = 1, 2
LARGE = 1 << 30


class FakeLibpq:
    """Has rows, or results of PQgetCopyData, in parts that arrive one after the other."""

    def __init__(self, *parts: Sequence[bytes | int], refuses: bytes | None = None) -> None:
        self.parts: Iterator[Sequence[bytes | int]] = iter(parts)
        self.arrived: list[bytes | int] = []
        self.refuses = refuses
        self.memory: dict[int, Any] = {}
        self.sent: list[bytes] = []
        self._functions = (
            _GET(self.get_copy_data),
            _FREE(self.free_memory),
            _PUT(self.put_copy_data),
            _CONSUME(self.consume_input),
        )
        assert compiled is not None
        addresses = [ctypes.cast(f, ctypes.c_void_p).value for f in self._functions]
        self.pump = compiled.RowPump(SOURCE, TARGET, *addresses)

    def get_copy_data(self, connection: int, buffer: Any, is_async: int) -> int:
        assert (connection, is_async) == (SOURCE, 1)
        row = self.arrived.pop(0) if self.arrived else 0
        if isinstance(row, int):
            return row
        made = ctypes.create_string_buffer(row, max(1, len(row)))
        buffer[0] = address = ctypes.addressof(made)
        self.memory[address] = made
        return len(row)

    def free_memory(self, address: int) -> None:
        del self.memory[address]

    def put_copy_data(self, connection: int, address: int, size: int) -> int:
        assert connection == TARGET
        row = ctypes.string_at(address, size)
        if row == self.refuses:
            return -1
        self.sent.append(row)
        return 1

    def consume_input(self, connection: int) -> int:
        assert connection == SOURCE
        self.arrived += next(self.parts, ())
        return 1


def test_rows_pass_in_order_until_the_source_has_sent_no_more() -> None:
    libpq = FakeLibpq([b"one"], [b"two", b"three"], [], [b"four", -1])
    assert libpq.pump.pass_rows(100, LARGE) == 0
    assert libpq.sent == [b"one", b"two", b"three"]
    assert (libpq.pump.rows, libpq.pump.size) == (3, 11)
    assert libpq.pump.pass_rows(100, LARGE) == -1
    assert libpq.sent == [b"one", b"two", b"three", b"four"]
    assert libpq.memory == {}


def test_a_call_has_a_limit_of_rows_and_of_bytes() -> None:
    libpq = FakeLibpq([b"x" * 10 for _ in range(20)])
    assert libpq.pump.pass_rows(3, LARGE) == 1
    assert libpq.pump.rows == 3
    assert libpq.pump.pass_rows(100, 31) == 1
    assert libpq.pump.rows == 7


@pytest.mark.parametrize("result", [-1, -2])
def test_the_end_and_a_failure_of_the_source_are_returned(result: int) -> None:
    assert FakeLibpq([b"x", result]).pump.pass_rows(100, LARGE) == result


def test_a_row_that_the_target_does_not_take_is_a_failure_and_its_memory_is_given_back() -> None:
    libpq = FakeLibpq([b"one", b"two", b"three"], refuses=b"two")
    assert libpq.pump.pass_rows(100, LARGE) == -3
    assert libpq.sent == [b"one"]
    assert libpq.memory == {}


def test_a_null_address_is_refused() -> None:
    assert compiled is not None
    with pytest.raises(ValueError, match="null"):
        compiled.RowPump(1, 0, 1, 1, 1, 1)
