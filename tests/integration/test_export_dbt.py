"""`streamer export --dbt`: dbt's schemas accept the files, and the target runs each of its queries."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any, Final

import jinja2
import jsonschema_rs
import pytest
import yaml

from scripts import install_validators
from streamer.commands.dbt_package import DbtPackage, ReplicatedTable, dbt_package
from streamer.commands.export_dbt import export_dbt, write_package
from streamer.errors.error_classes import SettingsError
from streamer.mapping.relation_names import RelationName, parse_relation
from streamer.mapping.rules import TableRule
from streamer.postgres.quoting import quote_literal
from streamer.schema.target_relation import TargetColumn, TargetRelation
from streamer.target.connection import TargetAddress
from tests.support.invoking import invoke
from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer

pytestmark = pytest.mark.usefixtures("without_spark")

TABLES: Final = """
t:
h: {type: history}
'"Odd name"': {type: history, target: '"Other"."h"', history: {end: Until}}
bag: {type: append}
"""


def documents(directory: Path) -> dict[str, Any]:
    """Return the YAML files of a package, which dbt's schemas accept."""
    files = {path.stem: yaml.safe_load(path.read_text()) for path in directory.rglob("*.yml")}
    for name, document in files.items():
        kind = "project" if name == "dbt_project" else "resources"
        schema = json.loads(install_validators.dbt_schema(kind).read_text())
        faults = jsonschema_rs.Draft7Validator(schema).iter_errors(document)
        assert [error.message for error in faults] == [], name
    return files


def queries(directory: Path) -> dict[str, str]:
    """Return the SQL of models and tests by name, rendered as dbt does."""
    sources = documents(directory)["sources"]["sources"]
    places = {
        (source["name"], table["name"]): f'"{source["schema"]}"."{table["identifier"]}"'
        for source in sources
        for table in source["tables"]
    }
    texts = {path.stem: path.read_text() for path in directory.rglob("*.sql")}

    def render(name: str) -> str:
        template = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(texts[name])
        return template.render(
            source=lambda *names: places[names], ref=lambda model: f"({render(model)}) as r"
        )

    return {name: render(name) for name in texts}


async def test_the_target_runs_the_queries_of_the_package(
    source: Database, target: Database, stream: MakeStreamer, tmp_path: Path
) -> None:
    """Keys hold, views have the rows of the source, and freshness follows the stream."""
    for table in ("t", "h", '"Odd name"'):
        source.execute(
            f'create table {table} (id int, "Part" text, v text, primary key (id, "Part"))'
        )
        source.execute(f"insert into {table} select n, 'p', 'old' from generate_series(1, 5) n")
    source.execute("create table bag (v text); alter table bag replica identity full")
    target.execute('create schema "Other"')
    directory = tmp_path / "package"

    async with stream(TABLES, sid="eu") as s:
        await s.caught_up()
        source.execute("update h set v = 'new' where id < 3; delete from h where id = 5")
        await s.caught_up()
    command = ("-c", str(s.path), "export", "--dbt", str(directory), "--json")
    exported = await asyncio.to_thread(invoke, *command)
    assert exported.exit_code == 0, exported.output
    answer = json.loads(exported.stdout)
    tables = {table["target"]: table for table in answer["tables"]}

    key = ["sid", "id", "Part"]
    assert {name: (t["type"], t["key"], t["current"]) for name, t in tables.items()} == {
        "public.t": ("clone", key, None),
        "public.h": ("history", key, "public__h_current"),
        "Other.h": ("history", key, "other__h_current"),
        "public.bag": ("append", [], None),
    }
    assert sorted(answer["files"]) == sorted(
        str(path.relative_to(directory)) for path in directory.rglob("*.*")
    )
    made = queries(directory)
    assert set(made) == {
        *("public__h_current", "other__h_current"),
        *("public__t_key", "public__h_key", "other__h_key"),
    }
    for name in ("public__t_key", "public__h_key", "other__h_key"):
        assert target.execute(made[name]) == []
    assert target.execute(f"select id, v from ({made['public__h_current']}) c order by id") == (
        source.execute("select id, v from h order by id")
    )
    columns = documents(directory)["models"]["models"][1]["columns"]
    assert [column["name"] for column in columns] == ["sid", "id", "Part", "v"]
    # THEN a duplicate key fails its test
    target.execute(
        "alter table t drop constraint t_pkey; insert into t select * from t where id = 1"
    )
    assert target.execute(made["public__t_key"]) == [("eu", 1, "p", 2)]


