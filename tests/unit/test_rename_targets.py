"""Which renamed tables a relation follows, and by which statements."""

from dataclasses import replace

import pytest

from streamer.mapping.relation_names import RelationName, parse_name, parse_relation, parse_target
from streamer.mapping.rename_targets import (
    Following,
    Obstacle,
    Renamed,
    RenameTargets,
    Verdicts,
    follow,
    groups,
    judge,
    rename_all_sql,
    rename_sql,
)
from streamer.mapping.row_sid import SidTemplate
from streamer.mapping.rule_options import ON_DDL_DEFAULT, DdlKind, OnDdl
from streamer.mapping.rules import RelationMapping, SourceMapping, TableRule
from streamer.postgres.secret import Secret
from streamer.runtime.guards.reconcile import renamed
from streamer.source.slot_and_publications.publication import (
    Member,
    Publication,
    WantedMembers,
    publication_changes,
)
from tests.unit.build import source_mapping, table_rule

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
    found = follow(source(*rules), move(1, FORMER, parse_name(now)), "public")
    assert isinstance(found, RelationMapping)
    assert (str(found.source), str(found.target)) == (now, target)


@pytest.mark.parametrize(
    ("rules", "now", "problem"),
    [
        (("a_1",), "public.a_2", "no rule matches the new name"),
        (("a_*",), "public.b", "no rule matches the new name"),
    ],
)
def test_otherwise_the_hint_has_the_rule_to_write(
    rules: tuple[str, ...], now: str, problem: str
) -> None:
    found = follow(source(*rules), move(1, FORMER, parse_name(now)), "public")
    assert isinstance(found, Obstacle)
    assert found.problem == problem
    assert f"{{'{now}': {{target: 'public.a_1'}}}}" in found.hint


@pytest.mark.parametrize("reaction", [OnDdl.STOP, OnDdl.IGNORE])
def test_a_target_is_renamed_only_with_apply(reaction: OnDdl) -> None:
    now = RelationName("public", "a_2")
    found = follow(source("a_*", rename=reaction), move(1, FORMER, now), "public")
    assert isinstance(found, Obstacle)
    assert "rename_table" in found.problem
    same = follow(source("a_*", rename=reaction), Renamed(1, FORMER, now, now), "public")
    assert isinstance(same, RelationMapping)


def test_the_publication_has_the_new_name_of_a_table() -> None:
    members = {RelationName("s", "b"): Member("7"), RelationName("public", "c"): Member("8")}
    publication = Publication("p", "1.2", True, frozenset(), True, members=members)
    marks = {FORMER: "1.2/7", RelationName("public", "c"): "1.2/8", RelationName("x", "y"): None}
    assert renamed(marks, [publication]) == {FORMER: RelationName("s", "b")}
    other = replace(publication, fingerprint="1.3")  # replaced, so changes may be missing
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


A_B, B_A, B_C, C_D = move(1, A, B), move(2, B, A), move(3, B, C), move(4, C, D)
PLAIN = RenameTargets(True, False, False, False, False)
TAKEN = replace(PLAIN, is_taken=True)
BARE = replace(PLAIN, is_bare=True)
FOLLOWS, STAYS = "renames its target", "follows, and its target stays"
Facts = RenameTargets | tuple[RelationName, RenameTargets] | None

