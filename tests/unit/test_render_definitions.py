"""What the target cannot have is planned with the reason, and names are found in deparsed SQL."""

from dataclasses import replace
from typing import Any

import pytest

from streamer.mapping.expressions import parse_expression
from streamer.mapping.relation_names import RelationName, RelationPattern
from streamer.mapping.rule_options import Create, TableType
from streamer.mapping.rules import ColumnHash, RelationMapping, TableRule
from streamer.postgres.secret import Secret
from streamer.schema.columns_in_expressions import UnclearExpressionError, rename_columns
from streamer.schema.indexes_constraints_types import (
    ConstraintDefinition,
    IndexDefinition,
    IndexKey,
)
from streamer.schema.planned_definition import Planned, TargetLimits, TargetPlace
from streamer.schema.render_definitions import Renderer, other_name
from streamer.schema.source_definition import DefinedColumn
from streamer.schema.table_definition import TableDefinition

NAMES = {"year": "Y", "at": "when", "name": "n", "a b": "c", "text": "t", "zone": "z"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(year > 3)", '("Y" > 3)'),
        ("lower((name)::text)", 'lower(("n")::text)'),
        ("EXTRACT(year FROM at)", 'EXTRACT(year FROM "when")'),
        ("(at AT TIME ZONE zone)", '("when" AT TIME ZONE "z")'),
        ("\"a b\" || 'year \"a b\" it''s' || E'\\\\''name'", None),
        ("text(name) = public.name(year)", 'text("n") = public.name("Y")'),
        ("((row_).name)", "((row_).name)"),
        ("(year)::timestamp without time zone", '("Y")::timestamp without time zone'),
        ('(name COLLATE "C")', '("n" COLLATE "C")'),
        ("make_interval(secs => year)", 'make_interval(secs => "Y")'),
        ("(year OPERATOR(public.=) ANY (ARRAY[1]))", '("Y" OPERATOR(public.=) ANY (ARRAY[1]))'),
        ("xmlserialize(CONTENT name AS text)", 'xmlserialize(CONTENT "n" AS text)'),
    ],
)
def test_columns_are_renamed_and_nothing_else(text: str, expected: str | None) -> None:
    expected = expected or "\"c\" || 'year \"a b\" it''s' || E'\\\\''name'"
    assert rename_columns(text, NAMES) == expected


def test_an_expression_with_a_whole_row_is_unclear() -> None:
    with pytest.raises(UnclearExpressionError):
        rename_columns("(t.* IS NOT NULL)", {"a": "a"})


T, OTHER = RelationName("public", "t"), RelationName("public", "other")


def place(
    name: RelationName = T,
    type: TableType = TableType.CLONE,
    *,
    has_sid: bool = True,
    exclude: str = "",
    filter: str | None = None,
    copy_where: str | None = None,
    set: str | None = None,
    hashed: str = "",
) -> TargetPlace:
    rule = TableRule(
        RelationPattern(name.namespace, name.name),
        type=type,
        exclude=frozenset(exclude.split()),
        filter=None if filter is None else parse_expression(filter),
        copy_where=None if copy_where is None else parse_expression(copy_where),
        set=() if set is None else ((set, parse_expression("'x'")),),
        hashes=tuple(ColumnHash(c, c, "people", "0", Secret("k")) for c in hashed.split()),
    )
    return TargetPlace(RelationMapping(name, name, rule), has_sid)


def index(name: str, *keys: IndexKey, **more: Any) -> IndexDefinition:
    return IndexDefinition(1, name, method="btree", keys=keys, **more)


def constraint(
    kind: str, name: str, definition: str, *columns: str, **more: Any
) -> ConstraintDefinition:
    return ConstraintDefinition(2, kind, name, definition=definition, columns=columns, **more)


DEFINITION = TableDefinition(
    T,
    tuple(DefinedColumn(n, name, "int4") for n, name in enumerate("abc")),
    (
        index("lower_b", IndexKey(None, "lower(b)"), is_unique=True, uses=frozenset("b")),
        index("half", IndexKey("c"), is_valid=False),
        constraint("u", "t_a_key", "UNIQUE (a)", "a", index=index("t_a_key", IndexKey("a"))),
        constraint("c", "c_ok", "CHECK (c > 0)", "c", expression="(c > 0)"),
        constraint(
            *("f", "fk", "FOREIGN KEY (b) REFERENCES other(id)", "b"),
            referenced=OTHER,
            referenced_columns=("id",),
            on_delete="n",
        ),
    ),
)


def plan(
    here: TargetPlace, there: TargetPlace | None = None, definition: TableDefinition = DEFINITION
) -> dict[str, Planned]:
    planned = Renderer(definition, here, {OTHER: there}.get).plan(Create.ALL)
    return {each.name: each for each in planned}


