"""A dropped, renamed, misspelled or unpublished table stops, and the other tables continue."""

import asyncio
from pathlib import Path
from typing import Any

import psycopg
import pytest

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.registered_relations import forget_relation, register_relations
from streamer.bookkeeping.relation_records import read_relation_records
from streamer.commands.check.check import check
from streamer.commands.check.findings import Finding
from streamer.config import static_mapping
from streamer.control.table_state import Need
from streamer.copy.copy_snapshot import HeldSnapshot
from streamer.errors.error_classes import SourceContentionError
from streamer.mapping.relation_names import RelationName, RelationPattern, parse_name
from streamer.mapping.rules import RelationMapping, SourceMapping, TableRule
from streamer.postgres.secret import Secret
from streamer.report.problems import Severity
from streamer.runtime.guards import publications
from streamer.runtime.guards import source_monitor as watch
from streamer.runtime.guards.publications import Publishing
from streamer.source.connection import Connection, connection
from streamer.source.guarded_identities import read_identities
from streamer.source.slot_and_publications import publication
from streamer.source.slot_and_publications.publication import WantedMembers, ensure_publications
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database, assert_same
from tests.support.remedies import Operator, remedy_of
from tests.support.runbooks import run_block
from tests.support.streamer import MakeStreamer, Streamer, write_config
from tests.support.waiting import until
from tests.unit.build import source_mapping

TABLES = "a:\nb:\nc:\nd:\ngood:"


async def run_remedy(
    streamer: Streamer, source: Database, target: Database, table: str, words: str = ""
) -> None:
    """Run the steps of the table's error."""
    remedy = await remedy_of(streamer, f"public.{table}", words)
    await Operator(streamer.path, source, target).follow(remedy)


async def test_each_stops_alone_and_comes_back_by_its_remedy(
    source: Database, target: Database, stream: MakeStreamer, without_spark: None
) -> None:
    for table in ("a", "b", "c", "d", "good"):
        source.execute(f"create table {table} (id int primary key, v text)")
        source.execute(f"insert into {table} values (1, '{table}')")
    async with stream(TABLES) as streamer:
        await streamer.caught_up(60)

        async def execute(sql: str) -> None:
            await asyncio.to_thread(source.execute, sql)

        await execute("drop table a")
        # Two tables swap names in a transaction, and both stay published.
        await execute(
            "begin; alter table b rename to x; alter table c rename to b;"
            " alter table x rename to c; insert into b values (2, 'was c'); commit"
        )
        await execute("alter publication streamer_shop drop table d; insert into d values (2, 'x')")
        for table in "abcd":
            await streamer.table_state(f"public.{table}", "error", 60)
        await execute("insert into good values (2, 'others go on')")

        async def has_arrived() -> bool:
            return target.value("select count(*) from good") == 2

        await streamer.eventually(has_arrived, 60)
        assert (await streamer.status())["state"] == "streaming"
        # No row of a different table came in under the name.
        assert target.execute("select v from b") == [("b",)]
        assert "dropped or renamed it" in (await streamer.table("public.a"))["error"]
    # The state outlives the process, and streamer copies no table without a request.
    await execute("create table a (id int primary key, v text); insert into a values (9, 'anew')")
    async with stream(TABLES) as streamer:
        for table in "abcd":
            assert (await streamer.table(f"public.{table}"))["state"] == "error"
        await execute("insert into good values (3, 'third')")
        for table in "abcd":
            await run_remedy(streamer, source, target, table)
        await streamer.caught_up(60)
        await execute("update d set v = 'live again'; update a set v = 'live again'")
        await streamer.caught_up(60)
        for table in ("a", "b", "c", "d", "good"):
            assert_same(source, target, table)


