"""The output and the exit codes of `streamer check`, which changes neither side."""

import json
from typing import Any

import pytest

from streamer.commands.demo.embedded_servers import free_port
from streamer.postgres.conninfo import parse_conninfo
from streamer.report.problems import Severity
from tests.support.checking import (
    ERROR,
    INFO,
    ITEMS,
    WARNING,
    Checker,
    both,
    matching,
    run_check,
    two_sources,
)
from tests.support.process import command
from tests.support.runbooks import run_block
from tests.support.streamer import MakeStreamer


async def test_a_clean_check(checker: Checker) -> None:
    checker.source.execute(f"{ITEMS}; create table more (id int primary key)")
    checker.target.execute(
        "create table items (sid text, id int, name text, primary key (sid, id))"
    )
    checker.configure("'*':", sid="eu")
    report = await run_check(checker.path)
    assert [str(f) for f in report.findings if "fsync" not in f.problem] == []
    report.findings.clear()
    assert (report.exit_code, report.summary) == (0, "everything is ready: 2 tables of 1 source")
    shown = report.to_json()
    (copies,) = shown.pop("copies")
    roles = {"shop:eu": "primary"}
    assert shown == {"ready": True, "sources": 1, "tables": 2, "roles": roles, "findings": []}
    assert (copies["label"], copies["seconds"]) == ("shop:eu", 0.0)
    assert [table["source"] for table in copies["tables"]] == ["public.items", "public.more"]
    # The tables were never analyzed.
    items, more = (table["size_bytes"] for table in copies["tables"])
    assert items > 0
    assert copies["size_bytes"] == items + more


async def test_a_database_that_a_group_has_under_two_sids_is_named(checker: Checker) -> None:
    checker.source.execute(ITEMS)
    checker.configure("items:", sid="eu")
    text = checker.path.read_text()
    (line,) = (line for line in text.splitlines() if "urls:" in line)
    url = line.partition("[")[2].rpartition("]")[0]
    checker.path.write_text(text.replace(url, f"{url}, {url.replace('eu', 'us')}"))
    found = await checker.finds(Severity.WARNING, "the target gets its rows twice")
    assert found.place.source == "shop:us"
    assert "shop:eu" in found.problem


def test_an_error_is_exit_code_1_and_a_warning_is_0(checker: Checker) -> None:
    checker.source.execute("create table keyless (id int)")
    checker.configure("keyless:", sid="eu")
    result = command(checker.path, "check")
    assert (result.returncode, result.stderr) == (0, "")
    assert (
        "warning shop:eu public.keyless: has no primary key, so updates and deletes are not "
        "replicated\n  run at the source:\n"
        '    alter table "public"."keyless" replica identity full;\n'
        "  or add a primary key, which is faster\n"
    ) in result.stdout
    assert "1 table of 1 source" in result.stdout.splitlines()[-1]

    checker.configure("keyless: {}\nnowhere: {}", sid="eu")
    result = command(checker.path, "check", "--json")
    assert result.returncode == 1
    assert result.stderr.startswith("streamer: not ready: 1 error")
    assert result.stderr.count("\n") == 1
    found = json.loads(result.stdout)
    assert found["ready"] is False
    by_object = {finding["object"]: finding for finding in found["findings"]}
    assert (
        by_object["public.nowhere"]["problem"] == "is in `tables`, but does not exist at the source"
    )
    keyless = by_object["public.keyless"]
    assert (keyless["severity"], keyless["source"]) == ("warning", "shop:eu")
    assert keyless["at"] == "source"
    assert keyless["sql"] == ['alter table "public"."keyless" replica identity full']
    assert keyless["fix"].startswith(f"run at the source: {keyless['sql'][0]}")


async def test_a_server_out_of_reach_is_exit_code_3_and_the_others_are_checked(
    checker: Checker,
) -> None:
    checker.source.execute("create table keyless (id int)")
    nowhere = f"postgresql://postgres:hunter2@127.0.0.1:{free_port()}/nowhere"
    two_sources(checker, "keyless:", {"eu": checker.source.url, "us": nowhere})
    report = await run_check(checker.path)
    assert report.exit_code == 3
    (found,) = matching(report.findings, ERROR, "shop:us: ", "Connection refused")
    assert "check its url, and that its server is running" in str(found)
    assert matching(report.findings, WARNING, "shop:eu public.keyless: ")

    checker.configure("keyless:")
    text = checker.path.read_text()
    checker.path.write_text(text.replace(checker.target.url, checker.target.url + "_gone"))
    report = await run_check(checker.path)
    assert report.exit_code == 3
    assert matching(
        report.findings, ERROR, "target: ", "does not exist", "correct the database in target.url"
    )
    assert matching(report.findings, WARNING, "public.keyless")

    checker.path.write_text(text.replace(checker.target.url, nowhere))
    result = command(checker.path, "check")
    assert result.returncode == 3, result
    assert "error   target: " in result.stdout
    assert "public.keyless" in result.stdout
    assert "hunter2" not in result.stdout + result.stderr


