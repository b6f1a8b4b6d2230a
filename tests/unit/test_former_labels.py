"""Values of enums whose labels the source has renamed."""

from streamer.decode.former_labels import FormerLabels
from streamer.decode.tuples import NULL, UNCHANGED, Row
from streamer.schema.former_label_columns import follow_labels
from streamer.schema.indexes_constraints_types import DefinedType


def test_values_and_elements_of_arrays_get_the_present_names() -> None:
    labels = {"sad": 'a "b"\\', "NULL": "void", "on, off": "x"}
    rows: list[tuple[bytes, bytes, bytes]] = [
        (b"sad", b"{sad,happy,NULL}", b'{"a \\"b\\"\\\\",happy,NULL}'),
        (b"happy", b"{{sad},{saddest}}", b'{{"a \\"b\\"\\\\"},{saddest}}'),
        (NULL, b'[0:1]={"on, off","NULL"}', b'[0:1]={"x","void"}'),
        (UNCHANGED, b"{}", b"{}"),
    ]

    def read(message: bytes, at: int) -> tuple[Row, int]:
        scalar, array, _ = rows[at]
        return [message, scalar, array], at + 1

    convert = FormerLabels({1: labels}, {2: labels}).reading(read)
    for at, (scalar, _, there) in enumerate(rows):
        expected = b'a "b"\\' if scalar == b"sad" else scalar
        assert convert(b"sad", at) == ([b"sad", expected, there], at + 1)


def test_labels_are_followed_through_several_renames() -> None:
    def mood(*labels: str) -> list[DefinedType]:
        return [DefinedType(7, "public", "mood", "e", tuple(enumerate(labels)))]

    known = follow_labels({}, {7: {"a": "b"}}, mood("b", "x"))
    assert known == {"7": {"a": "b"}}
    known = follow_labels(known, {7: {"b": "c"}}, mood("c", "x"))
    assert known == {"7": {"a": "c", "b": "c"}}
    # A label with its former name means the same label.
    assert follow_labels(known, {}, mood("c", "x", "a")) == {"7": {"b": "c"}}
    assert follow_labels(known, {7: {"c": "a"}}, mood("a", "b")) == {"7": {"c": "a"}}
