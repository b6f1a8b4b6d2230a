"""Definitions of both sides are compared through the mapping."""

from pathlib import Path

import pytest

from streamer.commands.compare_command import summarize
from streamer.compare.comparison import TableResult
from streamer.compare.read_both_definitions import read_differences
from streamer.config import static_mapping
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import resolve
from streamer.mapping.sid_and_history_columns import USUAL_HISTORY
from streamer.schema.desired_columns import column_clause, history_columns
from streamer.source.catalog import read_relations
from streamer.source.connection import connection
from streamer.target.catalog import read_relation
from streamer.target.connection import TargetAddress, target_connection
from tests.support.postgres import Database
from tests.support.streamer import write_config

SOURCE = """
create type mood as enum ('sad', 'happy');
create table p (id int primary key);
create table t (id int primary key, name varchar(10) not null default 'x', m mood, hidden int,
                parent int references p on delete set null, total int check (total > 0),
                label text generated always as (name || '!') stored, more int);
create unique index once on t (name);
create index sorted on t (lower(name) desc) where total > 1;
create index on t (hidden);
create statistics st on name, (total + 1) from t;
alter table t add constraint apart exclude using btree (parent with =);
"""


async def differences(
    path: Path, source: Database, target: Database, *, is_shared: bool = False
) -> list[str]:
    """Return the differences of table t, as `streamer compare` lists them."""
    settings, mapping = static_mapping.load(path)
    (one,) = mapping.sources
    names = [RelationName("public", name) for name in ("p", "t")]
    mappings = resolve(one, names, "public")
    async with (
        connection(one) as plain,
        target_connection(TargetAddress.parse(settings.target.url), "test") as there,
    ):
        relations = await read_relations(plain, names)
        aim = await read_relation(there, mappings[1].target)
        assert aim is not None
        found = await read_differences(
            *(plain, there, relations[names[1]].oid, mappings[1], aim),
            others=mappings,
            is_shared=is_shared,
        )
    result = TableResult("public.t", "w", "shop", None, 1, definitions=found)
    assert result.to_json()["definitions"]["equal"] is (not found)
    assert (summarize([result], strict=True) is None) is (not found)
    assert summarize([result]) is None
    return [str(each) for each in found]


@pytest.mark.since(15)  # ON DELETE SET NULL with columns
async def test_differences_are_listed_as_far_as_create_asks_for_them(
    source: Database, target: Database, tmp_path: Path
) -> None:
    source.execute(SOURCE)
    path = tmp_path / "config.yaml"
    rules = "p:\nt: {target: w, columns: {name: title}, exclude: [hidden]}"

    def configure(create: str) -> None:
        write_config(path, source, target, rules, sid="eu", group=f"create: {create}")

    target.execute("""
        create type mood as enum ('sad', 'happy');
        create table p (sid text, id int, primary key (sid, id));
        create table w (sid text, id int, title varchar(10) not null default 'x', m mood,
                        parent int, total int, own text, primary key (sid, id),
                        label text generated always as (title || '!') stored, more int,
                        constraint t_total_check check (total > 0));
        create unique index once on w (sid, title);
        create index sorted on w (lower(title) desc) where total > 1;
        create index own on w (own);
        alter table w add constraint apart exclude using btree (sid with =, parent with =),
            add constraint t_parent_fkey foreign key (sid, parent) references p
                on delete set null (parent);
        create statistics st on title, (total + 1) from w;
    """)
    configure("all")
    assert await differences(path, source, target) == []
    target.execute("""
        alter table w drop label, add label text generated always as (title || '?') stored,
            drop more, add more int generated always as (1) stored;
        drop statistics st; drop index sorted; alter type mood add value 'mad'; alter table w alter total type bigint;
        alter table w add constraint more check (total > 5), drop constraint apart,
            drop constraint t_total_check, drop constraint w_pkey, add primary key (id);
    """)
    found = await differences(path, source, target)
    starts = [
        "type \"public.mood\" is enum ('sad', 'happy', 'mad'), and should be enum ('sad', 'happy')",
        'column "total" is bigint, and should be integer',
        "column \"label\" is text generated always as (((title)::text || '?'::text)), and should be",
        'column "more" is integer generated always as (1), and should be integer',
        'primary key "w" is (id), and should be (sid, id)',
        'index "sorted" is missing: create index "sorted"',
        'exclusion "apart" is missing: alter table "public"."w" add constraint "apart" exclude',
        'check "t_total_check" is missing',
        'extended statistics "st" is missing: create statistics "public"."st" on "title"',
        'check "more" is only at the target: alter table "public"."w" add constraint "more"',
    ]
    assert [line[: len(start)] for line, start in zip(found, starts, strict=True)] == starts
    configure("keys")
    assert len(await differences(path, source, target)) == 7
    configure("columns")
    assert len(await differences(path, source, target)) == 5


