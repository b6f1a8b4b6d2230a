"""Swapped urls of two databases of a server: all screens name only the url."""

import pytest

from streamer.admin.live.problem_view import problems_for_operator
from streamer.bookkeeping.scripts import ScriptSide
from streamer.commands.check.check import check
from streamer.commands.execute_script import Script, execute
from streamer.commands.status import read_report
from streamer.commands.teardown import teardown
from streamer.errors.error_classes import SourceDatabaseError
from streamer.errors.remedies import CONTINUES
from streamer.report.problems import ProblemKind
from streamer.target.connection import TargetAddress
from tests.support.comparing import Compare
from tests.support.postgres import Database, database
from tests.support.streamer import MakeStreamer, write_config

TABLE = "create table t (id int, sid text, v text, primary key (sid, id))"
RULES = "t: {initial: none}"
SLOTS = "select slot_name, database::text from pg_replication_slots order by 1"
CORRECT = "correct the url, and reload the mapping (SIGHUP or `streamer apply`)"
TOLD = "the url of shop:{} leads to database {} instead of {}"


async def test_swapped_urls_of_two_databases_name_both_and_offer_nothing_else(
    source: Database, target: Database, stream: MakeStreamer, compare: Compare
) -> None:
    # GIVEN two tenants in two databases of a server
    source.execute("create table t (id int primary key, v text)")
    target.execute(TABLE)
    with database(source.server, "s01") as other:
        other.execute("create table t (id int primary key, v text)")
        one, two = (db.value("select current_database()") for db in (source, other))
        async with stream(RULES, sid="s00", others={"s01": other}) as streamer:
            await streamer.caught_up()
            source.execute("insert into t values (1, 'a')")
            other.execute("insert into t values (1, 'b')")
            await streamer.caught_up()
            slots = source.execute(SLOTS)

            # WHEN an operator swaps the urls
            write_config(streamer.path, other, target, RULES, sid="s00", others={"s01": source})
            await streamer.apply()

            async def are_stopped() -> bool:
                failures = [each.failure for each in streamer.engine.supervisors]
                return all(isinstance(each, SourceDatabaseError) for each in failures)

            await streamer.eventually(are_stopped)

            # THEN every screen has the same words, and neither a copy nor SQL
            told = {TOLD.format("s00", two, one), TOLD.format("s01", one, two)}
            address = TargetAddress.parse(streamer.settings.target.url)
            report = await read_report(address, streamer.mapping)
            problems = [problem for status in report.sources for problem in status.problems]
            assert {(each.kind, each.text) for each in problems} == {
                (ProblemKind.SOURCE, text) for text in told
            }
            assert {str(each.remedy) for each in problems} == {f"{CORRECT}; {CONTINUES}"}
            items = problems_for_operator([status.to_json() for status in report.sources])
            assert [item["buttons"] for item in items] == [[], []]
            assert not any(part["lines"] for item in items for part in item["remedy"])
            assert {reason["error"] for reason in streamer.engine.readiness()} == {
                f"{text}; {CORRECT}; {CONTINUES}" for text in told
            }
            found = (await check(streamer.settings, streamer.mapping)).findings
            about = [each for each in found if each.place.source is not None]
            assert {each.problem for each in about} == told
            assert not any(each.fix and each.fix.sql for each in about)

            # AND the tables keep the positions, and the slots stay
            assert all(t.state == "ready" for status in report.sources for t in status.tables)
            assert source.execute(SLOTS) == slots

            # AND no comparison judges the rows of the wrong tenant
            with pytest.raises(SourceDatabaseError, match="instead of"):
                await compare(streamer)

            # AND no script commits there
            script = Script("s", "insert into t values (9, 'x')", ScriptSide.SOURCE)
            sources = streamer.mapping.sources
            with pytest.raises(SourceDatabaseError, match="instead of"):
                await execute(address, sources, script, seconds=1, target_namespace="public")

            # AND a teardown leaves objects and bookkeeping of both, because the url reaches the
            # wrong tenant
            tenant = [each for each in sources if each.sid == "s00"]
            spools = streamer.settings.spool.path
            (result,) = await teardown(address, tenant, spools, actor="test")
            assert str(result.error) == f"{TOLD.format('s00', two, one)}; {CORRECT}"
            assert source.execute(SLOTS) == slots
            assert other.value("select count(*) from pg_publication") == 2
            assert target.value("select count(*) from streamer.relation") == 2

            # AND with the right urls, both tenants go on.
            write_config(streamer.path, source, target, RULES, sid="s00", others={"s01": other})
            source.execute("insert into t values (2, 'a')")
            await streamer.apply()
            await streamer.caught_up()
            rows = target.execute("select sid, id, v from t order by 1, 2")
            assert rows == [("s00", 1, "a"), ("s00", 2, "a"), ("s01", 1, "b")]
