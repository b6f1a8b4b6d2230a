"""Rendered definitions of a source's tables are exact on real servers."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from streamer.mapping.relation_names import RelationName, RelationPattern
from streamer.mapping.rule_options import Create, TableType
from streamer.mapping.rules import RelationMapping, TableRule
from streamer.postgres.describing import objects_sql
from streamer.schema.indexes_constraints_types import (
    ConstraintDefinition,
    IndexDefinition,
    object_of,
)
from streamer.schema.planned_definition import ObjectKind, Planned, TargetPlace
from streamer.schema.render_definitions import Renderer
from streamer.schema.table_definition import TableDefinition
from tests.support.definitions import described, read_definition
from tests.support.postgres import Database

TYPES = """
create type mood as enum ('sad', 'it''s');
create domain "Email" as text check (value ~ '@');
create collation "no-case" (locale = 'C');
"""
COLUMNS = """
create table "or""ders" (
    id int primary key, "per son" int, "Name" text, "order" text, year int, at timestamptz,
    tags text[], doc jsonb, mood mood, mail "Email", price numeric(10, 2), box int4range
);
create table people (id int primary key, email text not null);
create unique index on people (email);
"""
OBJECTS = """
create index plain on "or""ders" ("per son");
create unique index "un""ique" on "or""ders" (lower("Name"), "order" desc nulls last) include (price, "per son") where "order" <> 'a''b' and year > 0;
create index sorted on "or""ders" ("Name" collate "C" text_pattern_ops desc, year nulls first) with (fillfactor = 70);
create index on "or""ders" using gin (doc jsonb_path_ops);
create index sig on "or""ders" using gist (box range_ops) where mood = 'it''s';
create index expr on "or""ders" ((extract(year from at at time zone 'UTC')), (year::character varying collate "no-case"), ((tags)[1]), (coalesce("Name", "order")));
create index siglen on "or""ders" using gist (to_tsvector('simple', "Name") tsvector_ops (siglen = 100));
create unique index nnd_too on "or""ders" (at, mail desc) nulls not distinct;
alter index expr alter column 1 set statistics 77;
alter table "or""ders"
    add constraint "u k" unique ("per son", year) include (price) deferrable initially deferred,
    add unique ("Name", "order"), add constraint nnd unique nulls not distinct (mail, at),
    add constraint "ex""btree" exclude using btree (id with =, year with =) where (id > 0) deferrable,
    add constraint ex exclude using gist (box with &&, int4range("per son", year) with =) where (price > 0),
    add constraint ch check (price > 0 and "Name" <> E'\\\\ it''s "per son"' and year is distinct from 3 and extract(year from at) > year),
    add constraint later check (year < 3000) not valid,
    add constraint "f""k" foreign key ("per son") references people (id) on delete set null on update cascade deferrable,
    add foreign key ("per son") references "or""ders" match full not valid,
    add constraint mail foreign key (mail) references people (email);
