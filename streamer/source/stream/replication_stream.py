"""The stream of changes: reads replication frames, and sends status updates.

PostgreSQL documentation, "Streaming Replication Protocol", START_REPLICATION: after it both sides
send CopyData frames. The source sends XLogData (``w``: int64 start, int64 end, int64 time, then a
pgoutput message). The source also sends primary keepalives (``k``: int64 end of WAL, int64 time,
int8 reply requested). streamer sends standby status updates (``r``: int64 received, int64 flushed,
int64 applied, int64 time, int8 reply requested).

Reading never blocks the event loop, and waits only for the source.
"""

import asyncio
import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import psycopg
from psycopg import pq

from streamer.compiled import choice
from streamer.decode import pgoutput
from streamer.decode.large_values import LARGE_BYTES, as_message
from streamer.errors.error_classes import (
    ProtocolError,
    SourceConnectionError,
    SourceError,
    TransportError,
    UnpublishedError,
)
from streamer.mapping.rules import SourceMapping
from streamer.postgres.quoting import quote_identifier, quote_literal
from streamer.source.catalog import SourceServer
from streamer.source.connection import (
    UNCONVERTIBLE,
    Connection,
    as_stored,
    connect,
    first_line,
    has_any_text,
    pass_bytes,
    translate,
    translating,
)
from streamer.source.server.timeline import check_same_server
from streamer.source.slot_and_publications.slot import copy_slot
from streamer.source.stream.libpq import FUNCTIONS, address_of
from streamer.util.lsn import INVALID_LSN, Lsn

if TYPE_CHECKING:
    from streamer.compiled._compiled import FrameReader

_MAY_BE_OF_PUBLICATIONS: Final = ("0A000", "22")
"""SQLSTATEs and classes of errors in decoding: column lists of a table differ, or a row filter
fails.
"""
_XLOG_DATA: Final = ord("w")
_KEEPALIVE: Final = ord("k")
_XLOG_DATA_HEADER: Final = 25
_keepalive_fields = struct.Struct(">xQqB")
_status_update = struct.Struct(">cQQQqB")
_lsn_at = struct.Struct(">Q").unpack_from

_UNIX_TO_POSTGRES_SECONDS: Final = 946_684_800

MESSAGES_VERSION: Final = 14_00_00
"""The first server version whose pgoutput sends logical messages."""
BURST_FRAMES_MAX: Final = 20_000
BURST_BYTES_MAX: Final = 4 * 1024 * 1024
"""The bytes that a turn of the event loop reads: about ten milliseconds of work."""
BURST_FRAMES_MAX_UNCOMPILED: Final = 2000
BURST_BYTES_MAX_UNCOMPILED: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of pgoutput. ``protocol``: the option proto_version."""

    publications: tuple[str, ...]
    protocol: int = 1
    streaming: bool = False
    origin_none: bool = False
    binary: bool = False
    messages: bool = False

    @classmethod
    def for_version(
        cls,
        version: int,
        source: SourceMapping,
        publications: tuple[str, ...],
        *,
        binary: bool = False,
        streaming: bool = True,
    ) -> "StreamOptions":
        """Return the options that *version* supports: *streaming*, *binary* and messages from 14,
        origin from 16.
        """
        return cls(
            publications,
            protocol=2 if version >= 14_00_00 else 1,
            streaming=version >= 14_00_00 and source.streaming and streaming,
            origin_none=version >= 16_00_00 and not source.forward_origins,
            binary=version >= 14_00_00 and binary,
            messages=version >= MESSAGES_VERSION,
        )

    def sql(self) -> str:
        names = ",".join(map(quote_identifier, self.publications))
        options = [f"proto_version '{self.protocol}'", f"publication_names {quote_literal(names)}"]
        if self.streaming:
            options.append("streaming 'on'")
        if self.binary:
            options.append("binary 'true'")
        if self.messages:
            options.append("messages 'true'")
        if self.origin_none:
            options.append("origin 'none'")
        return ", ".join(options)


@dataclass(slots=True)
class Burst:
    """The result of one read: pgoutput messages in order, and the last keepalive if any."""

    payloads: list[bytes] = field(default_factory=list)
    wal_end_lsn: Lsn | None = None
    reply_requested: bool = False
    has_more: bool = False
    """Whether the size limit ended the burst, so that more data may be available."""


class ChangeStream(Protocol):
    """The input of a pipeline: a slot, or a journal of a slot's messages."""

    @property
    def last_message_at(self) -> float: ...
    def read(self) -> Burst: ...
    async def wait_readable(self) -> None: ...
    def send_status(
        self, flush_lsn: Lsn, visible_lsn: Lsn, *, request_reply: bool = False
    ) -> None: ...
    async def stop(self, flush_lsn: Lsn) -> None: ...
    async def close(self) -> None: ...


def _frame_reader(connection: Connection) -> "FrameReader | None":
    """Return the compiled reader of a connection, if available in this process."""
    if choice.compiled is None or FUNCTIONS is None:
        return None
    if (address := address_of(connection.pgconn)) is None:
        return None
    reader: FrameReader = choice.compiled.FrameReader(
        address, FUNCTIONS.get_copy_data, FUNCTIONS.free_memory
    )
    return reader


