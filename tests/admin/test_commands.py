"""The commands that edit the draft, with the file of the mapping: no process runs."""

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import Result

from tests.support.invoking import invoke

SECRET = "hunter2-of-the-source"
URL = f"postgresql://streamer:{SECRET}@eu-db/shop"


class Commands:
    def __init__(self, config: Path) -> None:
        self._config = str(config)

    def run(self, *arguments: str, stdin: str = "") -> Result:
        result = invoke("--config", self._config, *arguments, stdin=stdin)
        assert SECRET not in result.output
        return result

    def done(self, *arguments: str, stdin: str = "") -> str:
        result = self.run(*arguments, stdin=stdin)
        assert result.exit_code == 0, result.output
        return result.output

    def rows(self, what: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self.done(what, "list", "--json"))
        return rows


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    config = tmp_path / "config.yaml"
    config.write_text(
        'target: {url: "postgresql://nobody@127.0.0.1:1/dw"}\nhttp: {listen: ""}\n'
        f"spool: {{directory: {tmp_path / 'spool'}}}\n"
        f"mapping_database: {tmp_path / 'mapping.sqlite'}\n"
    )
    return Commands(config)


def test_empty_lists_say_the_next_step(commands: Commands) -> None:
    assert "streamer sources add DATABASE URL" in commands.done("sources", "list")
    assert "streamer tables add DATABASE TABLE" in commands.done("tables", "list")
    assert commands.rows("sources") == []


@pytest.mark.parametrize("command", ["check", "wait"])
def test_an_empty_mapping_is_no_reason_to_edit_the_file(commands: Commands, command: str) -> None:
    result = commands.run(command)
    assert result.exit_code == 2
    assert "streamer sources add" in result.output
    assert "list at least one under" not in result.output


