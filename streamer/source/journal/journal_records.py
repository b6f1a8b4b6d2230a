"""The journal's file format: a sequence of records with length and checksum.

A segment file begins with a HEADER, which names the journal's owner and the segment's first
position. Then come the RELATION messages that are valid at that position, so a reader needs no
earlier segment. Then come messages in stream order. COMMITS ends with a commit; PART is the
beginning of a transaction whose commit is in a later record. POSITION records that all changes up
to a position have arrived. Data after the last COMMITS or POSITION is incomplete, and the journal
cuts off such data.

Pure.
"""

import enum
import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from streamer.decode.large_values import as_message
from streamer.source.history_check import CommittedTransaction
from streamer.source.timeline_branches import Branch
from streamer.util.lsn import INVALID_LSN, Lsn

FORMAT: Final = 2

_prefix = struct.Struct(">II")  # length of the record, checksum
_fields = struct.Struct(">BQIq")  # kind, lsn, xid, commit_time
_length = struct.Struct(">I")

PREFIX_SIZE: Final = _prefix.size


class Kind(enum.IntEnum):
    """The kinds of records."""

    HEADER = 1
    RELATIONS = 2
    PART = 3
    COMMITS = 4
    POSITION = 5


_KINDS: Final = frozenset(Kind)


@dataclass(frozen=True, slots=True)
class Record:
    """A record. ``lsn``: for COMMITS and POSITION, all changes up to this LSN have arrived. ``xid``
    and ``commit_time`` belong to the last transaction in the record.
    """

    kind: Kind
    body: bytes = b""
    lsn: Lsn = INVALID_LSN
    xid: int = 0
    commit_time: int = 0

    @property
    def size(self) -> int:
        """The number of bytes of the record in a file."""
        return _prefix.size + _fields.size + len(self.body)

    def encode(self) -> tuple[bytes, bytes]:
        """Return the bytes of the record for a file, in two parts, without copying a large body."""
        fields = _fields.pack(self.kind, self.lsn, self.xid, self.commit_time)
        checksum = zlib.crc32(self.body, zlib.crc32(fields))
        head = _prefix.pack(len(fields) + len(self.body), checksum) + fields
        return head, self.body


def rest_length(prefix: bytes) -> int:
    """Return the number of bytes after the first `PREFIX_SIZE` bytes of a record."""
    length: int = _prefix.unpack(prefix)[0]
    return length


def decode(data: bytes, offset: int = 0) -> tuple[Record, int] | None:
    """Return the record at *offset* and the offset of the next record.

    Return None without a complete and undamaged record.
    """
    begin = offset + _prefix.size
    if begin + _fields.size > len(data):
        return None
    length, checksum = _prefix.unpack_from(data, offset)
    end = begin + length
    if length < _fields.size or end > len(data):
        return None
    payload = memoryview(data)[begin:end]
    if zlib.crc32(payload) != checksum:
        return None
    kind, lsn, xid, commit_time = _fields.unpack_from(payload)
    if kind not in _KINDS:
        return None
    body = as_message(payload[_fields.size :])
    return Record(Kind(kind), body, Lsn(lsn), xid, commit_time), end


def pack(messages: Iterable[bytes]) -> bytes:
    """Return the body that holds *messages*."""
    parts: list[bytes] = []
    for message in messages:
        parts.append(_length.pack(len(message)))
        parts.append(message)
    return b"".join(parts)


def unpack(body: bytes) -> list[bytes]:
    """Return the messages in a body. The checksum has proved that the body is intact."""
    messages: list[bytes] = []
    offset, end = 0, len(body)
    while offset < end:
        begin = offset + _length.size
        offset = begin + _length.unpack_from(body, offset)[0]
        message = body[begin:offset]
        messages.append(as_message(message) if isinstance(message, memoryview) else message)
    return messages


@dataclass(frozen=True, slots=True)
class JournalIdentity:
    """The owner of the changes in a journal."""

    system_identifier: str
    slot: str


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a segment; its record's ``lsn`` is the segment's start. ``last``: the last
    transaction before the segment. ``branch``: the branch of the source's history.
    """

    identity: JournalIdentity
    number: int
    last: CommittedTransaction | None
    branch: Branch

    def encode(self) -> bytes:
        fields = {
            "format": FORMAT,
            "system_identifier": self.identity.system_identifier,
            "slot": self.identity.slot,
            "number": self.number,
            "last": None if self.last is None else self.last.to_json(),
            "timeline": self.branch.timeline,
            "history": self.branch.text,
        }
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, body: bytes) -> Self | None:
        """Read the body of a HEADER; None if a different version wrote the header."""
        fields = json.loads(body)
        if fields["format"] != FORMAT:
            return None
        identity = JournalIdentity(fields["system_identifier"], fields["slot"])
        last = None if fields["last"] is None else CommittedTransaction.from_json(fields["last"])
        branch = Branch.parse(fields["timeline"], fields["history"])
        return cls(identity, fields["number"], last, branch)
