"""Rows of the capture's table become logical messages."""

import pytest

from streamer.decode import pgoutput
from streamer.decode.pgoutput import DDL_PREFIX, LogicalMessage
from streamer.decode.table_messages import TableMessages
from streamer.errors.error_classes import ProtocolError

RELID = (77).to_bytes(4, "big")
OTHER = (78).to_bytes(4, "big")
XID = (9).to_bytes(4, "big")
CONTENT = b'5 token {"tag": "ALTER TABLE"}'


def relation(relid: bytes, namespace: str, name: str, xid: bytes = b"") -> bytes:
    column = b"\0content\0" + (17).to_bytes(4, "big") + b"\xff\xff\xff\xff"
    names = f"{namespace}\0{name}\0".encode()
    return b"R" + xid + relid + names + b"f" + (1).to_bytes(2, "big") + column


def row(value: bytes, relid: bytes = RELID, xid: bytes = b"", kind: bytes = b"t") -> bytes:
    head = b"N" + (1).to_bytes(2, "big") + kind
    return b"I" + xid + relid + head + len(value).to_bytes(4, "big") + value


def text(content: bytes) -> bytes:
    return b"\\x" + content.hex().encode()


@pytest.fixture
def messages() -> TableMessages:
    return TableMessages("streamer_shop", "message", DDL_PREFIX)


def test_a_row_becomes_a_message_in_its_place(messages: TableMessages) -> None:
    table = relation(RELID, "streamer_shop", "message")
    other = row(b"x", OTHER)
    for value, kind in ((text(CONTENT), b"t"), (CONTENT, b"b")):
        found = list(messages.replace([table, other, row(value, kind=kind), b"C"]))
        assert (found[0], found[1], found[3]) == (table, other, b"C")
        message = pgoutput.parse(found[2])
        assert isinstance(message, LogicalMessage)
        assert message.is_instruction
        assert (message.prefix, message.content) == (DDL_PREFIX, CONTENT)
    # Later bursts know the relation, until a new relation has the number.
    assert next(messages.replace([row(CONTENT, kind=b"b")]))[:1] == b"M"
    renamed = relation(RELID, "public", "message")
    assert list(messages.replace([renamed, row(CONTENT)])) == [renamed, row(CONTENT)]


def test_in_a_streamed_transaction_it_keeps_the_number_of_its_subtransaction(
    messages: TableMessages,
) -> None:
    start = b"S" + XID + b"\x01"
    table = relation(RELID, "streamer_shop", "message", XID)
    found = list(messages.replace([start, table, row(text(CONTENT), xid=XID), b"E"]))
    assert found[2][:5] == b"M" + XID
    message = pgoutput.parse(found[2], in_stream=True)
    assert isinstance(message, LogicalMessage)
    assert message.content == CONTENT
    assert next(messages.replace([row(CONTENT, kind=b"b")]))[:2] == b"M\x01", "the stream has ended"


@pytest.mark.parametrize(
    "bad",
    [
        row(b"no hex"),
        row(b"\\xzz"),
        row(text(CONTENT), kind=b"u"),
        row(text(CONTENT))[:-1],
        b"I" + RELID + b"N",
    ],
)
def test_a_row_that_the_capture_cannot_have_written_stops_the_stream(
    bad: bytes, messages: TableMessages
) -> None:
    with pytest.raises(ProtocolError, match="capture's table"):
        list(messages.replace([relation(RELID, "streamer_shop", "message"), bad]))


def test_another_connection_describes_its_relations_anew(messages: TableMessages) -> None:
    list(messages.replace([relation(RELID, "streamer_shop", "message"), b"S" + XID + b"\x01"]))
    messages.reset()
    assert list(messages.replace([row(CONTENT)])) == [row(CONTENT)]
