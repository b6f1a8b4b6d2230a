"""`streamer check` prints the consequences that the next start of `run` draws for each table."""

import re

import pytest

from streamer.commands.check.check import check
from streamer.config import static_mapping
from streamer.report.problems import Severity
from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer, write_config
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("without_spark", "short_backoffs")

TABLES = (
    "same",
    "lost",
    "gained",
    "outside",
    "kept",
    "gone",
    "listed",
    "filtered",
    "strange",
    "replaced",
    "renamed",
)
RULES = """
same:
lost:
"gain*": {}
outside:
kept: {on_table_dropped: keep}
"gone*": {}
listed: {column_list: true, exclude: [secret]}
filtered:
strange:
replaced: {on_table_dropped: keep}
"r*": {}
"""
EXPECTED = {
    # The table: the words of `check`, and the state at the next start.
    "same": (None, "", "ready"),
    "lost": (Severity.ERROR, "the source refuses the application's UPDATE and DELETE", "error"),
    "gained": (Severity.WARNING, "its replica identity has changed, so `run` copies", "ready"),
    "outside": (Severity.ERROR, "was unpublished for a time", "error"),
    "kept": (Severity.INFO, "its rows stay in the target", None),
    "gone": (Severity.ERROR, "no longer exists at the source", "error"),
    "listed": (Severity.WARNING, 'did not send column "later", so `run` copies', "ready"),
    "filtered": (Severity.ERROR, "omits rows by a row filter of public.filtered", "error"),
    "strange": (
        Severity.ERROR,
        'renamed to "public.x" at the source: no rule matches',
        "error",
    ),
    "replaced": (Severity.WARNING, "another table of the source has its name now", "ready"),
    "renamed": (Severity.INFO, "is public.r_2 now", None),
}


@pytest.mark.since(15)  # lists of columns
async def test_check_prints_the_plan_that_run_executes(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for name in TABLES:
        key = "" if name == "gained" else " primary key"
        source.execute(
            f"create table {name} (id int{key}, v text, secret text);"
            f"insert into {name} values (1, 'a', 'b')"
        )
    async with stream(RULES, group="ddl: capture") as streamer:
        await streamer.caught_up(60)
        path = streamer.path
    source.execute(
        "alter table lost drop constraint lost_pkey;"
        "alter table gained add primary key (id);"
        "alter publication streamer_shop drop table outside;"
        "alter publication streamer_shop add table outside;"
        "drop table kept, gone;"
        "alter table listed add later int;"
        "alter publication streamer_shop drop table filtered;"
        "alter publication streamer_shop add table filtered where (id > 0);"
        "alter table strange rename to x;"
        "drop table replaced; create table replaced (id int primary key, v text, secret text);"
        "alter table renamed rename to r_2"
    )

    report = await check(*static_mapping.load(path))

    words = re.compile("|".join(re.escape(text) for _, text, _ in EXPECTED.values() if text))
    printed = {
        (finding.place.object, finding.severity)
        for finding in report.findings
        if words.search(finding.problem)
    }
    assert printed == {
        (f"public.{name}", severity)
        for name, (severity, _, _) in EXPECTED.items()
        if severity is not None
    }
    async with stream(RULES, group="ddl: capture") as streamer:
        for name, (_, _, state) in EXPECTED.items():
            if state is not None:
                await streamer.table_state(f"public.{name}", state, 60)
        await streamer.table_state("public.r_2", "ready", 60)

        async def are_gone() -> bool:
            sources = {table["source"] for table in (await streamer.status())["tables"]}
            return sources.isdisjoint({"public.kept", "public.renamed"})

        await until(are_gone, seconds=60)


async def test_check_names_publications_that_another_session_dropped(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute("create table t (id int primary key)")
    async with stream("t:") as streamer:
        await streamer.caught_up(60)
        path = streamer.path
    source.execute("drop publication streamer_shop")
    report = await check(*static_mapping.load(path))
    (problem,) = [f for f in report.findings if "dropped by another session" in f.problem]
    assert problem.severity is Severity.ERROR
    assert problem.fix is not None
    assert "streamer resync" in str(problem.fix)


async def test_check_accepts_the_rows_of_a_table_that_returns_to_the_mapping(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute("create table t (id int primary key); create table other (id int primary key)")
    source.execute("insert into t values (1)")
    async with stream("t:\nother:") as streamer:
        await streamer.caught_up(60)
        path = streamer.path
    async with stream("other:") as streamer:
        await streamer.caught_up(60)
        write_config(path, source, target, "t:\nother:")
        source.execute("insert into t values (2)")
        report = await check(*static_mapping.load(path))
        assert not [finding for finding in report.findings if finding.severity is Severity.ERROR]
    async with stream("t:\nother:") as streamer:
        await streamer.caught_up(60)
        assert target.execute("select id from t order by id") == [(1,), (2,)]
