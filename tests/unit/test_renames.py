"""Which renamed tables a relation follows, and by which statements."""

from dataclasses import replace

import pytest

from streamer.mapping.renames import Obstacle, follow
from streamer.mapping.rules import (
    ON_DDL_DEFAULT,
    DdlKind,
    OnDdl,
    RelationMapping,
    RelationName,
    SourceMapping,
    TableRule,
    parse_name,
    parse_relation,
    parse_target,
)
from streamer.postgres.secret import Secret
from streamer.runtime.renames import rename_sql, renamed
from streamer.source.publication import Member, Publication, publication_changes

FORMER = RelationName("public", "a_1")


def source(*rules: str, rename: OnDdl = OnDdl.APPLY) -> SourceMapping:
    """Make a source with rules, each ``pattern`` or ``pattern > target``."""
    made = []
    for rule in rules:
        pattern, _, target = rule.partition(" > ")
        there = parse_target(target, "public") if target else None
        made.append(TableRule(parse_relation(pattern, "public"), target=there))
    on_ddl = dict(ON_DDL_DEFAULT) | {DdlKind.RENAME_TABLE: rename}
    return SourceMapping("shop", None, Secret("postgresql://"), tuple(made), on_ddl=on_ddl)


@pytest.mark.parametrize(
    ("rules", "now", "target"),
    [
        (("a_*",), "public.a_2", "public.a_2"),
        (("a_*", "b > a_1"), "public.b", "public.a_1"),
        (("a_*", "s.* > s.*"), "s.x", "s.x"),
        (("a_1", "a_2 > a_1"), "public.a_2", "public.a_1"),
    ],
)
def test_a_relation_follows_where_a_rule_gives_a_target(
    rules: tuple[str, ...], now: str, target: str
) -> None:
    found = follow(source(*rules), FORMER, FORMER, parse_name(now), "public")
    assert isinstance(found, RelationMapping)
    assert (str(found.source), str(found.target)) == (now, target)


@pytest.mark.parametrize(
    ("rules", "now", "problem"),
    [
        (("a_1",), "public.a_2", "no rule names the table now"),
        (("a_*",), "public.b", "no rule names the table now"),
        (("a_1", "b"), "public.b", 'the rule of "public.b" has another target, "public.b"'),
    ],
)
def test_otherwise_the_hint_has_the_rule_to_write(
    rules: tuple[str, ...], now: str, problem: str
) -> None:
    found = follow(source(*rules), FORMER, FORMER, parse_name(now), "public")
    assert isinstance(found, Obstacle)
    assert found.problem == problem
    assert f"{{'{now}': {{target: 'public.a_1'}}}}" in found.hint


@pytest.mark.parametrize("reaction", [OnDdl.STOP, OnDdl.IGNORE])
def test_a_target_is_renamed_only_with_apply(reaction: OnDdl) -> None:
    now = RelationName("public", "a_2")
    found = follow(source("a_*", rename=reaction), FORMER, FORMER, now, "public")
    assert isinstance(found, Obstacle)
    assert "rename_table" in found.problem
    same = follow(source("a_*", rename=reaction), FORMER, now, now, "public")
    assert isinstance(same, RelationMapping)


def test_the_publication_has_the_new_name_of_a_table() -> None:
    members = {RelationName("s", "b"): Member("7"), RelationName("public", "c"): Member("8")}
    publication = Publication("p", "1.2", True, frozenset(), True, members=members)
    marks = {FORMER: "1.2/7", RelationName("public", "c"): "1.2/8", RelationName("x", "y"): None}
    present = [RelationName("public", "c"), RelationName("s", "b")]
    assert renamed(marks, [publication], present) == {FORMER: RelationName("s", "b")}
    other = replace(publication, mark="1.3")  # it was replaced, and may have missed changes
    assert not renamed(marks, [other], present)


def test_a_target_table_gets_schema_and_name() -> None:
    assert rename_sql(FORMER, FORMER) == []
    assert rename_sql(FORMER, RelationName("s", 'b"')) == [
        'create schema if not exists "s"',
        'alter table "public"."a_1" set schema "s"',
        'alter table "s"."a_1" rename to "b"""',
    ]


def test_a_member_whose_mark_a_relation_knows_stays_under_its_new_name() -> None:
    shop = source("a_*")
    members = {RelationName("public", "a_9"): Member("7"), RelationName("public", "b"): Member("8")}
    publications = {
        name: Publication(name, "5.1", True, frozenset(), True, members=members)
        for name in (shop.publication, shop.publication_inserts)
    }
    quoted = f'alter publication "{shop.publication}" drop table only'
    changes = publication_changes(shop, [], publications, 18_00_00, kept={"5.1/7"})
    assert changes.surplus[0] == f'{quoted} "public"."b"'
    assert changes.needed == []
    changes = publication_changes(shop, [], publications, 18_00_00)
    assert changes.surplus[0] == f'{quoted} "public"."a_9", only "public"."b"'