async def test_a_misspelt_table_keeps_nobody_from_starting(
    source: Database, target: Database, stream: MakeStreamer, without_spark: None
) -> None:
    source.execute("create table good (id int primary key); insert into good values (1)")
    async with stream("good:\nlate:") as streamer:
        await streamer.table_state("public.good", "ready", 60)
        late = await streamer.table("public.late")
        assert late["state"] == "error"
        assert (
            'table "public.late" does not exist at the source; create the table there'
            in late["error"]
        )
        source.execute("insert into good values (2)")
        # No change is missing, so streamer copies the table as soon as it exists.
        await asyncio.to_thread(
            source.execute, "create table late (id int primary key); insert into late values (7)"
        )
        await streamer.table_state("public.late", "ready", 60)
        await streamer.caught_up(60)
        assert_same(source, target, "late")
        assert_same(source, target, "good")


@pytest.mark.follows("source.slot_and_publications.publication:PublicationFault.error")
@pytest.mark.follows("source.slot_and_publications.publication:unlogged_error")
@pytest.mark.follows("runbooks:table-gone#1")
async def test_publications_that_check_calls_unfit_are_not_streamed_from(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    without_spark: None,
    tmp_path: Path,
) -> None:
    """`run` names the statement that `check` prints, and goes on when it was run."""
    source.execute(
        """
        create table t (id int primary key, v text); insert into t values (1, 'a');
        create table p (id int primary key) partition by range (id);
        create table p1 partition of p for values from (0) to (10);
        create publication streamer_shop for all tables with (publish = 'insert');
        create publication streamer_shop_ins with (publish = 'insert, truncate')
        """
    )
    write_config(tmp_path / "check.yaml", source, target, "t:\np:")
    settings, mapping = static_mapping.load(tmp_path / "check.yaml")
    report = await check(settings, mapping)
    errors = [f for f in report.findings if f.severity is Severity.ERROR]
    statements = [sql for finding in errors if finding.fix is not None for sql in finding.fix.sql]
    assert len(statements) == 3
    warned = [f for f in report.findings if "SET UNLOGGED" in f.problem]
    assert [(f.severity, f.place.object) for f in warned] == [
        (Severity.WARNING, 'publication "streamer_shop"')
    ]
    async with stream("t:\np:") as streamer:
        await streamer.table_state("public.t", "error", 60)
        assert (
            "does not publish update, delete, truncate"
            in (await streamer.table("public.t"))["error"]
        )
        assert (
            "publishes partitions by their own names" in (await streamer.table("public.p"))["error"]
        )
        shown = await asyncio.to_thread(run_block, streamer.path, "table-gone#1", code=1)
        assert all(sql in shown for sql in statements), shown
        await run_remedy(streamer, source, target, "t")
        await streamer.caught_up(60)
        source.execute("update t set v = 'b'; insert into p values (1)")
        await streamer.caught_up(60)
        assert_same(source, target, "t")
        assert_same(source, target, "p")
        # A publication of all tables does not show that a new table has the name.
        await asyncio.to_thread(
            source.execute,
            "begin; alter table t rename to old; create table t (id int primary key, v text);"
            " insert into t values (5, 'anew'); commit; insert into t values (6, 'anew')",
        )
        await streamer.table_state("public.t", "error", 60)
        assert target.execute("select id from t") == [(1,)]
        await run_remedy(streamer, source, target, "t")
        await streamer.caught_up(60)
        assert_same(source, target, "t")
        # The source decodes no change of an unlogged table or partition.
        await asyncio.to_thread(source.execute, "alter table p1 set unlogged")
        await streamer.table_state("public.p", "error", 60)
        assert 'alter table "public"."p1" set logged' in (await streamer.table("public.p"))["error"]
        found = (await check(settings, mapping)).findings
        assert any("changes of unlogged partitions" in finding.problem for finding in found)
        source.execute("insert into p values (2)")
        await run_remedy(streamer, source, target, "p")
        await streamer.caught_up(60)
        assert_same(source, target, "p")
        # A foreign operator narrows the publication of a table that streams.
        narrow = "alter publication streamer_shop set (publish = 'insert')"
        await asyncio.to_thread(source.execute, f"{narrow}; update t set v = 'unseen'")
        await run_remedy(streamer, source, target, "t", "does not publish update")
        remedy = await remedy_of(streamer, "public.p", "once for all tables of the publication")
        await Operator(streamer.path, source, target).follow(remedy, choose=1)
        await streamer.caught_up(60)
        source.execute("update t set v = 'seen'")
        await streamer.caught_up(60)
        assert_same(source, target, "t")
        await asyncio.to_thread(source.execute, "alter table t set unlogged")
        await streamer.table_state("public.t", "error", 60)


