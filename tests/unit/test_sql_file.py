"""The script of a check: databases of several servers, and each statement once."""

from streamer.commands.check.findings import (
    CheckReport,
    Place,
    at_source,
    at_target,
    error,
    warning,
)
from streamer.commands.check.sql_file import sql_file
from streamer.postgres.secret import Secret

URLS: dict[str | None, Secret] = {
    "a:1": Secret("postgresql://u:hunter2@h1/a?sslmode=require"),
    "a:2": Secret("host=h2,h3 port=5432 dbname='it''s' password=hunter2".replace("''", "\\'")),
    None: Secret("postgresql://h1/dw"),
}


def test_a_script_for_several_servers_connects_to_each_without_a_password() -> None:
    findings = [
        error(Place("a:1"), "no right", at_source("grant one")),
        error(Place("a:2"), "no right", at_source("grant one")),
        warning(Place("a:1", "public.t"), "no right\n\\q", at_target("grant two", words="later")),
    ]
    script = sql_file(CheckReport(findings, urls=URLS))
    connects = [line for line in script.splitlines() if line.startswith("\\")]
    assert connects == [
        "\\set ON_ERROR_STOP on",
        "\\connect -reuse-previous=on 'host=h1 dbname=a'",
        (
            "\\connect -reuse-previous=on 'host=h2,h3 port=5432 dbname=it\\\\''s "
            "target_session_attrs=read-write'"
        ),
        "\\connect -reuse-previous=on 'host=h1 dbname=dw'",
    ]
    assert "hunter2" not in script
    assert script.count("grant one;") == 2


def test_a_statement_of_two_findings_is_in_the_script_once() -> None:
    findings = [
        error(Place("a:1", name), "no type", at_target("create type m", f"create table {name}"))
        for name in ("t", "u")
    ]
    script = sql_file(CheckReport(findings, urls=URLS))
    statements = [line for line in script.splitlines() if line.endswith(";")]
    assert statements == ["create type m;", "create table t;", "create table u;"]
    assert "\\connect -reuse-previous=on 'dbname=dw'" in script
