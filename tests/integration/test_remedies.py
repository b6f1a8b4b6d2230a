"""Remedies that the list of problems prints end the problem when an operator runs them."""

import asyncio

import pytest

from streamer.compare.comparison import ComparisonScope
from streamer.report.problems import ProblemKind
from tests.support.comparing import Compare
from tests.support.postgres import Database, assert_same
from tests.support.process import caught_up
from tests.support.remedies import SECONDS, Operator, are_gone, find_in, read_problems
from tests.support.runbooks import block, run_block
from tests.support.streamer import MakeStreamer

LACKS = {
    "filled": "id int primary key, v text, own text not null",
    "computed": "id int primary key, v text",
    "marked": "id int primary key, v text",
    "past": "id int, v text",
    "narrow": "id int primary key, v varchar(3)",
    "taken": "id int primary key, v text, constraint short check (length(v) < 3)",
}
RULES = """
filled: {initial: none}
computed: {initial: none, set: {loud: upper(v)}}
marked: {initial: none, metadata: {lsn: at}}
past: {initial: none, type: history}
narrow: {initial: none}
taken: {initial: none}
"""


@pytest.mark.follows("apply.rows.make_plan:_check_unfilled_columns")
@pytest.mark.follows("apply.rows.make_plan:_with_computed")
@pytest.mark.follows("apply.rows.make_plan:_with_metadata")
@pytest.mark.follows("apply.rows.make_plan:_check_history_columns")
@pytest.mark.follows("apply.write.rejection_advice:_run_at_target")
async def test_sql_for_the_target_ends_the_problem_of_each_table(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for table, columns in LACKS.items():
        source.execute(f"create table {table} (id int primary key, v text)")
        target.execute(f"create table {table} ({columns})")
    async with stream(RULES) as streamer:
        await streamer.caught_up(SECONDS)
        operator, find = Operator(streamer.path, source, target), find_in(streamer)
        for table in LACKS:
            source.execute(f"insert into {table} values (1, 'value')")
        for table in LACKS:
            problem = await find(f"public.{table}", ProblemKind.TABLE)
            assert problem.remedy is not None
            await operator.follow(problem.remedy, choose=0)
        # No resume: the tables go on without a request.
        await streamer.caught_up(SECONDS)
        await are_gone(streamer)
        assert target.value("select loud from computed") == "VALUE"
        assert target.value("select at is not null from marked")
        for table in ("filled", "narrow", "past", "taken"):
            assert source.execute(f"table {table}") == target.execute(f"select id, v from {table}")


@pytest.mark.follows("report.problems:_TableRules._resume")
@pytest.mark.follows("report.problems:_TableRules._resync")
@pytest.mark.follows("report.problems:_TableRules._of_rows")
@pytest.mark.follows("runtime.tables.table_events:_mass_delete_error")
async def test_commands_of_table_problems_end_them(
    source: Database, target: Database, stream: MakeStreamer, compare: Compare
) -> None:
    """A paused table, a mass delete, rows that differ, and changes in quarantine."""
    rules = (
        "paused: {initial: none}\n"
        "braked: {initial: none, max_deleted_rows: 2}\n"
        "unlike: {initial: none}\n"
        "kept: {initial: none, on_error: quarantine}"
    )
    names = ("paused", "braked", "unlike", "kept")
    for table in names:
        source.execute(f"create table {table} (id int primary key, v text)")
        target.execute(f"create table {table} (id int primary key, v text)")
    target.execute("alter table kept add constraint short check (length(v) < 3)")
    async with stream(rules) as streamer:
        operator, find = Operator(streamer.path, source, target), find_in(streamer)
        await streamer.caught_up(SECONDS)
        for table in names:
            source.execute(f"insert into {table} select g, 'v' from generate_series(1, 5) g")
        await streamer.caught_up(SECONDS)

        # GIVEN a problem of each kind
        await streamer.ask("pause", "public.paused")
        source.execute("delete from braked")
        target.execute("update unlike set v = 'x' where id = 1")
        source.execute("update kept set v = 'long' where id = 1")
        paused = await find("public.paused", ProblemKind.PAUSED)
        braked = await find("public.braked", ProblemKind.MASS_DELETE)
        kept = await find("public.kept", ProblemKind.QUARANTINE)
        await compare(streamer, ComparisonScope(("unlike",)))
        unlike = await find("public.unlike", ProblemKind.DIFFERENT)

        # WHEN an operator runs the commands of the remedies
        target.execute("alter table kept drop constraint short")
        for problem in (paused, unlike, kept):
            assert problem.remedy is not None
            await operator.follow(problem.remedy)
        assert braked.remedy is not None
        await operator.follow(braked.remedy, choose=0)

        # THEN no problem remains.
        await streamer.caught_up(SECONDS)
        await are_gone(streamer)
        for table in names:
            assert_same(source, target, table)


@pytest.mark.follows("schema_changes.definition_stop:stop_error")
@pytest.mark.follows("runbooks:definition-waits#1")
@pytest.mark.follows("runbooks:definition-waits#2")
@pytest.mark.follows("runbooks:definition-waits#3")
@pytest.mark.follows("runbooks:definition-waits#4")
async def test_each_command_of_a_definition_that_waits_lets_the_table_go_on(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute("create table applied (id int primary key, v text, gone int)")
        db.execute("create table skipped (id int primary key, v text, gone int)")
        db.execute("create table edited (id int primary key, note text)")
    rules = "applied: {initial: none}\nskipped: {initial: none}\nedited: {initial: none}"
    async with stream(rules, group="ddl: capture") as streamer:
        await streamer.caught_up(SECONDS)
        for table in ("applied", "skipped"):
            source.execute(f"alter table {table} drop column gone")
            source.execute(f"insert into {table} values (1, 'v')")
        source.execute(
            "insert into edited values (1, 'four');"
            "alter table edited alter note type int using length(note);"
            "insert into edited values (2, 3)"
        )
        find = find_in(streamer)
        await find("public.edited", ProblemKind.TABLE)
        listed = await asyncio.to_thread(run_block, streamer.path, "definition-waits#1")
        assert "using length(note)" not in listed
        for table, number, place in (
            ("applied", 0, "definition-waits#2"),
            ("skipped", 2, "definition-waits#3"),
        ):
            problem = await find(f"public.{table}", ProblemKind.TABLE)
            assert problem.remedy is not None
            names = {"orders": f"public.{table}"}
            assert str(problem.remedy.steps[number]) == block(place, names).strip()
            await asyncio.to_thread(run_block, streamer.path, place, names)
        names = {"orders": "edited"}
        await asyncio.to_thread(run_block, streamer.path, "definition-waits#4", names)
        await streamer.caught_up(SECONDS)
        await are_gone(streamer)
        assert_same(source, target, "applied")
        assert_same(source, target, "edited")
        assert target.execute("table skipped") == [(1, "v", None)]


@pytest.mark.follows("source.identity_advice:IdentityAdvice.remedy")
@pytest.mark.follows("report.problems:_TableRules._of_definitions")
@pytest.mark.follows("copy.prepare_copy:_choose_mode")
async def test_commands_for_lost_identities_bring_updates_back_or_do_without(
    source: Database, target: Database, stream: MakeStreamer, without_spark: None
) -> None:
    """Two tables go on without updates at first, and a third keeps the past."""
    names = ("mended", "inserts", "past", "declared")
    for table in names:
        source.execute(f"create table {table} (id int primary key, v int)")
        source.execute(f"insert into {table} values (1, 1)")
    target.execute("create table declared (id int, v int); insert into declared values (1, 1)")
    source.execute("alter table declared drop constraint declared_pkey")
    rules = "mended:\ninserts:\npast: {type: history}\ndeclared: {initial: none}"
    async with stream(rules) as streamer:
        operator, find = Operator(streamer.path, source, target), find_in(streamer)
        await streamer.caught_up(SECONDS)

        async def mend(table: str, kind: ProblemKind, choose: int | None = None) -> None:
            problem = await find(f"public.{table}", kind)
            assert problem.remedy is not None
            await operator.follow(problem.remedy, choose=choose)

        # GIVEN three tables without the keys by which the target finds rows
        for table in ("mended", "inserts", "past"):
            source.execute(f"alter table {table} drop constraint {table}_pkey")

        # WHEN an operator runs the commands of each
        await mend("past", ProblemKind.TABLE)
        await mend("mended", ProblemKind.TABLE, choose=0)
        await mend("inserts", ProblemKind.TABLE, choose=1)
        # streamer copies no rows over rows of `initial: none` without a request.
        await mend("declared", ProblemKind.INSERTS_ONLY)
        await mend("declared", ProblemKind.TABLE)
        await streamer.caught_up(SECONDS)
        source.execute("insert into inserts values (2, 2)")
        await mend("inserts", ProblemKind.INSERTS_ONLY)

        # THEN updates arrive again.
        await streamer.caught_up(SECONDS)
        await are_gone(streamer)
        for table in names:
            source.execute(f"update {table} set v = 3 where id = 1")
        await streamer.caught_up(SECONDS)
        for table in ("mended", "inserts", "declared"):
            assert_same(source, target, table)
        assert target.execute("select v from past order by kvsz_id") == [(1,), (3,)]


@pytest.mark.follows("copy.refused_values:_remedy_for_values")
async def test_statements_and_command_of_a_copy_with_values_that_the_target_refuses_end_the_problem(
    source: Database, target: Database, stream: MakeStreamer, without_spark: None
) -> None:
    """A column of the target is narrower, and a type of the target lacks a label."""
    for db, size, labels in ((source, 9, "'calm', 'cross'"), (target, 3, "'calm'")):
        db.execute(
            f"create type mood as enum ({labels});"
            f"create table wide (id int primary key, v varchar({size}));"
            "create table felt (id int primary key, m mood)"
        )
    source.execute("insert into wide values (1, 'too long'); insert into felt values (1, 'cross')")
    async with stream("wide:\nfelt:") as streamer:
        operator, find = Operator(streamer.path, source, target), find_in(streamer)
        for table in ("wide", "felt"):
            problem = await find(f"public.{table}", ProblemKind.TABLE)
            assert problem.remedy is not None
            await operator.follow(problem.remedy)
        await streamer.caught_up(SECONDS)
        await are_gone(streamer)
        for table in ("wide", "felt"):
            assert_same(source, target, table)


@pytest.mark.follows("report.problems:")
async def test_the_command_for_a_source_without_a_process_streams_it(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key)")
    async with stream("t: {initial: none}") as streamer:
        await streamer.caught_up(SECONDS)
        await streamer.stop()
        source.execute("insert into t values (1)")
        (problem,) = await read_problems(streamer)
        assert problem.kind is ProblemKind.STOPPED
        assert problem.remedy is not None
        with Operator(streamer.path, source, target).start(problem.remedy) as process:
            await asyncio.to_thread(caught_up, process)
            assert_same(source, target, "t")
            assert not await read_problems(streamer)
            process.terminate()
