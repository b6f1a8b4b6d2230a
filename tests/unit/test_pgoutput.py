"""The error about malformed bytes names the message and the offset of the fault."""

import re
from datetime import UTC, datetime, timedelta

import pytest

from streamer.decode import pgoutput
from streamer.decode.pgoutput import from_datetime, parse, to_datetime
from streamer.errors.error_classes import ProtocolError, Retry
from tests.property import encode

COLUMNS = [(1, "id", 23, -1), (0, "näme", 1043, 24)]

MESSAGES = {
    "begin": encode.begin(0x16_B374D848, 700_000_000_000_000, 745),
    "commit": encode.commit(0x16_B374D848, 0x16_B374D878, 700_000_000_000_000),
    "origin": encode.origin(42, "elsewhere"),
    "relation": encode.relation(16385, "public", "t", "d", COLUMNS),
    "type": encode.type_(16400, "public", "mood"),
    "truncate": encode.truncate([16385, 16386], 3),
    "message": encode.message(1, 99, "prefix", b"content"),
    "stream start": encode.stream_start(745, first=True),
    "stream stop": encode.stream_stop(),
    "stream commit": encode.stream_commit(745, 1, 2, 3),
    "stream abort": encode.stream_abort(745, 746),
}
XID = 747
STREAMED = {
    "relation": encode.relation(16385, "public", "t", "d", COLUMNS, XID),
    "type": encode.type_(16400, "public", "mood", XID),
    "truncate": encode.truncate([16385, 16386], 3, XID),
    "message": encode.message(1, 99, "prefix", b"content", XID),
}


def check_place(error: ProtocolError, data: bytes) -> None:
    """The kind, and where: an offset within the message, or the size where that is all wrong."""
    found = re.search(r"pgoutput message '(.+)' (?:at offset|of) (\d+)", error.message)
    assert found is not None, error.message
    assert found[1] == (repr(chr(data[0]))[1:-1] if data else "\\x00")
    assert int(found[2]) <= len(data)
    assert error.retry is Retry.NEVER


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_truncated_anywhere_is_refused_and_says_where(name: str) -> None:
    data = MESSAGES[name]
    parse(data)
    for size in range(len(data)):
        with pytest.raises(ProtocolError) as caught:
            parse(data[:size])
        check_place(caught.value, data[:size])


@pytest.mark.parametrize("name", STREAMED)
def test_a_streamed_message_truncated_anywhere_is_refused_and_says_where(name: str) -> None:
    data = STREAMED[name]
    assert parse(data, in_stream=True) == parse(MESSAGES[name])
    for size in range(len(data)):
        with pytest.raises(ProtocolError) as caught:
            parse(data[:size], in_stream=True)
        check_place(caught.value, data[:size])


@pytest.mark.parametrize("name", MESSAGES)
def test_trailing_bytes_are_refused(name: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse(MESSAGES[name] + b"\0")
    check_place(caught.value, MESSAGES[name] + b"\0")


def test_a_truncated_message_names_its_offset() -> None:
    with pytest.raises(ProtocolError, match=r"^truncated pgoutput message 'O' at offset 9$"):
        parse(MESSAGES["origin"][:-1])
    with pytest.raises(ProtocolError, match=r"^truncated pgoutput message 'T' at offset 10$"):
        parse(MESSAGES["truncate"][:-2])


def test_trailing_bytes_name_their_offset() -> None:
    with pytest.raises(
        ProtocolError, match="trailing bytes after pgoutput message 'A' at offset 9"
    ):
        parse(MESSAGES["stream abort"] + b"x")


def test_an_unknown_kind_is_refused_also_that_of_a_row() -> None:
    for kind in set(range(256)) - set(b"BCORYTMSEcA"):
        with pytest.raises(ProtocolError, match=r"unknown pgoutput message .* at offset 0"):
            parse(bytes([kind]) + b"\0" * 30)


def test_no_message_at_all_is_refused() -> None:
    with pytest.raises(ProtocolError):
        parse(b"")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (encode.relation(1, "s", "t", "x", []), "unknown replica identity"),
        (encode.relation(1, "s", "t", "\0", []), "unknown replica identity"),
        (encode.relation(1, "s", "t", "d", [(2, "a", 25, -1)]), "unknown column flags"),
        (encode.truncate([1], 4), "unknown options"),
        (encode.message(2, 1, "p", b""), "unknown flags"),
        (encode.commit(1, 2, 3, flags=1), "malformed"),
        (encode.stream_commit(1, 2, 3, 4, flags=1), "unknown flags"),
        (encode.origin(1, "x")[:-2] + b"\xff\0", "undecodable text"),
    ],
)
def test_a_value_that_the_protocol_does_not_know_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem) as caught:
        parse(data)
    check_place(caught.value, data)


def test_a_relation_of_pg_catalog_comes_without_a_namespace() -> None:
    relation = parse(encode.relation(1, "", "t", "n", []))
    assert isinstance(relation, pgoutput.Relation)
    assert relation.namespace == "pg_catalog"


def test_times_count_microseconds_from_2000() -> None:
    assert to_datetime(0) == datetime(2000, 1, 1, tzinfo=UTC)
    moment = datetime(2026, 2, 3, 4, 5, 6, 789, tzinfo=UTC)
    assert to_datetime(from_datetime(moment)) == moment
    assert from_datetime(datetime(1999, 12, 31, 23, 59, 59, tzinfo=UTC)) == -1_000_000
    assert to_datetime(-1) == datetime(2000, 1, 1, tzinfo=UTC) - timedelta(microseconds=1)
