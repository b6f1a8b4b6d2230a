"""The sid of a table's rows: a text with parts of the table's name."""

from dataclasses import replace

import pytest

from streamer.errors.error_classes import MappingError
from streamer.mapping.relation_names import parse_name
from streamer.mapping.row_sid import SidTemplate
from streamer.mapping.rules import SourceMapping, TableRule, check_target, resolve, resolve_new
from tests.unit.build import source_mapping, table_rule


def rule(pattern: str, sid: str, target: str | None = None) -> TableRule:
    return replace(table_rule(pattern, target=target), sid=SidTemplate.parse(sid))


def sids(source: SourceMapping, *names: str) -> list[tuple[str, str | None]]:
    mappings = resolve(source, [parse_name(name) for name in names], "public")
    return [(str(mapping.target), mapping.sid) for mapping in mappings]


@pytest.mark.parametrize(
    ("text", "sid"),
    [
        ("{schema}", "tenant_a"),
        ("{schema:tenant_(.*)}", "a"),
        ("{schema:(?:tenant|site)_(.{1,3})}", "a"),
        ("{table}", "orders"),
        ("{table:(.)rders}", "o"),
        ("{database}/{sid}-{schema:tenant_(.*)}", "shop/eu-a"),
        ("one", "one"),
    ],
)
def test_a_sid_takes_parts_of_the_names(text: str, sid: str) -> None:
    source = source_mapping("shop", "eu", [rule("tenant_*.orders", text, "orders")])
    assert sids(source, "tenant_a.orders") == [("public.orders", sid)]


def test_without_a_sid_of_the_table_its_rows_have_the_sid_of_the_url() -> None:
    assert sids(source_mapping("shop", "eu", [table_rule("t")]), "public.t") == [("public.t", "eu")]
    assert sids(source_mapping(rules=[table_rule("t")]), "public.t") == [("public.t", None)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{schema", "is not closed"),
        ("{name}", "is not a placeholder"),
        ("{database:(.*)}", "is not a placeholder"),
        ("{schema:(}", "is not closed|not a valid regular expression"),
        ("{schema:[}", "not a valid regular expression"),
        ("{schema:tenant_.*}", "0 groups"),
        ("{schema:(a)(b)}", "2 groups"),
        ("a\0b", "is not a sid"),
    ],
)
def test_a_faulty_sid_is_refused(text: str, problem: str) -> None:
    with pytest.raises(MappingError, match=problem) as caught:
        SidTemplate.parse(text)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["other.orders", "tenant_.orders", "my_tenant_a.orders"])
def test_a_name_has_to_match_as_a_whole_and_the_part_must_not_be_empty(name: str) -> None:
    source = source_mapping(rules=[rule("*.orders", "{schema:tenant_(.*)}", "orders")])
    with pytest.raises(
        MappingError, match=f'table "{name}" of source "shop": .* matches'
    ) as caught:
        sids(source, name)
    assert "narrow the name of the rule" in str(caught.value)


def test_a_sid_of_a_url_without_a_sid_is_refused() -> None:
    source = source_mapping(rules=[rule("t", "{sid}")])
    with pytest.raises(MappingError, match="the url has no sid"):
        sids(source, "public.t")


def test_tables_of_a_source_share_a_target_if_their_rows_have_different_sids() -> None:
    rules = [rule("tenant_*.*", "{schema:tenant_(.).*}")]
    source = source_mapping(rules=rules)
    names = ("tenant_a.orders", "tenant_b.orders", "tenant_b.items")
    assert sids(source, *names) == [
        ("public.orders", "a"),
        ("public.items", "b"),
        ("public.orders", "b"),
    ]
    with pytest.raises(MappingError, match=r'would both be written to .* with sid "a"'):
        sids(source, "tenant_a1.orders", "tenant_a2.orders")


def test_a_new_table_without_a_place_stops_no_table_that_streams() -> None:
    source = source_mapping(rules=[rule("*.orders", "{schema:tenant_(.).*}", "orders")])
    known = [parse_name(f"tenant_{sid}.orders") for sid in "bx"]
    new = [parse_name(name) for name in ("tenant_a.orders", "other.orders", "tenant_b1.orders")]
    mapped, refused = resolve_new(source, known, [*new, *known], "public")
    assert [mapping.sid for mapping in mapped] == ["a", "b", "x"]
    assert "other.orders" in str(refused)
    assert resolve_new(source, known, known, "public")[1] is None
    # A table in sync whose sid is gone, or that is given twice, is not the mistake of another
    # program.
    for names in (["other.orders"], ["tenant_b.orders", "tenant_b1.orders"], []):
        with pytest.raises(MappingError):
            resolve_new(source, [parse_name(name) for name in names], [*new, *known], "public")


@pytest.mark.parametrize(
    ("pattern", "sid", "fits"),
    [
        ("tenant_*.orders", "{schema}", True),
        ("tenant_*.orders", "{table}", False),
        ("events_*", "{table}", True),
        ("events_*", "{schema}", False),
        ("tenant_*.*", "{schema}", False),
        ("tenant_*.*", "{schema}_{table}", True),
    ],
)
def test_a_sid_lets_several_tables_go_into_one_if_it_tells_them_apart(
    pattern: str, sid: str, fits: bool
) -> None:
    source_rule = rule(pattern, sid, "orders")
    assert source_rule.target is not None
    if fits:
        check_target(source_rule.pattern, source_rule.target, source_rule.sid)
        return
    with pytest.raises(MappingError, match="would write several tables into"):
        check_target(source_rule.pattern, source_rule.target, source_rule.sid)