alter table "or""ders" alter "Name" set default 'it''s \\ "q"', alter price set default 1.5, alter at set default now(), alter mood set default 'sad';
alter table "or""ders" alter year set statistics 500;
comment on table "or""ders" is 'it''s a "table" \\ ';
comment on column "or""ders"."Name" is 'o''name';
comment on index sorted is 'an ''index''';
comment on constraint "u k" on "or""ders" is 'of $$ keys';
comment on constraint ch on "or""ders" is 'check';
"""
ORDERS = RelationName("public", 'or"ders')
PEOPLE = RelationName("public", "people")


def place(
    source: RelationName,
    target: RelationName | None = None,
    *,
    has_sid: bool = False,
    type: TableType = TableType.CLONE,
    columns: dict[str, str] | None = None,
    exclude: frozenset[str] = frozenset(),
) -> TargetPlace:
    rule = TableRule(
        RelationPattern(source.namespace, source.name),
        type=type,
        columns=None if columns is None else tuple(columns.items()),
        exclude=exclude,
    )
    return TargetPlace(RelationMapping(source, target or source, rule), has_sid)


def places(*known: TargetPlace) -> Callable[[RelationName], TargetPlace | None]:
    return {each.mapping.source: each for each in known}.get


def execute(target: Database, planned: list[Planned], *, online: bool) -> None:
    """Run the statements as the program does: together, or one by one."""
    with target.connect() as connection:
        connection.execute("set search_path = ''")
        for each in planned:
            for statement in each.online if online else each.statements:
                connection.execute(statement.encode())


@pytest.mark.since(15)  # NULLS NOT DISTINCT
@pytest.mark.parametrize("online", [False, True])
def test_a_target_gets_the_definitions_of_its_source(
    source: Database, target: Database, *, online: bool
) -> None:
    source.execute(TYPES + COLUMNS + OBJECTS)
    target.execute(TYPES + COLUMNS)
    definition = read_definition(source, 'public."or""ders"')
    own, people = place(ORDERS), place(PEOPLE)
    planned = Renderer(definition, own, places(own, people)).plan(Create.ALL)
    assert [p.reason for p in planned if p.reason] == []
    assert planned[-1].kind is ObjectKind.FOREIGN_KEY
    execute(target, planned, online=online)
    assert described(target, 'public."or""ders"') == described(source, 'public."or""ders"')
    assert texts(read_definition(target, 'public."or""ders"')) == texts(definition)


def texts(definition: TableDefinition) -> dict[str, Any]:
    """Return the parts of a definition that two servers may share: no OIDs and no marks."""

    def described(part: IndexDefinition | ConstraintDefinition | None) -> dict[str, Any] | None:
        if part is None:
            return None
        values = {field.name: getattr(part, field.name) for field in fields(part)}
        return {**values, "oid": 0, "mark": "", "index": described(values.get("index"))}

    objects = {(each.kind, each.name): described(each) for each in definition.objects}
    return {"columns": definition.columns, "objects": objects, "comment": definition.comment}


@pytest.mark.since(15)  # NULLS NOT DISTINCT
def test_objects_without_texts_are_read_beside_any_lock(source: Database) -> None:
    source.execute(TYPES + COLUMNS + OBJECTS)
    definition = read_definition(source, 'public."or""ders"')
    sql = f"select ({objects_sql(with_texts=False)}) from pg_class c where relname = 'or\"ders'"
    with source.connect() as blocker, source.connect() as reader:
        blocker.execute('begin; lock table "or""ders" in access exclusive mode')
        reader.execute("set lock_timeout = '100ms'")
        row: Any = reader.execute(sql.encode()).fetchone()
    assert tuple(object_of(each, {}) for each in row[0]) == definition.objects


@pytest.mark.since(15)  # NULLS NOT DISTINCT
def test_names_go_through_the_mapping_and_sid_leads_unique_keys(
    source: Database, target: Database
) -> None:
    source.execute(TYPES + COLUMNS + OBJECTS)
    target.execute(
        TYPES
        + """
        create schema s;
        create table s."ta""rget" (
            sid text not null, id int, person int, "na""me" text, "select" text, "order" int, at timestamptz,
            tags text[], doc jsonb, mood mood, mail "Email", price numeric(10, 2), box int4range, primary key (sid, id)
        );
        create table people (sid text not null, id int, email text not null, primary key (sid, id), unique (sid, email))
        """
    )
    definition = read_definition(source, 'public."or""ders"')
    # A swap: the columns that the source calls "order" and year are different columns at the
    # target.
    columns = {"per son": "person", "Name": 'na"me', "order": "select", "year": "order"}
    columns |= {name: name for name in ("id", "at", "tags", "doc", "mood", "mail", "price", "box")}
    own = place(ORDERS, RelationName("s", 'ta"rget'), has_sid=True, columns=columns)
    people = place(PEOPLE, has_sid=True)
    taken = frozenset({"sorted"})
    planned = Renderer(definition, own, places(own, people), taken).plan(Create.ALL)
    assert [p.reason for p in planned if p.reason] == []
    (gist,) = (p for p in planned if p.name == "ex")
    assert gist.statements == (
        (
            """alter table "s"."ta""rget" add constraint "ex" exclude using "gist" ("sid" with operator(pg_catalog.=), """
            """"box" with operator(pg_catalog.&&), (int4range("person", "order")) with operator(pg_catalog.=)) where (("price" > (0)::numeric))"""
        ),
    )  # needs the extension btree_gist, which these servers lack
    planned.remove(gist)
    execute(target, planned, online=True)
    found = described(target, 's."ta""rget"')
    (name,) = (p.name for p in planned if p.name.startswith("sorted"))
    assert name != "sorted", "another table of the schema has it"
    indexes = {
        text.split(" USING ")[0].split(" INDEX ")[1]: text.split(" USING ")[1]
        for text in found["indexes"]
    }
    assert indexes['"un""ique" ON s."ta""rget"'] == (
        'btree (sid, lower("na""me"), "select" DESC NULLS LAST)'
        " INCLUDE (price, person) WHERE ((\"select\" <> 'a''b'::text) AND (\"order\" > 0))"
    )
    assert indexes['expr ON s."ta""rget"'] == (
        "btree (EXTRACT(year FROM (at AT TIME ZONE 'UTC'::text)),"
        ' (("order")::character varying) COLLATE public."no-case", (tags[1]), COALESCE("na""me", "select"))'
    )
    constraints = dict(text.split(" ", 1) for text in found["constraints"] if text.count(" ") > 1)
    assert constraints["ch"] == (
        r"""CHECK (((price > (0)::numeric) AND ("na""me" <> '\ it''s "per son"'::text) AND ("order" IS DISTINCT FROM 3)"""
        """ AND (EXTRACT(year FROM at) > ("order")::numeric)))"""
    )
    assert constraints["mail"] == "FOREIGN KEY (sid, mail) REFERENCES public.people(sid, email)"
    assert constraints['f"k'] == (
        "FOREIGN KEY (sid, person) REFERENCES public.people(sid, id)"
        " ON UPDATE CASCADE ON DELETE SET NULL (person) DEFERRABLE"
    )
    assert constraints['ex"btree'].startswith("EXCLUDE USING btree (sid WITH =, id WITH =")
    assert (
        'u k UNIQUE (sid, person, "order") INCLUDE (price) DEFERRABLE INITIALLY DEFERRED'
        in found["constraints"]
    )
