"""Which renamed tables a relation follows, and by which statements."""

from dataclasses import replace

import pytest

from streamer.mapping.names import RelationName, parse_name, parse_relation, parse_target
from streamer.mapping.options import ON_DDL_DEFAULT, DdlKind, OnDdl
from streamer.mapping.renames import Obstacle, follow
from streamer.mapping.rules import RelationMapping, SourceMapping, TableRule
from streamer.postgres.secret import Secret
from streamer.runtime.reconcile import renamed
from streamer.runtime.renames import Following, Renamed, groups, rename_all_sql, rename_sql, settle
from streamer.source.publication import Member, Publication, WantedMembers, publication_changes

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
        (("a_1", "b"), "public.b", "public.b"),
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
    assert renamed(marks, [publication]) == {FORMER: RelationName("s", "b")}
    other = replace(publication, mark="1.3")  # it was replaced, and may have missed changes
    assert not renamed(marks, [other])


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
    changes = publication_changes(
        shop, WantedMembers(kept=frozenset({"5.1/7"})), publications, 18_00_00
    )
    assert changes.surplus[0] == f'{quoted} "public"."b"'
    assert changes.needed == []
    changes = publication_changes(shop, WantedMembers(), publications, 18_00_00)
    assert changes.surplus[0] == f'{quoted} "public"."a_9", only "public"."b"'


def names(text: str) -> list[RelationName]:
    return [RelationName("public", name) for name in text.split()]


A, B, C, D = names("a b c d")


def move(number: int, former: RelationName, now: RelationName) -> Renamed:
    return Renamed(number, former, former, now)


def step(name: RelationName, *, renames_target: bool = True) -> Following:
    rule = TableRule(parse_relation("*", "public"))
    return Following(RelationMapping(name, name, rule), renames_target)


def test_tables_may_take_the_names_of_each_other() -> None:
    moves = [move(1, A, B), move(2, B, A), move(3, C, D)]
    found: dict[int, Following | Obstacle] = {m.relation_id: step(m.now) for m in moves}
    assert settle(moves, found, [A, B, C], [A, B]) == found
    numbers = [sorted(m.relation_id for m in group) for group in groups(moves, found)]
    assert sorted(numbers) == [[1, 2], [3]]
    row = [move(1, A, B), move(2, B, C)]
    assert settle(row, found | {2: step(C)}, [A, B], [B])[1] == step(B)


def test_none_follows_to_a_name_that_stays_taken() -> None:
    moves = [move(1, A, B), move(2, B, C)]
    found: dict[int, Following | Obstacle] = {1: step(B), 2: Obstacle("no rule", "x")}
    settled = settle(moves, found, [A, B], [B])
    assert isinstance(settled[1], Obstacle)
    assert '"public.b" before cannot follow' in settled[1].problem
    taken = settle(moves, {1: step(B), 2: step(C)}, [A, B], [B, C])
    assert isinstance(taken[2], Obstacle)
    assert "the target has such a table" in taken[2].problem
    assert isinstance(taken[1], Obstacle)


def test_tables_move_aside_for_each_other() -> None:
    assert rename_all_sql([(A, B), (B, A)]) == [
        'alter table "public"."a" rename to "streamer renames 0"',
        'alter table "public"."b" rename to "streamer renames 1"',
        'alter table "public"."streamer renames 0" rename to "b"',
        'alter table "public"."streamer renames 1" rename to "a"',
    ]
    assert rename_all_sql([(A, B), (B, C)]) == [
        'alter table "public"."a" rename to "streamer renames 0"',
        'alter table "public"."b" rename to "c"',
        'alter table "public"."streamer renames 0" rename to "b"',
    ]