def test_wait_without_sources_is_wrong_usage(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text('target: {url: "postgresql://nobody@127.0.0.1:1/dw"}\nsources: []\n')
    result = Commands(config).run("wait")
    assert result.exit_code == 2
    assert "list at least one under `sources`" in result.output


def test_a_password_from_stdin_replaces_that_of_one_url(commands: Commands) -> None:
    commands.done("sources", "add", "shop", "-", "--sid", "eu", stdin=f"{URL}\n")
    commands.done("sources", "add", "shop", "postgresql://u@us-db/shop", "--sid", "us")
    which = commands.run("sources", "set", "shop", "--password", "-", stdin=f"{SECRET}\n")
    assert which.exit_code != 0
    assert "--sid" in which.output
    commands.done("sources", "set", "shop", "--sid", "us", "--password", "-", stdin=f"{SECRET}\n")
    assert [row["url"] for row in commands.rows("sources")] == [
        "postgresql://streamer:***@eu-db/shop",
        "postgresql://u:***@us-db/shop",
    ]


def test_a_password_in_the_command_line_is_refused(commands: Commands) -> None:
    result = commands.run("sources", "set", "shop", "--password", "open")
    assert result.exit_code == 2
    assert "stdin" in result.output


def test_settings_of_a_source_belong_to_its_url_or_its_database(commands: Commands) -> None:
    commands.done("sources", "add", "shop", URL.replace(SECRET, "${PASSWORD}"))
    commands.done("tables", "add", "shop", "orders")
    commands.done(
        *("sources", "set", "shop", "postgresql://other@eu-db/shop"),
        *("--setting", "sid=eu", "--setting", "streaming=false", "--setting", "transport=text"),
    )
    (row,) = commands.rows("sources")
    assert (row["url"], row["sid"]) == ("postgresql://other@eu-db/shop", "eu")
    exported = commands.done("export")
    assert "streaming: false" in exported
    commands.done("sources", "set", "shop", "--setting", "streaming=null")
    assert "streaming" not in commands.done("export")
    unknown = commands.run("sources", "set", "shop", "--setting", "speed=high")
    assert unknown.exit_code == 2
    assert "transport" in unknown.output


def test_tables_are_left_out_of_a_group_or_of_one_database(commands: Commands) -> None:
    for sid in ("eu", "us"):
        commands.done("sources", "add", "shop", f"postgresql://u@{sid}-db/shop", "--sid", sid)
    commands.done("tables", "add", "shop", "*.*", "--target", "*.*")
    group = ("--setting", "exclude_tables=['bi.*', '*.tmp_*']")
    commands.done("sources", "set", "shop", *group)
    commands.done("sources", "set", "shop", "--sid", "eu", "--setting", "exclude_tables=[orders]")
    (shop,) = yaml.safe_load(commands.done("export"))["sources"]
    assert shop["exclude_tables"] == ["bi.*", "*.tmp_*"]
    assert [url.get("exclude_tables") for url in shop["urls"]] == [["orders"], None]
    refused = commands.run("sources", "set", "shop", "--setting", "exclude_tables=[a.b.c]")
    assert refused.exit_code == 2
    assert "exclude_tables: 'a.b.c' is not a table name" in refused.output


def test_any_setting_of_a_table_can_be_changed_and_taken_back(commands: Commands) -> None:
    commands.done("sources", "add", "shop", "postgresql://u@eu-db/shop")
    commands.done("tables", "add", "shop", "audit.events")
    commands.done(
        *("tables", "set", "shop", "audit.events", "--target", "logs.events", "--type", "append"),
        *("--setting", "exclude=[payload]"),
    )
    (row,) = commands.rows("tables")
    assert (row["target"], row["type"], row["exclude"]) == ("logs.events", "append", ["payload"])
    commands.done(
        *("tables", "set", "shop", "audit.events", "--setting", "type=null"),
        *("--setting", "exclude=null", "--setting", "target=null"),
    )
    (row,) = commands.rows("tables")
    assert (row["target"], row["type"], row["exclude"]) == (None, "clone", [])
    assert commands.run("tables", "set", "shop", "nowhere", "--type", "append").exit_code != 0


def kuvasz_database(path: Path) -> Path:
    """Make a mapping in the database form of kuvasz-streamer."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            f"""
            create table db (db_id integer primary key, name text not null unique);
            create table url (url_id integer primary key, db_id integer not null, url text, sid text);
            create table tbl (tbl_id integer primary key, db_id integer not null,
              schema text not null default 'public', name text not null, type text not null,
              target text not null, partitions_regex text);
            insert into db values (1, 'shop'), (2, 'blog');
            insert into url values (1, 1, '{URL}?replication=database', '12'), (2, 2, 'host=b', '');
            insert into tbl (db_id, schema, name, type, target) values
              (1, 'public', 'orders', 'clone', 'all_orders'), (1, 'audit', 'events', 'append', 'events'),
              (2, 'public', 'posts', 'history', 'posts');
            """
        )
    return path


def test_the_sqlite_mapping_of_kuvasz_streamer_is_imported(
    commands: Commands, tmp_path: Path
) -> None:
    commands.done("import", str(kuvasz_database(tmp_path / "kuvasz.sqlite")))
    assert [(r["database"], r["sid"], r["url"]) for r in commands.rows("sources")] == [
        ("shop", "12", "postgresql://streamer:***@eu-db/shop"),
        ("blog", None, "host=b"),
    ]
    assert {(r["schema"], r["name"], r["target"], r["type"]) for r in commands.rows("tables")} == {
        ("public", "orders", "all_orders", "clone"),
        ("audit", "events", "events", "append"),
        ("public", "posts", "posts", "history"),
    }
    assert {row["on_column_added"] for row in commands.rows("tables")} == {"stop"}


def test_columns_that_the_target_lacks_are_left_out_as_kuvasz_streamer_does(
    commands: Commands, tmp_path: Path
) -> None:
    database = kuvasz_database(tmp_path / "kuvasz.sqlite")
    commands.done("import", str(database), "--exclude-missing")
    assert {row["on_column_added"] for row in commands.rows("tables")} == {"ignore"}
    yaml = tmp_path / "map.yaml"
    yaml.write_text("- {database: d, urls: [{url: 'host=h'}], tables: {t: , u: {type: append}}}\n")
    commands.done("import", str(yaml), "--exclude-missing")
    assert [row["on_column_added"] for row in commands.rows("tables")] == ["ignore", "ignore"]
    yaml.write_text("sources: [{database: d, urls: [{url: 'host=h'}], tables: {t: }}]\n")
    ours = commands.run("import", str(yaml), "--exclude-missing")
    assert ours.exit_code == 2
    assert "on_column_added: ignore" in ours.output


def test_another_sqlite_file_is_refused(commands: Commands, tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("create table t (id int)")
    refused = commands.run("import", str(path))
    assert refused.exit_code == 2
    assert "kuvasz-streamer" in refused.output
