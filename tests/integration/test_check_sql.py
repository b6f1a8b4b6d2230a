"""`streamer check --sql`: an administrator runs the script once with psql; the next check is ready."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from streamer.commands.check.check import examine
from streamer.commands.check.findings import CheckReport
from streamer.commands.check.sql_file import sql_file
from streamer.config import static_mapping
from streamer.report.problems import Severity
from streamer.source.capture.capture_functions import create_sql
from tests.support.checking import Checker, matching
from tests.support.invoking import invoke
from tests.support.postgres import version_of_tests, versions

CAPTURE = "ddl: capture"
KEYED = "create table t (id int primary key, v text)"
LOG = "create table log (line text)"
BY_RANGE = (
    "create table p (id int) partition by range (id);"
    "create table p1 partition of p for values from (0) to (9);"
    "create table p2 (id int not null unique); alter table p attach partition p2 for values"
    " from (9) to (20)"
)
WORLDS = {
    "a table without a key": (LOG, "log:", ""),
    "tables with and without keys": (f"{KEYED}; {LOG}", '"*":', ""),
    "a partitioned table without a key": (BY_RANGE, "p:", ""),
    "a unique index for an identity": (
        "create table log (line text not null, constraint lines unique (line))",
        "log:",
        "",
    ),
    "the identity NOTHING": (f"{KEYED}; alter table t replica identity nothing", "t:", ""),
    "publications without the tables": (
        (
            f"{KEYED}; {LOG}; create table other (id int primary key);"
            "create publication streamer_shop for table only other"
            " with (publish_via_partition_root = true);"
            "create publication streamer_shop_ins with (publish = 'insert, truncate',"
            " publish_via_partition_root = true)"
        ),
        "t:\nlog:",
        "",
    ),
    "a table in the publication of inserts": (
        (
            f"{LOG}; create publication streamer_shop with (publish_via_partition_root = true);"
            "create publication streamer_shop_ins for table only log"
            " with (publish = 'insert, truncate', publish_via_partition_root = true)"
        ),
        "log:",
        "",
    ),
    "a table with an identity in the publication of inserts": (
        (
            f"{KEYED}; create publication streamer_shop with (publish_via_partition_root = true);"
            "create publication streamer_shop_ins for table only t"
            " with (publish = 'insert, truncate', publish_via_partition_root = true)"
        ),
        "t:",
        "",
    ),
    "the capture": (f"{KEYED}; {LOG}", "t:\nlog:", CAPTURE),
    "names": (
        'create schema "a\'b"; create table "a\'b"."x\n\\y :v" ("say ""hi""" text)',
        '"a\'b.*":',
        CAPTURE,
    ),
    "a sequence and a schema": (
        "create schema inner_; create table inner_.t (id serial primary key)",
        "inner_.t:",
        "sequences: true",
    ),
}


async def report_of(checker: Checker) -> CheckReport:
    report = (await examine(*static_mapping.load(checker.path))).report
    # The servers of the tests run without fsync, and stay so.
    report.findings = [each for each in report.findings if "fsync" not in each.problem]
    return report


def run_script(checker: Checker, script: str, path: Path) -> None:
    """Run the script as the administrator, whose session is in a separate database."""
    path.write_text(script)
    psql = versions()[version_of_tests()] / "psql"
    url = checker.source.server.url("postgres")
    command = [str(psql), "-X", "-q", "-f", str(path), url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{done.stderr}\n{script}"


@pytest.mark.parametrize("world", WORLDS)
async def test_after_one_run_of_the_script_the_next_check_is_ready(
    role: str, checker: Checker, tmp_path: Path, world: str
) -> None:
    ddl, tables, group = WORLDS[world]
    checker.source.server.execute(f"alter role {role} noreplication")
    checker.source.execute(ddl)
    checker.source.url_user = role
    checker.configure(tables, group=group)

    first = await report_of(checker)
    assert not first.is_ready
    run_script(checker, sql_file(first), tmp_path / "check.sql")

    again = await report_of(checker)
    assert again.is_ready
    assert again.table_count == first.table_count
    assert sql_file(again).count(";\n") == 0, sql_file(again)


@pytest.mark.parametrize("makes", [True, False], ids=["streamer makes tables", "by hand"])
async def test_the_script_gives_the_rights_at_both_sides(
    role: str, checker: Checker, tmp_path: Path, makes: bool
) -> None:
    checker.source.execute(
        "create schema inner_; create type inner_.mood as enum ('ok');"
        "create table inner_.t (id int primary key, m inner_.mood);"
        "create table inner_.u (id int primary key, m inner_.mood); create table present (id int)"
    )
    checker.target.execute(
        "create table present (id int); revoke all on schema public from public;"
        f"revoke temporary on database {checker.target.name} from public"
    )
    for side in (checker.source, checker.target):
        side.url_user = role
    checker.configure("inner_.*:\npresent:")
    checker.path.write_text(
        checker.path.read_text().replace("{url", f"{{create_tables: {str(makes).lower()}, url", 1)
    )

    first = await report_of(checker)
    run_script(checker, sql_file(first), tmp_path / "check.sql")

    again = await report_of(checker)
    assert again.is_ready, "\n".join(map(str, again.findings))


async def test_statements_that_harm_others_are_comments(checker: Checker, tmp_path: Path) -> None:
    checker.source.execute(KEYED)
    checker.target.execute(f"{KEYED}; insert into t values (1)")
    checker.source.execute("select pg_create_physical_replication_slot('streamer_shop')")
    try:
        checker.configure("t:")
        report = await report_of(checker)
        assert matching(report.findings, Severity.ERROR, "pg_drop_replication_slot")
        assert matching(report.findings, Severity.ERROR, "truncate")

        script = sql_file(report)
        run_script(checker, script, tmp_path / "check.sql")

        assert "--   truncate" in script
        assert checker.target.value("select count(*) from t") == 1
    finally:  # the slot is there still
        checker.source.execute("select pg_drop_replication_slot('streamer_shop')")


async def test_the_command_prints_statements_that_psql_takes(
    role: str, checker: Checker, tmp_path: Path
) -> None:
    checker.source.execute(KEYED)
    checker.source.url_user = role
    checker.configure("t:", group=CAPTURE)
    path = tmp_path / "all.sql"
    version = int(str(checker.source.value("show server_version_num")))

    printed = await asyncio.to_thread(invoke, "-c", str(checker.path), "check", "--sql", str(path))

    assert printed.exit_code == 1, printed.output
    (create,) = [
        sql
        for sql in create_sql(static_mapping.load(checker.path)[1].sources[0], role, version)
        if sql.startswith("create or replace function") and ".cut()" in sql
    ]
    assert f"\n{create};\n" in printed.output
    run_script(checker, path.read_text().replace("alter system set fsync = on;", ""), path)
    assert (await report_of(checker)).is_ready
    refused = await asyncio.to_thread(
        invoke, "-c", str(checker.path), "check", "--sql", str(tmp_path)
    )
    assert refused.exit_code == 2
    assert f"--sql {tmp_path}: Is a directory" in refused.output
