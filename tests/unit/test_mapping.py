"""Rules name relations, and each relation has a single target."""

import copy
import json
import pickle
from dataclasses import replace

import pytest

from streamer.errors.error_classes import MappingError, Retry
from streamer.mapping.relation_names import (
    RelationName,
    RelationPattern,
    parse_name,
    parse_relation,
    parse_target,
)
from streamer.mapping.rules import (
    SourceMapping,
    TableRule,
    check_target,
    find_source,
    resolve,
    source_object_name,
    target_of,
)
from streamer.postgres.secret import Secret
from tests.unit.build import relation_mapping, source_mapping, table_rule


def exact(namespace: str, name: str) -> RelationPattern:
    return RelationPattern(namespace, name)


# ---- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("orders", exact("public", "orders")),
        ("sales.orders", exact("sales", "orders")),
        ("Sales.Orders", exact("Sales", "Orders")),
        ('"a.b"', exact("public", "a.b")),
        ('"a.b".c', exact("a.b", "c")),
        ('a."b.c"', exact("a", "b.c")),
        ('"a.b"."c.d"', exact("a.b", "c.d")),
        ('"say ""hi"""', exact("public", 'say "hi"')),
        ('a"b', exact("public", 'a"b')),
        ('"*"', exact("public", "*")),
        ('log."*"', exact("log", "*")),
        ("my table.x y", exact("my table", "x y")),
        ("a\nb", exact("public", "a\nb")),
        ("'; drop table t; --", exact("public", "'; drop table t; --")),
        ("*", RelationPattern("public", "*", name_is_pattern=True)),
        ("log.*", RelationPattern("log", "*", name_is_pattern=True)),
        ("*.*", RelationPattern("*", "*", True, True)),
        ("tenant_*.orders", RelationPattern("tenant_*", "orders", True, False)),
        ('"a.b".x*', RelationPattern("a.b", "x*", False, True)),
    ],
)
def test_a_name_is_read_as_postgresql_stores_it(text: str, expected: RelationPattern) -> None:
    assert parse_relation(text, "public") == expected


def test_a_table_without_schema_is_in_the_default_one() -> None:
    assert parse_relation("t", "my.schema") == exact("my.schema", "t")


@pytest.mark.parametrize("text", ["", ".", "a.", ".a", "a.b.c", "a..b", '"a.b"."c".d'])
def test_an_invalid_table_name_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(MappingError, match="is not a table name") as caught:
        parse_relation(text, "public")
    assert caught.value.retry is Retry.MANUAL
    assert 'goes in double quotes: "a.b"' in str(caught.value)


@pytest.mark.parametrize("text", ['"', '""', '"a', '"".a', 'a."', '"a"b', '"log.*', '"a""'])
def test_a_part_that_begins_with_a_quote_and_does_not_end_with_one_is_refused(text: str) -> None:
    with pytest.raises(MappingError, match="is not a table name"):
        parse_relation(text, "public")


@pytest.mark.parametrize("text", ["x" * 64, "é" * 32, f"{'s' * 64}.t", "a\0b"])
def test_a_name_that_postgresql_cannot_store_is_refused(text: str) -> None:
    with pytest.raises(MappingError, match="is not a table name"):
        parse_relation(text, "public")


def test_a_name_that_is_not_unicode_is_refused() -> None:
    """YAML can write a lone surrogate: ``"\\ud800"``."""
    with pytest.raises(MappingError, match="is not a table name"):
        parse_relation("\ud800", "public")


def test_63_bytes_are_a_name() -> None:
    assert parse_relation("é" * 31 + "x", "public").name == "é" * 31 + "x"


@pytest.mark.parametrize(
    ("name", "written"),
    [
        (RelationName("public", "orders"), "public.orders"),
        (RelationName("a.b", "c"), '"a.b".c'),
        (RelationName("a", '"'), 'a.""""'),
        (RelationName("a", "*"), 'a."*"'),
        (RelationName("a", 'b"c'), 'a.b"c'),
        (RelationName("a", 'b".c'), 'a."b"".c"'),
    ],
)
def test_a_name_is_quoted_only_where_it_must_be(name: RelationName, written: str) -> None:
    assert str(name) == written
    assert parse_name(written) == name