async def test_a_column_that_the_rule_ignores_is_no_difference_unless_the_key_has_it(
    source: Database, target: Database, tmp_path: Path
) -> None:
    source.execute("""
        create table p (id int primary key);
        create table t (id int, part int, note text check (note <> ''), primary key (id, part));
        create index noted on t (note);
    """)
    target.execute("create table p (id int primary key); create table t (id int primary key)")
    path = tmp_path / "config.yaml"

    async def missing(rule: str) -> list[str]:
        write_config(path, source, target, f"p:\nt: {{{rule}}}", group="create: all")
        return [
            line.partition(" is missing")[0] for line in await differences(path, source, target)
        ]

    assert await missing("on_column_added: stop") == ['column "part"', 'column "note"']
    assert await missing("on_column_added: ignore") == ['column "part"']


async def test_partitions_are_compared_where_the_rule_asks_for_them(
    source: Database, target: Database, tmp_path: Path
) -> None:
    source.execute("""
        create table p (id int primary key);
        create table t (name text, at int, primary key (name, at)) partition by range (at);
        create table t_1 partition of t for values from (1) to (5) partition by list (name);
        create table t_a partition of t_1 for values in ('a');
        create table t_rest partition of t default;
    """)
    target.execute("""
        create table p (id int primary key);
        create table w (title text, at int, primary key (title, at)) partition by range (at);
        create table t_1 partition of w for values from (1) to (5) partition by list (title);
        create table t_a partition of t_1 for values in ('b');
        create table own partition of w for values from (7) to (9);
    """)
    path = tmp_path / "config.yaml"
    rule = "target: w, columns: {name: title, at: at}"
    write_config(path, source, target, f"p:\nt: {{{rule}, partitioned: true}}")
    assert await differences(path, source, target) == [
        'partition "own" is only at the target: FOR VALUES FROM (7) TO (9)',
        """partition "t_a" is t_1 FOR VALUES IN ('b'), and should be t_1 FOR VALUES IN ('a')""",
        'partition "t_rest" is missing: DEFAULT',
    ]
    write_config(path, source, target, f"p:\nt: {{{rule}}}")
    assert await differences(path, source, target) == []
    # Several sources share partitions of the same bounds.
    target.execute("""
        drop table w;
        create table w (sid text, title text, at int, primary key (sid, title, at))
            partition by range (at);
        create table mine partition of w for values from (1) to (5) partition by list (title);
        create table a partition of mine for values in ('a');
        create table own partition of w for values from (7) to (9);
    """)
    write_config(path, source, target, f"p:\nt: {{{rule}, partitioned: true}}", sid="eu")
    found = await differences(path, source, target, is_shared=True)
    assert found == ['partition "t_rest" is missing: DEFAULT']
    assert len(await differences(path, source, target)) == 6


async def test_the_index_of_open_versions_is_no_difference_and_others_of_them_are(
    source: Database, target: Database, tmp_path: Path
) -> None:
    source.execute(
        "create table p (id int primary key); create table t (id int primary key, v int)"
    )
    versions = ", ".join(map(column_clause, history_columns(USUAL_HISTORY)))
    target.execute(
        "create table p (id int primary key); create table w (id int not null, v int,"
        f" {versions}, primary key (id, kvsz_id));"
        "create unique index on w (id) where kvsz_end = '9999-01-01 00:00:00+00'"
    )
    path = tmp_path / "config.yaml"
    write_config(path, source, target, "p:\nt: {type: history, target: w}", group="create: keys")
    assert await differences(path, source, target) == []
    target.execute("create unique index own on w (v) where kvsz_end = '9999-01-01 00:00:00+00'")
    (found,) = await differences(path, source, target)
    assert found.startswith('index "own" is only at the target')


async def test_a_default_that_only_the_target_has_is_a_difference(
    source: Database, target: Database, tmp_path: Path
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key, a int, b int default 1)")
    target.execute("create table p (id int); alter table t add column own int default 7")
    source.execute("create table p (id int)")
    path = tmp_path / "config.yaml"
    write_config(path, source, target, "p:\nt:", group="create: all")
    assert await differences(path, source, target) == []
    source.execute("alter table t alter b drop default")
    assert await differences(path, source, target) == [
        'default "b" is only at the target: alter table "public"."t" alter column "b" set default 1'
    ]