@pytest.mark.since(15)  # schemas in publications
async def test_a_table_that_left_a_published_schema_for_a_moment_stops(
    source: Database, target: Database, stream: MakeStreamer, without_spark: None
) -> None:
    """The source decodes no change that the table has meanwhile."""
    source.execute(
        "create table t (id int primary key, v text); insert into t values (1, 'a');"
        " create schema away; create publication streamer_shop for tables in schema public"
        " with (publish_via_partition_root = true)"
    )
    async with stream("t:") as streamer:
        await streamer.caught_up(60)
        await asyncio.to_thread(
            source.execute,
            "begin; alter table t set schema away; insert into away.t values (2, 'unseen');"
            " alter table away.t set schema public; commit",
        )
        source.execute("insert into t values (3, 'c')")
        await streamer.table_state("public.t", "error", 60)
        assert "was unpublished for a time" in (await streamer.table("public.t"))["error"]
        await run_remedy(streamer, source, target, "t")
        await streamer.caught_up(60)
        assert_same(source, target, "t")


def test_a_publication_that_names_a_table_keeps_it_logged(source: Database) -> None:
    """The reason for the warning above: only a list of tables makes PostgreSQL refuse."""
    source.execute(
        "create table listed (id int primary key); create publication list for table listed;"
        " create table other (id int primary key); create publication everything for all tables"
    )
    with pytest.raises(psycopg.Error, match="is part of a publication"):
        source.execute("alter table listed set unlogged")
    source.execute("alter table other set unlogged; alter table other set logged")


@pytest.mark.follows("runtime.guards.reconcile:_require_publications")
async def test_a_locked_partition_keeps_nobody_from_guarding(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    without_spark: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "GUARD_SECONDS", 0.2)
    source.execute(
        """
        create table p (id int primary key) partition by range (id);
        create table p1 partition of p for values from (0) to (10);
        create table t (id int primary key);
        create table past (id int primary key, v int); insert into past values (1, 1)
        """
    )
    async with stream("p:\nt:\npast: {type: history}") as streamer:
        await streamer.caught_up(60)
        with source.connect() as user, user.transaction():
            user.execute("lock table p1, t in access exclusive mode")
            # This statement ends the membership without a lock on the table.
            source.execute("delete from pg_publication_rel where prrelid = 't'::regclass")
            await streamer.table_state("public.t", "error", 60)
            status = await streamer.status()
            assert status["state"] == "streaming"
            source.execute("alter publication streamer_shop rename to somebody_elses")

            async def is_said() -> bool:
                return "was dropped" in ((await streamer.status())["error"] or "")

            await streamer.eventually(is_said, 60)
        source.execute("insert into p values (1); insert into t values (1)")
        source.execute("update past set v = 2; update past set v = 3")
        remedy = await remedy_of(streamer, None, "was dropped")
        await Operator(streamer.path, source, target).follow(remedy)
        await streamer.caught_up(60)
        source.execute("insert into p values (2); insert into t values (2); update past set v = 4")
        await streamer.caught_up(60)
        for table in ("p", "t"):
            assert_same(source, target, table)
        assert target.execute("select v from past order by kvsz_id") == [(1,), (3,), (4,)]