def test_a_pattern_is_printed_as_it_is_written() -> None:
    for text in ("log.*", '"a.b".x*', "*.orders", '*."a.b"'):
        assert str(parse_relation(text, "public")) == text


def test_a_star_stands_for_any_characters_and_other_signs_for_themselves() -> None:
    pattern = parse_relation("a+b.x*y", "public")
    assert pattern.matches(RelationName("a+b", "xy"))
    assert pattern.matches(RelationName("a+b", "x\n.y"))
    assert not pattern.matches(RelationName("aab", "xy"))
    assert not pattern.matches(RelationName("a+b", "xyz"))
    assert not pattern.matches(RelationName("a+b", "zxy"))


# ---- resolving ---------------------------------------------------------------------------------


def source(*rules: TableRule) -> SourceMapping:
    return source_mapping("shop", "eu", rules)


def resolved(mapping: SourceMapping, *relations: str) -> dict[str, str]:
    found = resolve(mapping, map(parse_name, relations), "public")
    return {str(item.source): str(item.target) for item in found}


def test_a_table_goes_under_its_own_name_into_the_default_schema() -> None:
    assert resolved(source(table_rule("sales.orders")), "sales.orders", "sales.other") == {
        "sales.orders": "public.orders"
    }


def test_an_exact_rule_beats_a_pattern() -> None:
    special, general = table_rule("log.a", target="kept.a"), table_rule("log.*", target="all.*")
    for rules in ((special, general), (general, special)):
        mapped = resolve(
            source(*rules), [RelationName("log", "b"), RelationName("log", "a")], "public"
        )
        assert [item.rule for item in mapped] == [special, general]
        assert [str(item.target) for item in mapped] == ["kept.a", "all.b"]


def test_two_patterns_that_claim_one_table_are_refused_by_name() -> None:
    mapping = source(table_rule("log.*"), table_rule("*.events"))
    with pytest.raises(MappingError) as caught:
        resolved(mapping, "log.events")
    for part in ('"log.*"', '"*.events"', '"log.events"', '"shop:eu"'):
        assert part in caught.value.message
    assert resolved(mapping, "log.other", "app.events") == {
        "log.other": "public.other",
        "app.events": "public.events",
    }


def test_an_exact_rule_decides_where_two_patterns_match() -> None:
    mapping = source(table_rule("log.*"), table_rule("*.events"), table_rule("log.events"))
    assert resolved(mapping, "log.events") == {"log.events": "public.events"}


def test_no_pattern_matches_an_excluded_table_but_an_exact_name_does() -> None:
    mapping = replace(
        source(table_rule("*.*", target="*.*"), table_rule("bi.kept")),
        exclude_tables=tuple(parse_relation(name, "public") for name in ("bi.*", "*.tmp_*", "t")),
    )
    names = ("public.a", "public.t", "bi.kept", "bi.other", "s.tmp_1", "s.tmp")
    assert resolved(mapping, *names) == {
        "public.a": "public.a",
        "bi.kept": "public.kept",
        "s.tmp": "s.tmp",
    }
    # Two patterns that claim a table which is left out contradict each other no longer.
    both = replace(mapping, rules=(table_rule("bi.*", target="b.*"), *mapping.rules))
    assert "bi.other" not in resolved(both, "bi.other", "bi.kept")


def test_a_rule_for_a_table_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        MappingError, match=r'table "public\.orders" does not exist at source "shop:eu"'
    ):
        resolved(source(table_rule("orders")), "public.order", "sales.orders")


