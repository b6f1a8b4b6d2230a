"""The parser reads messages written after PostgreSQL's documentation, and refuses malformed
messages.
"""

from hypothesis import given
from hypothesis import strategies as st

from streamer.decode import pgoutput
from streamer.decode.pgoutput import Message
from streamer.errors.error_classes import ProtocolError
from streamer.util.lsn import Lsn
from tests.property import encode

Case = tuple[bytes, Message]

uint32 = st.integers(0, 2**32 - 1)
int32 = st.integers(-(2**31), 2**31 - 1)
lsns = st.integers(0, 2**64 - 1).map(Lsn)
times = st.integers(-(2**63), 2**63 - 1)
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
xids = uint32


@st.composite
def relations(draw: st.DrawFn, xid: int | None) -> Case:
    relid, namespace, name = draw(uint32), draw(texts), draw(texts)
    identity = draw(st.sampled_from("dnfi"))
    columns = draw(st.lists(st.tuples(st.integers(0, 1), texts, uint32, int32), max_size=5))
    expected = pgoutput.Relation(
        relid,
        namespace or "pg_catalog",
        name,
        identity,
        tuple(pgoutput.Column(c, oid, modifier, flags == 1) for flags, c, oid, modifier in columns),
    )
    return encode.relation(relid, namespace, name, identity, columns, xid), expected


@st.composite
def truncates(draw: st.DrawFn, xid: int | None) -> Case:
    relids, options = draw(st.lists(uint32, max_size=5)), draw(st.integers(0, 3))
    expected = pgoutput.Truncate(tuple(relids), options in (1, 3), options in (2, 3))
    return encode.truncate(relids, options, xid), expected


@st.composite
def types(draw: st.DrawFn, xid: int | None) -> Case:
    oid, namespace, name = draw(uint32), draw(texts), draw(texts)
    expected = pgoutput.Type(oid, namespace or "pg_catalog", name)
    return encode.type_(oid, namespace, name, xid), expected


@st.composite
def logical_messages(draw: st.DrawFn, xid: int | None) -> Case:
    flags, lsn = draw(st.integers(0, 1)), draw(lsns)
    prefix, content = draw(texts), draw(st.binary(max_size=20))
    expected = pgoutput.LogicalMessage(flags == 1, lsn, prefix, content)
    return encode.message(flags, lsn, prefix, content, xid), expected


def streamable(xid: int | None) -> st.SearchStrategy[Case]:
    """Messages that carry an xid within a stream, and none outside."""
    return st.one_of(relations(xid), truncates(xid), types(xid), logical_messages(xid))


plain: st.SearchStrategy[Case] = st.one_of(
    streamable(None),
    st.tuples(lsns, times, xids).map(lambda f: (encode.begin(*f), pgoutput.Begin(*f))),
    st.tuples(lsns, lsns, times).map(lambda f: (encode.commit(*f), pgoutput.Commit(*f))),
    st.tuples(lsns, texts).map(lambda f: (encode.origin(*f), pgoutput.Origin(*f))),
    st.tuples(xids, st.booleans()).map(
        lambda f: (encode.stream_start(f[0], first=f[1]), pgoutput.StreamStart(*f))
    ),
    st.just((encode.stream_stop(), pgoutput.StreamStop())),
    st.tuples(xids, lsns, lsns, times).map(
        lambda f: (encode.stream_commit(*f), pgoutput.StreamCommit(*f))
    ),
    st.tuples(xids, xids).map(lambda f: (encode.stream_abort(*f), pgoutput.StreamAbort(*f))),
)
in_stream: st.SearchStrategy[Case] = xids.flatmap(streamable)


@given(plain)
def test_every_message_is_read_as_it_was_written(case: Case) -> None:
    data, expected = case
    assert pgoutput.parse(data) == expected


@given(in_stream)
def test_every_message_of_a_stream_is_read_as_it_was_written(case: Case) -> None:
    data, expected = case
    assert pgoutput.parse(data, in_stream=True) == expected


def outcome(data: bytes, *, in_stream: bool) -> Message | None:
    """Read *data*; None after the expected refusal."""
    try:
        return pgoutput.parse(data, in_stream=in_stream)
    except ProtocolError:
        return None


@given(st.one_of(plain, in_stream), st.data(), st.booleans())
def test_a_truncated_message_is_refused(case: Case, data: st.DataObject, streamed: bool) -> None:
    message, _ = case
    cut = data.draw(st.integers(0, len(message) - 1))
    if outcome(message, in_stream=streamed) is not None:
        assert outcome(message[:cut], in_stream=streamed) is None


@given(st.one_of(plain, in_stream), st.binary(min_size=1, max_size=5), st.booleans())
def test_a_message_with_trailing_bytes_is_refused(case: Case, rest: bytes, streamed: bool) -> None:
    message, _ = case
    if outcome(message, in_stream=streamed) is not None:
        assert outcome(message + rest, in_stream=streamed) is None


@given(st.binary(max_size=60), st.booleans())
def test_any_bytes_are_a_message_or_a_protocol_error(data: bytes, streamed: bool) -> None:
    outcome(data, in_stream=streamed)


@given(
    st.one_of(plain, in_stream),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=4),
    st.booleans(),
)
def test_a_damaged_message_is_a_message_or_a_protocol_error(
    case: Case, damage: list[tuple[int, int]], streamed: bool
) -> None:
    damaged = bytearray(case[0])
    for place, byte in damage:
        damaged[place % len(damaged)] = byte
    outcome(bytes(damaged), in_stream=streamed)