@pytest.mark.parametrize("lost", ["membership", "updates"])
async def test_a_copy_begins_again_if_the_stream_lacks_changes_after_its_snapshot(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    without_spark: None,
    monkeypatch: pytest.MonkeyPatch,
    lost: str,
) -> None:
    """The process learns the position of the snapshot only after the source has the snapshot."""
    monkeypatch.setattr(watch, "GUARD_SECONDS", 0.2)
    key = "" if lost == "updates" else " primary key"
    source.execute(f"create table t (id int{key}, v text); insert into t values (1, 'a')")
    take_over = HeldSnapshot.take_over
    has_snapshot, may_continue = asyncio.Event(), asyncio.Event()

    async def take_over_late(*arguments: Any) -> HeldSnapshot:
        has_snapshot.set()
        await may_continue.wait()
        return await take_over(*arguments)

    async with stream("t:") as streamer:
        await streamer.caught_up(60)
        facts = "select publication_membership, state from streamer.relation"
        monkeypatch.setattr(HeldSnapshot, "take_over", take_over_late)
        await streamer.ask("resync")
        await has_snapshot.wait()
        former = target.execute(facts)
        if lost == "membership":
            statements = (
                "alter publication streamer_shop drop table t; insert into t values (2, 'b');"
                "alter publication streamer_shop add table only t"
            )
        else:
            statements = "alter table t add primary key (id); update t set v = 'b'"
        await asyncio.to_thread(source.execute, statements)

        async def is_noticed() -> bool:
            return target.execute(facts) != former

        await streamer.eventually(is_noticed)
        may_continue.set()
        await streamer.table_state("public.t", "ready")
        source.execute("insert into t values (3, 'c')")
        await streamer.caught_up(60)
        assert_same(source, target, "t")