def test_a_rule_for_the_former_name_of_a_table_claims_nothing() -> None:
    mapping = source(table_rule("orders"), table_rule("bookings", target="orders"))
    assert resolved(mapping, "public.bookings") == {"public.bookings": "public.orders"}
    with pytest.raises(MappingError, match="would both be written"):
        resolved(mapping, "public.bookings", "public.orders")


def test_a_pattern_may_match_nothing() -> None:
    assert resolved(source(table_rule("log.*")), "public.t") == {}


def test_two_tables_for_one_target_are_refused() -> None:
    mapping = source(table_rule("a.t"), table_rule("b.t"))
    with pytest.raises(MappingError) as caught:
        resolved(mapping, "a.t", "b.t")
    for part in ('"a.t"', '"b.t"', '"public.t"'):
        assert part in caught.value.message
    assert "`target`" in str(caught.value)


def test_two_tables_of_one_pattern_for_one_target_are_refused() -> None:
    with pytest.raises(MappingError, match="would both be written"):
        resolved(source(table_rule("*.t")), "a.t", "b.t")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("*.*", "log.events"),
        ("archive.*", "archive.events"),
        ("archive.old_*", "archive.old_events"),
        ("old_*", "public.old_events"),
        ("*.one", "log.one"),
        ("a.*_*", "a.events_events"),
    ],
)
def test_a_star_in_a_target_is_the_tables_own_name(target: str, expected: str) -> None:
    mapping = source(table_rule("log.*", target=target))
    assert resolved(mapping, "log.events") == {"log.events": expected}


def test_a_star_in_a_tables_own_name_is_not_replaced_again() -> None:
    mapping = source(table_rule("log.*", target="archive.*"))
    assert resolved(mapping, 'log."a*b"') == {'log."a*b"': 'archive."a*b"'}


def test_tables_come_once_and_in_order_of_name() -> None:
    mapping = source(table_rule("public.*"))
    found = resolve(mapping, map(parse_name, ["c", "a", "b", "a"]), "public")
    assert [item.source.name for item in found] == ["a", "b", "c"]


# ---- columns -----------------------------------------------------------------------------------


def test_columns_are_renamed_excluded_or_kept() -> None:
    mapping = relation_mapping(columns={"id": "item_id", "name": "name"}, exclude=["secret"])
    assert mapping.target_column("id") == "item_id"
    assert mapping.target_column("secret") is None
    assert mapping.target_column("other") == "other"
    assert mapping.is_optional("other")
    assert not mapping.is_optional("id")
    assert not relation_mapping().is_optional("id")


# ---- names on a source -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("database", "sid", "expected"),
    [
        ("shop", None, "streamer_shop"),
        ("shop", "eu", "streamer_shop_eu"),
        ("Shop-1", "EU.west", "streamer_shop_1_eu_west"),
        ("café", "*", "streamer_caf___"),
        ("x" * 54, None, "streamer_" + "x" * 54),
    ],
)
def test_a_slot_is_named_after_database_and_sid(
    database: str, sid: str | None, expected: str
) -> None:
    assert source_object_name(database, sid) == expected


def test_a_name_that_is_too_long_ends_in_a_hash_of_the_whole() -> None:
    names = {source_object_name("x" * 55 + tail, "eu") for tail in ("a", "b", "A")}
    assert len(names) == 3
    assert {len(name) for name in names} == {63}
    assert {name[:54] for name in names} == {"streamer_" + "x" * 45}


def test_the_suffix_survives_and_the_names_stay_apart() -> None:
    for length in range(40, 70):
        mapping = source_mapping("x" * length, "eu")
        assert len(mapping.publication_inserts) <= 63
        assert mapping.publication_inserts.endswith("_ins")
        assert mapping.publication_inserts != mapping.publication == mapping.slot


def test_a_source_is_called_by_database_and_sid() -> None:
    assert source_mapping("shop").label == "shop"
    assert source_mapping("shop", "eu").label == "shop:eu"


# ---- secrets -----------------------------------------------------------------------------------