@pytest.mark.follows("runbooks:configuration-rejected#1")
def test_wrong_configuration_is_exit_code_2_and_shows_no_secret(checker: Checker) -> None:
    checker.configure("items: {colour: blue}")
    result = command(checker.path, "check")
    assert (result.returncode, result.stdout) == (2, "")
    assert "config.yaml, line " in result.stderr
    assert "colour" in result.stderr
    assert result.stderr.count("\n") == 1
    checker.source.execute(ITEMS)
    checker.configure("items:")
    assert "ready" in run_block(checker.path, "configuration-rejected#1")
    for url, words in (
        ("postgresql://me:hunter%2@host/db", "invalid percent-encoded token"),
        ("postgresql://me:hunter@2@host/db", "write %40 for @"),
        ("postgresql://me:hun/ter2@host/db", "write %40 for @"),
        ("host=h password='hunter2", "unterminated quoted string"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            parse_conninfo(url)
        assert "hun" not in str(caught.value)
    assert parse_conninfo("postgresql://a%40b@h:1,:2/d")["user"] == "a@b"


async def test_a_check_changes_nothing(checker: Checker, stream: MakeStreamer) -> None:
    both(checker, ITEMS)
    both(
        checker, "create table keyless (id int); create sequence s; create type mood as enum ('a')"
    )
    checker.source.execute("create table made (id int primary key, m mood, n serial)")
    checker.configure("'*': {initial: none}")
    before = snapshot(checker)
    await run_check(checker.path)
    assert snapshot(checker) == before
    async with stream("'*': {initial: none}") as streamer:
        await streamer.caught_up()
        checker.configure("'*': {initial: none}")
        assert not matching(await checker.findings(), ERROR)
    before = snapshot(checker)
    assert not matching(await checker.findings(), ERROR)
    assert snapshot(checker) == before


def snapshot(checker: Checker) -> list[Any]:
    catalogs = (
        (
            "select oid, relname, relfilenode, relreplident::text, relacl::text from pg_class"
            " where relnamespace <> 'pg_toast'::regnamespace order by oid"
        ),
        "select oid, nspname, nspacl::text from pg_namespace order by oid",
        "select oid, typname from pg_type order by oid",
        "select oid, pubname from pg_publication order by oid",
        "select prpubid, prrelid from pg_publication_rel order by 1, 2",
        (
            "select slot_name, confirmed_flush_lsn::text from pg_replication_slots"
            " where database = current_database()"
        ),
        "select rolname, rolsuper, rolreplication from pg_roles order by 1",
        "select datname, datacl::text from pg_database where datname = current_database()",
        "select setdatabase, setrole, setconfig::text from pg_db_role_setting order by 1, 2",
        "select gid from pg_prepared_xacts where database = current_database()",
    )
    seen: list[Any] = [
        db.execute(sql) for db in (checker.source, checker.target) for sql in catalogs
    ]
    if checker.target.value("select to_regclass('streamer.relation')") is not None:
        seen += [
            checker.target.execute(f"select t::text from streamer.{table} t order by 1")
            for table in ("migration", "source", "relation", "request", "sync_partition")
        ]
    return seen


async def test_binary_that_comes_as_text(checker: Checker) -> None:
    checker.source.execute(
        "create type mood as enum ('fine'); create table t (id int primary key, m mood)"
    )
    checker.configure("t:", group="transport: binary")
    found = await checker.finds(INFO, "changes come as text, although transport is binary")
    assert 'table "public.t"' in str(found)
    checker.configure("t: {exclude: [m]}", group="transport: binary")
    await checker.is_gone(INFO, "transport is binary")
    checker.configure("t:", group="transport: text")
    await checker.is_gone(INFO, "transport is binary")