async def test_freshness_is_the_time_up_to_which_a_table_is_whole(
    source: Database, target: Database, stream: MakeStreamer, tmp_path: Path
) -> None:
    source.execute("create table t (id int primary key)")
    async with stream("t:", settings="heartbeat_interval: 1") as s:
        await s.caught_up()
        await export_dbt(TargetAddress.parse(s.settings.target.url), s.mapping, tmp_path)
        (entry,) = documents(tmp_path)["sources"]["sources"][0]["tables"]
        query = entry["config"]["loaded_at_query"]
        first = target.value(query)

        async def has_moved() -> bool:
            return bool(
                target.value(f"select ({query}) > {quote_literal(str(first))}::timestamptz")
            )

        # WHEN the source is quiet, THEN heartbeats move the time
        await s.eventually(has_moved)

    def age() -> float:
        """As dbt's macro does."""
        sql = f"select extract(epoch from now() - (select * from ({query}) q))"
        return float(str(target.value(sql)))

    assert age() < 300
    target.execute("update streamer.relation set lag_since = now() - interval '1 hour'")
    assert age() > 3000
    target.execute("update streamer.relation set snapshot_lsn = null, state = 'copying'")
    assert age() > 1e9


def test_a_target_without_tables_is_an_error(target: Database, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"target: {{url: '{target.url}'}}\nsources: []\n")

    refused = invoke("-c", str(config), "export", "--dbt", str(tmp_path / "package"))

    assert refused.exit_code == 1
    assert "start `streamer run` first" in refused.output


# ---- the files, without a server ---------------------------------------------------------------


def table(namespace: str, name: str, column: str = "id") -> ReplicatedTable:
    plain = TargetColumn(column, "integer", "integer", "=", 23, True, False, False, False)
    relation = TargetRelation(
        1, RelationName(namespace, name), False, {column: plain}, (column,), ((column,),),
        frozenset(), False, False, True,
    )  # fmt: skip
    return ReplicatedTable(relation, TableRule(parse_relation("t", "public")), ("shop",))


def names(package: DbtPackage) -> list[str]:
    return [t["source"] for t in package.tables]


def test_names_that_dbt_cannot_tell_apart_get_numbers() -> None:
    package = dbt_package([table("a b", "T"), table("a-b", "T"), table("a b", "t")])

    assert names(package) == ["streamer_a_b.t", "streamer_a_b.t_2", "streamer_a_b_2.t"]
    assert len({name for name in package.files if name.endswith("_key.sql")}) == 3


@pytest.mark.parametrize("name", ["{{ env_var('HOME') }}", "{% do run() %}", 'q"q', "b\\b", "l\nl"])
def test_a_name_that_dbt_would_run_or_misread_leaves_its_table_out(name: str) -> None:
    """Owners of source tables choose names, and dbt renders templates in names."""
    for hostile in (table(name, "t"), table("s", name), table("s", "t", name)):
        package = dbt_package([hostile, table("s", "fine")])

        assert names(package) == ["streamer_s.fine"]
        assert [t["name"] for t in package.left_out] == [name]
        assert not any(re.search(re.escape(name), text) for text in package.files.values())


def test_an_export_replaces_its_own_files_only(tmp_path: Path) -> None:
    write_package(dbt_package([table("s", "one"), table("s", "two")]), tmp_path)
    (tmp_path / "models" / "mine.sql").write_text("select 1")

    write_package(dbt_package([table("s", "two")]), tmp_path)

    assert {path.name for path in tmp_path.rglob("*.sql")} == {"mine.sql", "s__two_key.sql"}
    (tmp_path / "models" / "sources.yml").write_text("sources: []")
    with pytest.raises(SettingsError, match=r"sources\.yml is not from"):
        write_package(dbt_package([table("s", "one")]), tmp_path)
    assert not (tmp_path / "tests" / "s__one_key.sql").exists()
