"""Proofs that the keys of two tables differ."""

import pytest

from streamer.commands.check.disjoint_key_findings import IntegerKeys


@pytest.mark.parametrize(
    ("one", "other", "may_meet"),
    [
        (IntegerKeys(1, 10), IntegerKeys(11, 20), False),
        (IntegerKeys(1, 10), IntegerKeys(10, 20), True),
        (IntegerKeys(1, 9, 2, 9), IntegerKeys(2, 10, 2, 10), False),
        (IntegerKeys(1, 9, 2, 9), IntegerKeys(3, 11, 2, 11), True),
        (IntegerKeys(1, 9, 2, 9), IntegerKeys(2, 10, 3, 10), True),
        (IntegerKeys(1, 9, 2, 9), IntegerKeys(2, 9, 2, 10), True),
        (IntegerKeys(1, 1, 1, 1), IntegerKeys(1, 1, 1, 1), True),
    ],
)
def test_ranges_and_steps_prove_that_keys_differ(
    one: IntegerKeys, other: IntegerKeys, may_meet: bool
) -> None:
    assert one.may_meet(other) is may_meet
    assert other.may_meet(one) is may_meet