class ReplicationStream:
    """The stream of one START_REPLICATION, from start to end."""

    def __init__(self, connection: Connection, label: str, *, is_binary: bool = False) -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        self._label = label
        self._is_binary = is_binary
        self._frames = _frame_reader(connection)
        self._has_ended = False
        """Whether a read has raised the error that ended the stream."""
        self.start_lsn = INVALID_LSN
        self.received_lsn = INVALID_LSN
        self.last_message_at = time.monotonic()
        """The time of the source's last message, on the clock of `time.monotonic`."""

    @classmethod
    async def start(
        cls,
        source: SourceMapping,
        slot: str,
        start_lsn: Lsn,
        options: StreamOptions,
        *,
        server: SourceServer | None = None,
        name_of_copy: str | None = None,
    ) -> "ReplicationStream":
        """Connect, to *server* if given, and start replication from *slot* at *start_lsn*.

        *name_of_copy*: leave *slot* to its reader, and start from a temporary copy of this name, at
        the position of *slot*.

        Raises SlotInUseError, SlotMissingError, SourceConnectionError, SourceRejectedError.
        """
        connection = await connect(source, replication=True)
        try:
            stream = cls(connection, source.label, is_binary=options.binary)
            with translating(source.label):
                if server is not None:
                    await check_same_server(connection, server)
                if name_of_copy is not None:
                    start_lsn = await copy_slot(connection, slot, name_of_copy)
                    slot = name_of_copy
                stream.start_lsn = start_lsn
                start = f"START_REPLICATION SLOT {quote_identifier(slot)} LOGICAL {start_lsn}"
                command = f"{start} ({options.sql()})"
                stored = command.encode()
                if not options.binary or has_any_text(connection):
                    stored = await as_stored(connection, command)
                    await pass_bytes(connection)
                await stream._execute(stored)
        except BaseException:
            await connection.close()
            raise
        return stream

    async def _execute(self, command: bytes) -> None:
        pgconn = self._pgconn
        pgconn.send_query(command)
        while pgconn.flush():
            await self._wait(writable=True)
        while pgconn.is_busy():
            await self._wait()
            pgconn.consume_input()
        result = pgconn.get_result()
        if result is None or result.status != pq.ExecStatus.COPY_BOTH:
            if result is None:
                raise SourceConnectionError(f'source "{self._label}" closed the connection')
            raise psycopg.errors.error_from_result(result)
        pgconn.nonblocking = 1

    @property
    def backend_pid(self) -> int:
        """The walsender's process id at the source."""
        return self._pgconn.backend_pid

    async def _wait(self, *, writable: bool = False) -> None:
        loop = asyncio.get_running_loop()
        ready = loop.create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        descriptor = self._pgconn.socket
        if writable:
            loop.add_writer(descriptor, wake)
        else:
            loop.add_reader(descriptor, wake)
        try:
            await ready
        finally:
            if writable:
                loop.remove_writer(descriptor)
            else:
                loop.remove_reader(descriptor)

    async def wait_readable(self) -> None:
        """Wait until the source has sent data, or closed the connection.

        A part of a message counts as a sign of life, because the rest of a large message may take
        minutes.
        """
        await self._wait()
        self.last_message_at = time.monotonic()

    def read(self) -> Burst:
        """Read the data that arrived, without waiting; the burst is empty if there is none.

        Raises SourceConnectionError when the stream ends, ProtocolError for an unknown frame, and
        UnpublishedError if the publications of the next change make the source fail.
        """
        burst = Burst()
        try:
            self._read_frames(burst)
        except psycopg.Error as exc:
            self._has_ended = True
            if self._is_binary and exc.sqlstate in UNCONVERTIBLE:
                # The server converts text only in binary mode. The next attempt uses text mode.
                raise TransportError(first_line(exc)) from exc
            error = translate(exc, self._label)
            state = exc.sqlstate or ""
            if type(error) is SourceError and state.startswith(_MAY_BE_OF_PUBLICATIONS):
                error = UnpublishedError(error.message)
            raise error from exc
        return burst

    def _read_frames(self, burst: Burst) -> None:
        if self._frames is not None:
            self._read_compiled(self._frames, burst)
            return
        pgconn = self._pgconn
        get_copy_data = pgconn.get_copy_data
        payloads = burst.payloads
        take = payloads.append
        data = b""
        pgconn.consume_input()
        has_consumed = True
        remaining = BURST_BYTES_MAX_UNCOMPILED
        burst.has_more = True
        while len(payloads) < BURST_FRAMES_MAX_UNCOMPILED and remaining > 0:
            size, view = get_copy_data(1)
            if size > 0:
                remaining -= size
                if size > LARGE_BYTES:
                    data = self._read_large(view, burst)
                    has_consumed = False
                    continue
                data = view.tobytes()
                if data[0] == _XLOG_DATA:
                    take(data[_XLOG_DATA_HEADER:])
                    has_consumed = False
                else:
                    self._handle_other(data, burst)
            elif size == 0:
                # libpq reads at most a buffer at a time, so the socket may have more data.
                if has_consumed:
                    burst.has_more = False
                    break
                pgconn.consume_input()
                has_consumed = True
            else:
                self._raise_ended()
        if payloads:
            if len(data) > _XLOG_DATA_HEADER and data[0] == _XLOG_DATA:
                self._received(_lsn_at(data, 1)[0])
            self.last_message_at = time.monotonic()

    def _read_compiled(self, frames: "FrameReader", burst: Burst) -> None:
        payloads = burst.payloads
        self._pgconn.consume_input()
        taken_before = 0
        remaining = BURST_BYTES_MAX
        while True:
            frame = frames.read(payloads, BURST_FRAMES_MAX - len(payloads), remaining, LARGE_BYTES)
            remaining -= frames.taken_bytes
            if frame is None:
                burst.has_more = True
                break
            if isinstance(frame, int):
                if frame == -2:
                    raise psycopg.OperationalError(self._pgconn.get_error_message())
                if frame < 0:
                    self._raise_ended()
                if len(payloads) == taken_before:
                    break
                taken_before = len(payloads)
                self._pgconn.consume_input()
                continue
            view = memoryview(frame)
            if len(view) > LARGE_BYTES:
                self._received(_lsn_at(self._read_large(view, burst), 1)[0])
            else:
                self._handle_other(view.tobytes(), burst)
        if payloads:
            self._received(frames.last_lsn)
            self.last_message_at = time.monotonic()
        if (keepalive := frames.take_keepalive()) is not None:
            wal_end, is_requested = keepalive
            self._handle_keepalive(burst, wal_end, is_requested=is_requested)

    def _received(self, lsn: int) -> None:
        self.received_lsn = max(self.received_lsn, Lsn(lsn))

    def _read_large(self, frame: memoryview, burst: Burst) -> bytes:
        """Read a large frame without a copy; return the first bytes."""
        head = frame[: _XLOG_DATA_HEADER + 1].tobytes()
        if head[0] != _XLOG_DATA:
            raise ProtocolError(f"unknown replication frame {chr(head[0])!r} at offset 0")
        payload = frame[_XLOG_DATA_HEADER:]
        # Pass a view only of row messages, which later code certainly does not copy.
        is_row = head[-1] in pgoutput.ROW_KINDS
        burst.payloads.append(as_message(payload) if is_row else payload.tobytes())
        return head

    def _handle_other(self, data: bytes, burst: Burst) -> None:
        if data[0] != _KEEPALIVE or len(data) != _keepalive_fields.size:
            raise ProtocolError(f"unknown replication frame {chr(data[0])!r} at offset 0")
        wal_end, _, reply = _keepalive_fields.unpack(data)
        self._handle_keepalive(burst, wal_end, is_requested=reply == 1)

    def _handle_keepalive(self, burst: Burst, wal_end: int, *, is_requested: bool) -> None:
        burst.wal_end_lsn = Lsn(wal_end)
        burst.reply_requested = burst.reply_requested or is_requested
        self.received_lsn = max(self.received_lsn, burst.wal_end_lsn)
        self.last_message_at = time.monotonic()

    def _raise_ended(self) -> None:
        self._has_ended = True
        result = self._pgconn.get_result()
        if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
            raise psycopg.errors.error_from_result(result)
        raise SourceConnectionError(f'source "{self._label}" ended the stream')

    def send_status(self, flush_lsn: Lsn, visible_lsn: Lsn, *, request_reply: bool = False) -> None:
        """Report to the source that all changes up to *flush_lsn* are durable.

        Only this function acknowledges changes. *visible_lsn*, which the source shows as
        ``replay_lsn``, is ahead while the acknowledgement of visible changes is not stored yet. The
        function never waits: it sends bytes that do not fit the socket with the next call. After a
        read has raised an error, it sends no status: libpq would fail without the SQLSTATE, while
        the reader may still read the cause.
        """
        if self._has_ended:
            return
        now = int((time.time() - _UNIX_TO_POSTGRES_SECONDS) * 1_000_000)
        received = max(self.received_lsn, flush_lsn, visible_lsn)
        update = _status_update.pack(b"r", received, flush_lsn, visible_lsn, now, request_reply)
        try:
            self._pgconn.put_copy_data(update)
            self._pgconn.flush()
        except psycopg.Error as exc:
            raise translate(exc, self._label) from exc

    async def stop(self, flush_lsn: Lsn) -> None:
        """Send a last status update and end the stream in order, so that the source has read the
        update.

        The walsender reads all data before it answers CopyDone with CopyDone.
        """
        with translating(self._label):
            pgconn = self._pgconn
            self.send_status(flush_lsn, flush_lsn)
            pgconn.put_copy_end()
            while pgconn.flush():
                await self._wait(writable=True)
            while True:
                size, _ = pgconn.get_copy_data(1)
                if size < 0:
                    return
                if size == 0:
                    await self._wait()
                    pgconn.consume_input()

    async def close(self) -> None:
        """Close the connection in any state."""
        self._frames = None  # the reader has the address of the connection
        await self._connection.close()