async def test_a_table_stops_that_was_unpublished_while_streamer_changed_its_publications(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    without_spark: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The guard reads the catalogs before and after its change."""
    monkeypatch.setattr(watch, "GUARD_SECONDS", 0.2)
    source.execute("create table t (id int primary key); create table other (id int primary key)")
    are_ready, was_unpublished = False, False

    async def ensure_and_change(*arguments: Any) -> Any:
        nonlocal was_unpublished
        result = await ensure_publications(*arguments)
        if are_ready and not was_unpublished:
            was_unpublished = True
            await asyncio.to_thread(
                source.execute,
                "alter publication streamer_shop drop table t; insert into t values (2);"
                "alter publication streamer_shop add table only t",
            )
        return result

    monkeypatch.setattr(publications, "ensure_publications", ensure_and_change)
    async with stream("t:\nother:") as streamer:
        await streamer.caught_up(60)
        are_ready = True
        await asyncio.to_thread(source.execute, "alter table other replica identity full")
        await run_remedy(streamer, source, target, "t", "was unpublished for a time")
        source.execute("insert into t values (3)")
        await streamer.caught_up(60)
        assert_same(source, target, "t")


@pytest.mark.since(15)  # column lists
async def test_a_stopped_table_that_leaves_its_publication_has_a_new_remedy(
    source: Database, target: Database, stream: MakeStreamer, without_spark: None
) -> None:
    """The first remedy removes a member that no longer exists."""
    source.execute("create table t (id int primary key, v int)")
    leave = "alter publication streamer_shop drop table t"
    async with stream("t:") as streamer:
        await streamer.caught_up(60)
        added = "alter publication streamer_shop add table only t (id)"
        await asyncio.to_thread(source.execute, f"{leave}; {added}; insert into t values (1, 1)")
        await remedy_of(streamer, "public.t", "omits columns by a column list")
        await asyncio.to_thread(source.execute, leave)
        await run_remedy(streamer, source, target, "t", "was unpublished for a time")
        source.execute("insert into t values (2, 2)")
        await streamer.caught_up(60)
        assert_same(source, target, "t")


async def test_a_resync_that_follows_the_error_at_once_copies_the_table(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    without_spark: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The guard stores the error, and may then wait for a lock before the table stops."""
    monkeypatch.setattr(watch, "GUARD_SECONDS", 0.2)
    source.execute("create table t (id int primary key)")
    store_cases, has_requested = Publishing._store_cases, False
    async with stream("t:") as streamer:
        await streamer.caught_up(60)

        async def store_and_request(self: Publishing, cases: Any, relations: Any) -> Any:
            nonlocal has_requested
            result = await store_cases(self, cases, relations)
            if cases and not has_requested:
                has_requested = True
                (mapped,) = relations.values()
                await streamer.ask("resync")
                await until(lambda: mapped.state.need is Need.ROWS)
            return result

        monkeypatch.setattr(Publishing, "_store_cases", store_and_request)
        await asyncio.to_thread(
            source.execute,
            "alter publication streamer_shop drop table t; insert into t values (1);"
            "alter publication streamer_shop add table only t",
        )
        await until(lambda: has_requested)
        await streamer.table_state("public.t", "ready")
        source.execute("insert into t values (2)")
        await streamer.caught_up(60)
        assert_same(source, target, "t")


@pytest.mark.since(15)  # column lists and row filters
@pytest.mark.parametrize("cause", ["two lists", "filter"])
async def test_a_source_that_a_publication_made_undecodable_names_the_resync(
    source: Database, target: Database, stream: MakeStreamer, without_spark: None, cause: str
) -> None:
    """The source decodes each change under the publications of that time, so no new publication
    helps.
    """
    source.execute(
        "create table t (id int primary key, v int); create table past (id int primary key)"
    )
    async with stream("t:\npast: {type: history}") as streamer:
        await streamer.caught_up(60)
        if cause == "two lists":
            statements = (
                "alter publication streamer_shop_ins add table only t (id);insert into t values (0)"
            )
        else:
            statements = (
                "alter publication streamer_shop set table only past, only t where (1 / id > 0);"
                "insert into t values (0); alter publication streamer_shop set table past, t"
            )
        await asyncio.to_thread(source.execute, statements)
        words = "different column lists" if cause == "two lists" else "division by zero"
        remedy = await remedy_of(streamer, None, words)
        await Operator(streamer.path, source, target).follow(remedy)
        await streamer.caught_up(60)
        source.execute("insert into t values (1); insert into past values (1)")
        await streamer.caught_up(60)
        for table in ("t", "past"):
            assert source.execute(f"select id from {table}") == target.execute(
                f"select id from {table}"
            )


@pytest.mark.parametrize("verb", ["add", "drop"])
async def test_a_session_that_changes_a_membership_first_causes_contention(
    source: Database, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    source.execute("create table t (id int primary key)")
    mapping, execute = source_mapping(url=Secret(source.url)), publication._execute

    async def execute_late(plain: Connection, of: SourceMapping, statements: list[str]) -> None:
        for statement in statements:
            await asyncio.to_thread(source.execute, statement)
        await execute(plain, of, statements)

    async with connection(mapping) as plain:
        version = plain.info.server_version
        identities = await read_identities(plain, [RelationName("public", "t")])
        none, one = WantedMembers(), WantedMembers(list(identities.values()))
        before, after = (none, one) if verb == "add" else (one, none)
        await ensure_publications(plain, mapping, before, version)
        monkeypatch.setattr(publication, "_execute", execute_late)
        with pytest.raises(SourceContentionError, match="publication"):
            await ensure_publications(plain, mapping, after, version)


async def test_publications_made_by_an_administrator_may_have_more_tables(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    without_spark: None,
    tmp_path: Path,
) -> None:
    """The set-up of docs/tutorial.md: an ordinary role, which may not change the publications."""
    role = f"reader_{source.name}"
    source.execute(
        f"""
        create table a (id int primary key, v text); insert into a values (1, 'a');
        create table b (id int primary key, v text); insert into b values (1, 'b');
        create role {role} login replication; grant select on a, b to {role};
        create publication streamer_shop for table only a, only b
            with (publish = 'insert, update, delete, truncate', publish_via_partition_root = true);
        create publication streamer_shop_ins
            with (publish = 'insert, truncate', publish_via_partition_root = true)
        """
    )
    source.url_user = role
    attempts = "select source, attempt from streamer.relation order by 1"

    async def find(tables: str) -> list[Finding]:
        write_config(tmp_path / "check.yaml", source, target, tables)
        return (await check(*static_mapping.load(tmp_path / "check.yaml"))).findings

    try:
        async with stream("a:\nb:") as streamer:
            await streamer.caught_up(60)
        before = target.execute(attempts)
        # While no process runs, the rules lose table b, and get b back before any acknowledgement.
        found = [f for f in await find("a:") if "publication" in f.problem]
        assert [(f.severity, f.fix and f.fix.sql) for f in found] == [
            (Severity.WARNING, ('alter publication "streamer_shop" drop table only "public"."b"',))
        ]
        # A misspelt name is the only finding, and explains the surplus members.
        found = [f for f in await find("a:\nbb:") if f.severity is not Severity.INFO]
        assert [str(f.place) for f in found if "fsync" not in f.problem] == ["shop public.bb"]
        async with stream("a:\nbb:") as streamer:
            await streamer.table_state("public.a", "ready", 60)
            await streamer.table_state("public.bb", "error", 60)
            await streamer.source_state("streaming")
            source.execute(
                "insert into a values (2, 'goes on'); insert into b values (2, 'missed')"
            )

            async def has_arrived() -> bool:
                return target.value("select count(*) from a") == 2

            await streamer.eventually(has_arrived, 60)
        # The table comes back after missed changes: a copy replaces its rows, and readers see no
        # gap.
        async with stream("a:\nb:") as streamer:
            await streamer.caught_up(60)
            source.execute("update b set v = 'live'")
            await streamer.caught_up(60)
            assert_same(source, target, "b")
        assert target.execute(attempts)[0] == before[0]
    finally:
        source.execute(f"drop owned by {role}; drop role {role}")


async def test_a_table_that_comes_back_goes_on_if_nothing_has_passed(
    source: Database, target: Database, without_spark: None, stream: MakeStreamer
) -> None:
    source.execute("create table a (id int primary key); create table b (id int primary key)")
    async with stream("a:\nb:") as streamer:
        await streamer.caught_up(60)
    address = TargetAddress.parse(Secret(target.url))
    bookkeeping = Bookkeeping(address)
    try:
        mappings = {}
        for relation in await read_relation_records(bookkeeping):
            name = parse_name(relation.source)
            rule = TableRule(RelationPattern(name.namespace, name.name, False, False))
            mappings[relation.source] = RelationMapping(name, name, rule)
        before = {
            relation.source: relation for relation in await read_relation_records(bookkeeping)
        }
        for relation in before.values():
            await forget_relation(bookkeeping, relation.relation_id)
        assert await read_relation_records(bookkeeping) == []
        source_id = before["public.a"].source_id
        [back] = await register_relations(
            bookkeeping, source_id, [mappings["public.a"]], may_resume=True
        )
        assert (back.state, back.end_lsn, back.publication_membership) == (
            "ready",
            before["public.a"].end_lsn,
            before["public.a"].publication_membership,
        )
        async with bookkeeping.connection() as connection:
            await connection.execute(
                "update streamer.source set acknowledged_lsn = acknowledged_lsn + 1"
            )
        [back] = await register_relations(
            bookkeeping, source_id, [mappings["public.b"]], may_resume=True
        )
        assert (back.state, back.snapshot_lsn, back.owns_rows) == ("init", None, True)
    finally:
        await bookkeeping.close()
