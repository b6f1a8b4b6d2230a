from collections.abc import Sequence
from typing import Any

SOURCE_CRC: int
"""CRC-32 of the .pyx file that the module was built from."""

class RowFolder:
    def __init__(
        self,
        count: int,
        key_positions: tuple[int, ...],
        *,
        binary: bool,
        is_append: bool,
        is_full: bool,
        takes_updates: bool,
        added: int = 0,
    ) -> None: ...
    def fold(
        self,
        payloads: list[bytes],
        start: int,
        inserts: dict[Any, Any],
        updates: dict[Any, Any],
        deletes: dict[Any, Any],
        moves: dict[Any, Any],
        counts: list[int],
    ) -> int: ...
    def chain(
        self,
        payloads: list[bytes],
        start: int,
        times: list[int],
        stops: list[int],
        transaction: int,
        number: int,
        chains: dict[Any, list[Any]],
        counts: list[int],
    ) -> int: ...

def extend(
    payloads: list[bytes], count: int, added: int, on_insert: bytes, on_update: bytes
) -> list[bytes] | None: ...
def mark_deletes(payloads: list[bytes], keys: bytes, added: int, values: bytes) -> list[bytes]: ...

class RowEncoder:
    def __init__(
        self, count: int, positions: tuple[int, ...], *, binary: bool, null: object
    ) -> None: ...
    def encode(self, head: bytes, rows: list[Any], leads: list[bytes] | None = None) -> bytes: ...

def lead_chains(
    chains: list[tuple[Any, list[Any]]],
    start: int,
    stop: int,
    heads: dict[int, tuple[bytes, bytes]],
    times: dict[int, bytes],
    *,
    binary: bool,
) -> list[bytes]: ...
def lead_versions(
    chains: list[tuple[Any, list[Any]]],
    start: int,
    stop: int,
    ends: dict[int, int],
    numbers: Sequence[int],
    times: dict[int, bytes],
    ended: tuple[bytes, bytes],
    begin_time: int,
    open_time: int,
    *,
    binary: bool,
) -> tuple[list[bytes], list[Any]]: ...
def gather(
    payloads: list[bytes],
    start: int,
    block: Any,
    touched: dict[bytes, Any],
    opened: dict[bytes, Any],
    begun: tuple[int, int, int] | None,
    *,
    is_foreign: bool,
    takes_commit: bool,
) -> tuple[int, tuple[int, int, int] | None]: ...

class Frame:
    def __buffer__(self, flags: int, /) -> memoryview: ...

class FrameReader:
    last_lsn: int
    taken_bytes: int
    def __init__(self, connection: int, get_copy_data: int, free_memory: int) -> None: ...
    def take_keepalive(self) -> tuple[int, bool] | None: ...
    def read(
        self, payloads: list[bytes], frames_max: int, bytes_max: int, large_bytes: int
    ) -> int | Frame | None: ...

class RowPump:
    rows: int
    size: int
    def __init__(
        self,
        source: int,
        target: int,
        get_copy_data: int,
        free_memory: int,
        put_copy_data: int,
        consume_input: int,
    ) -> None: ...
    def pass_rows(self, rows_max: int, bytes_max: int) -> int: ...
