"""Which copy brings the rows of an attached partition."""

import pytest

from streamer.control.resync_options import Mode, Resync, RowScope
from streamer.copy.attached_rows import resync_of
from streamer.mapping.relation_names import RelationName, parse_relation
from streamer.mapping.rules import RelationMapping, TableRule

NAME = RelationName("public", "p")
RANGE = "((id IS NOT NULL) AND (id >= 1) AND (id < 9))"
HASH = "satisfies_hash_partition('16404'::oid, 2, 0, id)"


def mapping(exclude: frozenset[str] = frozenset()) -> RelationMapping:
    return RelationMapping(NAME, NAME, TableRule(parse_relation("p", "public"), exclude=exclude))


def test_bounds_name_the_rows_to_bring() -> None:
    wanted = Resync(Mode.DIFF, scope=RowScope((RANGE, "(id = 9)")))
    assert resync_of(mapping(), [RANGE, "(id = 9)"]) == wanted


@pytest.mark.parametrize("bounds", [[HASH], [RANGE, None], [RANGE, HASH]])
def test_bounds_that_the_target_cannot_judge_compare_all_rows(bounds: list[str | None]) -> None:
    assert resync_of(mapping(), bounds) == Resync(Mode.DIFF)


def test_bounds_of_a_column_that_the_target_lacks_compare_all_rows() -> None:
    assert resync_of(mapping(frozenset({"id"})), [RANGE]) == Resync(Mode.DIFF)