CASES: dict[str, tuple[dict[Renamed, Facts], list[RelationName], list[str]]] = {
    # The name: the renamed tables with their facts, the names of all relations, the verdicts.
    # Without facts no rule has the new name. A target with a different name precedes the facts.
    "a free name": ({A_B: PLAIN}, [A], [FOLLOWS]),
    "the same target as before": ({A_B: (A, PLAIN)}, [A], [STAYS]),
    "a target in the bookkeeping": (
        {A_B: (RelationName("streamer", "b"), PLAIN)},
        [A],
        ["in the schema of the bookkeeping"],
    ),
    "a target of other sources": (
        {A_B: replace(PLAIN, is_shared=True)},
        [A],
        ["other sources write to its target"],
    ),
    "a taken target": ({A_B: TAKEN}, [A], ["the target has such a table"]),
    "a name of another relation": ({A_B: PLAIN}, [A, B], ["streamer already replicates a table"]),
    "a name whose relation gives way": (
        {A_B: replace(PLAIN, has_bare_successor=True)},
        [A, B],
        [FOLLOWS],
    ),
    # -- the target has no table yet
    "no rows": ({A_B: BARE}, [A], [FOLLOWS]),
    "no target": ({A_B: replace(BARE, target_exists=False)}, [A], [STAYS]),
    "no rows, and a taken target": ({A_B: replace(BARE, is_taken=True)}, [A], [STAYS]),
    "no rows, and a shared target": ({A_B: replace(BARE, is_shared=True)}, [A], [STAYS]),
    # -- several tables
    "an exchange": ({A_B: TAKEN, B_A: TAKEN}, [A, B], [FOLLOWS, FOLLOWS]),
    "a row": ({A_B: TAKEN, B_C: PLAIN}, [A, B], [FOLLOWS, FOLLOWS]),
    "a row with a taken end": (
        {A_B: TAKEN, B_C: TAKEN},
        [A, B],
        ['"public.b" cannot be renamed either', "the target has such a table"],
    ),
    "a row whose end no rule names": (
        {A_B: TAKEN, B_C: None, C_D: PLAIN},
        [A, B, C],
        ['"public.b" cannot be renamed either', "no rule", FOLLOWS],
    ),
}


def test_a_table_whose_rows_would_get_another_sid_does_not_follow() -> None:
    """A renamed schema is another tenant."""
    rule = replace(table_rule("tenant_*.t", target="t"), sid=SidTemplate.parse("{schema}"))
    former, now = RelationName("tenant_a", "t"), RelationName("tenant_b", "t")
    moved = Renamed(1, former, A, now, sid="tenant_a")
    obstacle = follow(source_mapping(rules=[rule]), moved, "public")
    assert isinstance(obstacle, Obstacle)
    assert 'sid "tenant_a"' in obstacle.problem
    assert 'sid "tenant_b"' in obstacle.problem
    assert 'leave "tenant_a.t" and "tenant_b.t" out' in obstacle.hint
    # A rule for the new name has to keep the sid of the rows.
    away = replace(moved, now=RelationName("old", "t"))
    obstacle = follow(source_mapping(rules=[rule]), away, "public")
    assert isinstance(obstacle, Obstacle)
    assert "{'old.t': {target: 'public.a', sid: 'tenant_a'}}" in obstacle.hint
    shared = replace(away, sid=None, is_disjoint=True)
    obstacle = follow(source_mapping(rules=[rule]), shared, "public")
    assert isinstance(obstacle, Obstacle)
    assert "{'old.t': {target: 'public.a', keys: disjoint}}" in obstacle.hint
    kept = table_rule("old.t", target="a")
    obstacle = follow(source_mapping(rules=[rule, kept]), away, "public")
    assert isinstance(obstacle, Obstacle)
    assert "the new name would get no sid" in obstacle.problem


def verdicts_of(moves: dict[Renamed, Facts], known: list[RelationName]) -> Verdicts:
    rule = TableRule(parse_relation("*", "public"))
    ruled: dict[Renamed, RelationMapping | Obstacle] = {}
    targets = {}
    for renamed_table, facts in moves.items():
        target, own = facts if isinstance(facts, tuple) else (renamed_table.now, facts)
        if own is None:
            ruled[renamed_table] = Obstacle("no rule", "x")
        else:
            ruled[renamed_table] = RelationMapping(renamed_table.now, target, rule)
            targets[renamed_table] = own
    return judge(ruled, targets, known)


@pytest.mark.parametrize("name", CASES)
def test_each_renamed_table_has_its_verdict(name: str) -> None:
    moves, known, expected = CASES[name]
    verdicts = verdicts_of(moves, known)
    for renamed_table, words in zip(moves, expected, strict=True):
        match verdicts[renamed_table]:
            case Obstacle(problem):
                assert words in problem
            case Following(_, renames_target):
                assert words == (FOLLOWS if renames_target else STAYS)


def test_tables_that_use_names_of_each_other_follow_together() -> None:
    verdicts = verdicts_of({A_B: TAKEN, B_A: TAKEN, C_D: PLAIN}, [A, B, C])
    assert [set(group) for group in groups(verdicts)] == [{A_B, B_A}, {C_D}]


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
