"""Which sequence follows which, and how far ahead."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import TableType
from streamer.mapping.sequence_places import (
    MARGIN_STEPS,
    SequencePlace,
    SequenceRange,
    places,
    value_ahead,
)
from tests.unit.build import relation_mapping

MAX = 2**63 - 1


@dataclass(frozen=True)
class Sequence:
    name: RelationName
    owner: tuple[RelationName, str] | None = None


def name(text: str) -> RelationName:
    return RelationName("public", text)


def owned(table: str, column: str = "id") -> Sequence:
    return Sequence(name(f"{table}_{column}_seq"), (name(table), column))


def test_a_sequence_of_a_column_follows_that_column_through_the_mapping() -> None:
    mappings = [
        relation_mapping(source="public.a", target="x.b", columns={"id": "number"}),
        relation_mapping(source="public.h", table_type=TableType.HISTORY),
        relation_mapping(source="public.e", exclude=["id"]),
    ]
    plain = Sequence(RelationName("billing", "invoice"))
    found = places([owned("a"), owned("h"), owned("e"), owned("unmapped"), plain], mappings, "dw")
    assert found == {
        name("a_id_seq"): SequencePlace(RelationName("x", "b"), "number"),
        plain.name: SequencePlace(RelationName("dw", "invoice")),
    }


@pytest.mark.parametrize(
    ("value", "last", "expected"),
    [
        (10, None, 10 + MARGIN_STEPS),
        (10, 10, 10 + MARGIN_STEPS),
        (10, 10 + MARGIN_STEPS // 2, None),
        (11, 10 + MARGIN_STEPS // 2, 11 + MARGIN_STEPS),
        (10, 5000, None),
    ],
)
def test_a_sequence_moves_when_half_of_its_margin_is_used(
    value: int, last: int | None, expected: int | None
) -> None:
    assert value_ahead(value, 1, 0, SequenceRange(1, 1, MAX, last)) == expected


def test_a_sequence_that_another_increment_drives_cannot_follow() -> None:
    with pytest.raises(ValueError, match="opposite sign"):
        value_ahead(5, 1, 0, SequenceRange(-1, -MAX, -1, None))


def test_a_value_that_the_target_cannot_take_is_named() -> None:
    with pytest.raises(ValueError, match="the source is at 40000, outside the limits of"):
        value_ahead(40_000, 1, 0, SequenceRange(1, 1, 32767, 100))


@given(
    value=st.integers(1, MAX),
    increment=st.integers(1, 1000),
    drawn=st.integers(0, 10**6),
    maximum=st.integers(1, MAX),
    last=st.none() | st.integers(1, MAX),
    is_descending=st.booleans(),
)
def test_the_value_is_ahead_within_the_limits_and_never_goes_back(
    value: int, increment: int, drawn: int, maximum: int, last: int | None, is_descending: bool
) -> None:
    sign = -1 if is_descending else 1
    limits = (-maximum, -1) if is_descending else (1, maximum)
    if last is not None:
        last = min(last, maximum) * sign
    there = SequenceRange(increment * sign, *limits, last)
    if value > maximum:
        with pytest.raises(ValueError, match="outside the limits"):
            value_ahead(value * sign, increment * sign, drawn, there)
        return
    wanted = value_ahead(value * sign, increment * sign, drawn, there)
    if wanted is None:
        assert last is not None
        wanted = last
    assert there.minimum <= wanted <= there.maximum
    assert wanted * sign >= value
    assert last is None or wanted * sign >= last * sign
