"""Which columns of existing rows a changed `set` makes wrong."""

from streamer.mapping.expressions import parse_expression
from streamer.mapping.recomputed_columns import Recomputed, recomputed
from streamer.mapping.relation_names import RelationName, RelationPattern
from streamer.mapping.rules import RelationMapping, TableRule

NAME = RelationName("public", "t")
COLUMNS = ("id", "email", "name")


def mapping(condition: str | None = None, **values: str) -> RelationMapping:
    rule = TableRule(
        RelationPattern("public", "t"),
        filter=None if condition is None else parse_expression(condition),
        set=tuple((name, parse_expression(text)) for name, text in values.items()),
    )
    return RelationMapping(NAME, NAME, rule)


def mark(condition: str | None = None, **values: str) -> str | None:
    return mapping(condition, **values).rule.expressions_fingerprint


def test_a_new_and_a_changed_expression_bring_their_columns() -> None:
    now = mapping(email="md5(email)", extra="upper(name)")
    assert recomputed(None, now, COLUMNS) == Recomputed(("email", "extra"), ())
    before = mark(email="email", extra="upper(name)")
    assert recomputed(before, now, COLUMNS) == Recomputed(("email",), ())
    assert recomputed(now.rule.expressions_fingerprint, now, COLUMNS) == Recomputed((), ())


def test_a_removed_one_brings_the_sources_column_if_there_is_one() -> None:
    before = mark(email="md5(email)", extra="upper(name)")
    assert recomputed(before, mapping(extra="upper(name)"), COLUMNS) == Recomputed(
        # `extra` too: an expression may have read the column from the target.
        ("extra", "email"),
        ("email",),
    )
    assert recomputed(before, mapping(email="md5(email)"), COLUMNS) == Recomputed((), ())


def test_another_filter_needs_all_columns() -> None:
    assert recomputed(mark("id > 1"), mapping("id > 2"), COLUMNS) is None
    assert recomputed(mark("id > 1"), mapping("id > 1", name="'x'"), COLUMNS) == Recomputed(
        ("name",), ()
    )
    assert recomputed(mark("id > 1"), mapping(), COLUMNS) is None