def test_reasons_name_the_objects_that_the_target_lacks() -> None:
    assert {n: p.reason for n, p in plan(place(exclude="b")).items()} == {
        "lower_b": 'the target does not get column "b"',
        "t_a_key": None,
        "c_ok": None,
        "fk": 'it references table "public.other", which is not replicated',
    }
    computed = plan(place(set="c"), place(OTHER, filter="id > 0"))
    assert computed["c_ok"].reason == '`set` computes column "c"'
    assert computed["fk"].reason == '`filter` keeps rows out of "public.other"'
    copied = plan(place(), place(OTHER, copy_where="id > 0"))
    assert copied["fk"].reason == '`copy_where` keeps rows out of "public.other"'
    assert computed["fk"].sql == (
        'alter table "public"."t" add constraint "fk" FOREIGN KEY (b) REFERENCES other(id)'
    )
    assert plan(place(set="a"))["t_a_key"].reason is not None
    assert plan(place(), place(OTHER, TableType.HISTORY))["fk"].reason is not None
    assert plan(place(has_sid=False), place(OTHER))["fk"].reason is not None


def test_no_expression_reads_a_hash_in_place_of_its_column() -> None:
    """A unique index on the stored values would refuse rows that the predicate excludes at the
    source.
    """
    only = index(
        *("only_b", IndexKey("a")),
        is_unique=True,
        predicate="(b <> ''::text)",
        uses=frozenset("ab"),
    )
    definition = replace(DEFINITION, objects=(*DEFINITION.objects, only))
    hashed = plan(place(hashed="b c"), place(OTHER), definition)
    assert hashed["only_b"].reason == 'streamer hashes column "b"'
    assert hashed["lower_b"].reason == 'streamer hashes column "b"'
    assert hashed["c_ok"].reason == 'streamer hashes column "c"'
    assert hashed["fk"].reason == '`set` hashes column "b" and the referenced column differently'
    key = plan(place(hashed="a"), place(OTHER), definition)
    assert key["t_a_key"].reason is None  # equal values have equal hashes
    assert key["only_b"].reason is None
    both = plan(place(hashed="b"), place(OTHER, hashed="id"))
    assert both["fk"].reason is None


def test_sid_leads_foreign_keys_and_no_action_changes_it() -> None:
    made = plan(place(), place(OTHER))["fk"]
    assert made.online == (
        (
            'alter table "public"."t" add constraint "fk" foreign key ("sid", "b") references'
            ' "public"."other" ("sid", "id") on delete set null ("b") not valid'
        ),
        'alter table "public"."t" validate constraint "fk"',
    )


def test_rows_that_outlive_their_source_need_not_be_unique() -> None:
    made = plan(place(type=TableType.APPEND), place(OTHER))
    assert made["t_a_key"].statements == (
        'create index "t_a_key" on "public"."t" using "btree" ("a")',
    )
    assert made["lower_b"].online[0].startswith("create index concurrently")
    assert made["fk"].reason == "rows of a table of type append outlive the referenced rows"


def test_another_name_is_the_same_each_time_and_fits() -> None:
    name = other_name("ü" * 31, T)
    assert name == other_name("ü" * 31, T) != other_name("ü" * 31, OTHER)
    assert len(name.encode()) <= 63


def test_a_temporal_key_is_named_with_the_reason_why_the_target_has_a_plain_one() -> None:
    sql = "PRIMARY KEY (a, b WITHOUT OVERLAPS)"
    key = constraint("p", "t_pkey", sql, "a", "b", period=True)
    planned = plan(place(), definition=replace(DEFINITION, objects=(key,)))["t_pkey"]
    assert (
        planned.reason == "streamer needs a plain primary key, so ranges of the target may overlap"
    )
    assert planned.source_sql.endswith(sql)
    plain = plan(place(), definition=replace(DEFINITION, objects=(replace(key, period=False),)))
    assert "t_pkey" not in plain


def test_a_history_has_no_default_and_no_sequence() -> None:
    serial = DefinedColumn(
        1, "id", "integer", not_null=True, default="nextval('t_id_seq'::regclass)"
    )
    table = TableDefinition(T, (serial, replace(serial, name="other", default="1")))
    renderer = Renderer(table, place(type=TableType.HISTORY, has_sid=False), lambda _: None)
    assert renderer.plan(Create.ALL) == []


def test_an_older_target_gets_a_reason_in_place_of_the_clause() -> None:
    distinct = index("t_b_idx", IndexKey("b"), is_unique=True, nulls_not_distinct=True)
    unique = constraint("u", "once", "UNIQUE (a)", "a", index=distinct)
    temporal = constraint("u", "apart", "UNIQUE (a)", "a", index=index("apart"), period=True)
    loose = constraint("c", "loose", "CHECK (a > 0)", "a", expression="a > 0", enforced=False)
    definition = replace(
        DEFINITION, objects=(*DEFINITION.objects, distinct, unique, temporal, loose)
    )
    made = plan(place(), place(OTHER), definition)

    def refused(version: int) -> dict[str, str | None]:
        limits = TargetLimits(version)
        return {
            name: limits.apply(planned).reason
            for name, planned in made.items()
            if planned.reason is None and limits.apply(planned).reason is not None
        }

    assert set(refused(14_00_05)) == {"t_b_idx", "once", "apart", "loose", "fk"}
    assert set(refused(17_00_00)) == {"apart", "loose"}
    assert refused(18_00_00) == {}
    assert refused(14_00_05)["fk"] == (
        "the clause needs PostgreSQL 15, and the target has PostgreSQL 14"
    )
    assert TargetLimits(14_00_00).apply(made["once"]).statements == ()
    plain = plan(place(has_sid=False), place(OTHER, has_sid=False), definition)
    assert TargetLimits(14_00_05).apply(plain["fk"]).reason is None