def test_a_secret_is_never_printed() -> None:
    secret = Secret("postgresql://u:hunter2@h/d")
    mapping = SourceMapping("shop", None, secret, ())
    shown = [
        repr(secret),
        str(secret),
        f"{secret}",
        f"{secret!r:>50}",
        "%s %r" % (secret, secret),  # noqa: UP031
        repr([secret]),
        repr({"url": secret}),
        repr(mapping),
        str(mapping),
        repr(ValueError(secret)),
    ]
    assert not any("hunter2" in text for text in shown)
    with pytest.raises(TypeError) as caught:
        json.dumps(secret)
    assert "hunter2" not in str(caught.value)
    assert secret.reveal() == "postgresql://u:hunter2@h/d"


def test_secrets_are_compared_by_value() -> None:
    assert Secret("a") == Secret("a")
    assert hash(Secret("a")) == hash(Secret("a"))
    assert Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert copy.copy(Secret("a")) == pickle.loads(pickle.dumps(Secret("a"))) == Secret("a")


def test_no_table_is_written_to_the_bookkeeping() -> None:
    source = source_mapping(rules=[table_rule("public.t", target="streamer.relation")])
    with pytest.raises(MappingError, match="bookkeeping"):
        resolve(source, [parse_name("public.t")], "public")


def test_a_source_is_found_by_its_two_names_and_not_by_its_label() -> None:
    colon = source_mapping(database="a:b", sid=None)
    pair = source_mapping(database="a", sid="b")
    assert colon.label == pair.label == "a:b"
    assert find_source([colon, pair], "a", "b") is pair
    assert find_source([colon, pair], "a:b", None) is colon
    assert find_source([colon, pair], "a", None) is None


# ---- templates ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("{database}_{schema}.{table}", exact("shop_a b", "{table}")),
        ("{sid}.*", exact("eu", "{table}")),
        ("{database}.x_{table}_{sid}", exact("shop", "x_{table}_eu")),
        ("{table}", exact("public", "{table}")),
        ('"{sid}"."{table}"', exact("{sid}", "{table}")),
        ("{other}.{TABLE}", exact("{other}", "{TABLE}")),
        ("*.*", exact("a b", "{table}")),
    ],
)
def test_a_target_is_filled_once_with_the_names_of_the_source(
    target: str, expected: RelationPattern
) -> None:
    rule = TableRule(parse_relation('"a b"."{table}"', "public"), parse_target(target, "public"))
    source = source_mapping(database="shop", sid="eu")
    found = target_of(source, rule, RelationName("a b", "{table}"), "public")
    assert (found.namespace, found.name) == (expected.namespace, expected.name)


def test_a_target_needs_a_sid_if_it_has_one_and_a_name_that_fits() -> None:
    rule = TableRule(parse_relation("t", "public"), parse_target("{sid}.t", "public"))
    with pytest.raises(MappingError, match="has no sid"):
        target_of(source_mapping(sid=None), rule, RelationName("public", "t"), "public")
    long = TableRule(parse_relation("t", "public"), parse_target("{sid}{sid}.t", "public"))
    with pytest.raises(MappingError, match="63 bytes"):
        target_of(source_mapping(sid="x" * 40), long, RelationName("public", "t"), "public")


@pytest.mark.parametrize(
    ("pattern", "target", "is_fine"),
    [
        ("log.*", "{schema}.{table}", True),
        ("log.*", "{table}.rows", True),
        ("log.*", "{schema}.all", False),
        ("tenant_*.orders", "{schema}.orders", True),
        ("tenant_*.orders", "all.orders_{database}", False),
        ("orders", "{database}.orders", True),
        ("orders", "all.*", False),
    ],
)
def test_each_table_of_a_pattern_has_a_target(pattern: str, target: str, is_fine: bool) -> None:
    rule, parsed = parse_relation(pattern, "public"), parse_target(target, "public")
    if is_fine:
        check_target(rule, parsed)
    else:
        with pytest.raises(MappingError):
            check_target(rule, parsed)
