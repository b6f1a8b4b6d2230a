"""``streamer check`` finds what would stop `run`, and what it says to run mends it."""

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from streamer.commands import requests as requests_command
from streamer.commands.check import source_facts
from streamer.commands.check.command import check
from streamer.commands.check.conversion import type_risk
from streamer.commands.check.findings import (
    CheckReport,
    Finding,
    Place,
    Severity,
    at_source,
    warning,
)
from streamer.commands.check.source import check_capacity, check_server, check_settings
from streamer.commands.check.source_facts import SourceFacts, Usage
from streamer.commands.embedded import Server, free_port
from streamer.config import static
from streamer.lsn import NOTHING, Lsn
from streamer.mapping.rules import (
    Initial,
    RelationMapping,
    RelationName,
    Secret,
    SourceMapping,
    TableRule,
    parse_relation,
)
from streamer.postgres.conninfo import parse_conninfo
from streamer.postgres.quoting import quote_literal
from streamer.source.catalog import SourceServer
from streamer.source.slot import Slot, drop_slot_sql
from streamer.source.stream import ReplicationStream, StreamOptions
from streamer.target.connection import TargetAddress, target_connection
from streamer.target.deferred_indexes import defer_indexes
from tests.support.postgres import Database, database, running, versions
from tests.support.process import command
from tests.support.streamer import MakeStreamer, write_config

ITEMS = "create table items (id int primary key, name text)"
ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO

_numbers = itertools.count(1)


async def run_check(path: Path) -> CheckReport:
    return await check(*static.load(path))


def matching(findings: list[Finding], severity: Severity, *words: str) -> list[Finding]:
    return [
        finding
        for finding in findings
        if finding.severity is severity and all(word in str(finding) for word in words)
    ]


class Checker:
    """Checks one source and one target, and does what a finding says."""

    def __init__(self, path: Path, source: Database, target: Database) -> None:
        self.path = path
        self.source = source
        self.target = target

    def configure(self, tables: str, *, group: str = "", **options: Any) -> None:
        if "transport:" not in group:  # what stands in the way of binary would be found everywhere
            group = f"transport: text\n{group}"
        write_config(self.path, self.source, self.target, tables, group=group, **options)

    async def findings(self) -> list[Finding]:
        # What the servers of tests are set to is of no interest here.
        return [f for f in (await run_check(self.path)).findings if "fsync" not in f.problem]

    async def finds(self, severity: Severity, *words: str) -> Finding:
        """Return the one finding that has all *words*."""
        findings = await self.findings()
        found = matching(findings, severity, *words)
        assert len(found) == 1, "\n".join(map(str, findings))
        assert "\n" not in str(found[0])
        return found[0]

    async def is_gone(self, severity: Severity, *words: str) -> None:
        findings = await self.findings()
        assert not matching(findings, severity, *words), "\n".join(map(str, findings))

    async def mends(self, severity: Severity, *words: str) -> Finding:
        """Find it, run what it says, and find it no more."""
        found = await self.finds(severity, *words)
        self.run_fix(found)
        await self.is_gone(severity, *words)
        return found

    def run_fix(self, finding: Finding) -> None:
        assert finding.fix is not None
        assert finding.fix.sql
        db = {"source": self.source, "target": self.target}[str(finding.fix.at)]
        assert f"run at the {finding.fix.at}: {'; '.join(finding.fix.sql)}" in str(finding)
        for statement in finding.fix.sql:
            db.execute(statement)


@pytest.fixture
def role(shared_server: Server) -> Iterator[str]:
    """A role that may do next to nothing. Name it before the databases: it is dropped after them."""
    name = f"lowly_{os.getpid()}_{next(_numbers)}"
    shared_server.execute(f"create role {name} login replication")
    yield name
    shared_server.execute(f"drop owned by {name}; drop role {name}")


@pytest.fixture
def checker(tmp_path: Path, source: Database, target: Database) -> Checker:
    return Checker(tmp_path / "config.yaml", source, target)


def both(checker: Checker, ddl: str) -> None:
    checker.source.execute(ddl)
    checker.target.execute(ddl)


# ---- the command -------------------------------------------------------------------------------


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
    assert report.to_json() == {"ready": True, "sources": 1, "tables": 2, "findings": []}


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
        "  or, which is faster, add a primary key\n"
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
    assert by_object["public.nowhere"]["problem"] == "is in `tables`, but not in the source"
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
    assert "correct its url, or check that its server runs" in str(found)
    assert matching(report.findings, WARNING, "shop:eu public.keyless: ")

    checker.configure("keyless:")
    text = checker.path.read_text()
    checker.path.write_text(text.replace(checker.target.url, checker.target.url + "_gone"))
    report = await run_check(checker.path)
    assert report.exit_code == 3
    assert matching(report.findings, ERROR, "target: ", "does not exist", "check role, password")
    assert matching(report.findings, WARNING, "public.keyless")

    checker.path.write_text(text.replace(checker.target.url, nowhere))
    result = command(checker.path, "check")
    assert result.returncode == 3, result
    assert "error   target: " in result.stdout
    assert "public.keyless" in result.stdout
    assert "hunter2" not in result.stdout + result.stderr


def test_wrong_configuration_is_exit_code_2_and_shows_no_secret(checker: Checker) -> None:
    checker.configure("items: {colour: blue}")
    result = command(checker.path, "check")
    assert (result.returncode, result.stdout) == (2, "")
    assert "config.yaml, line " in result.stderr
    assert result.stderr.count("\n") == 1
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


def test_a_password_in_text_is_blanked() -> None:
    url = "postgresql://me:hunter2@host/db"
    finding = warning(Place("shop", "a\nb"), f"cannot use {url}", at_source(f"connect {url}"))
    for text in (str(finding), json.dumps(finding.to_json())):
        assert "hunter2" not in text
    assert str(finding).startswith("warning shop a\\nb: cannot use")


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


# ---- a source's server -------------------------------------------------------------------------


async def test_a_server_that_is_not_set_up(server_directory: Path, tmp_path: Path) -> None:
    settings = {
        "wal_level": "replica",
        "max_replication_slots": "0",
        "max_wal_senders": "0",
        "max_slot_wal_keep_size": "64MB",
        "idle_replication_slot_timeout": "60",
        "wal_sender_timeout": "2s",
        "logical_decoding_work_mem": "64kB",
        "fsync": "on",
        "synchronous_commit": "off",
    }
    with (
        running(server_directory / "bare", versions()["18"], settings) as server,
        database(server, "s") as source,
        database(server, "t") as target,
    ):
        source.execute(ITEMS)
        checker = Checker(tmp_path / "config.yaml", source, target)
        checker.configure("items:")
        findings = await checker.findings()
        for severity, words in (
            (ERROR, "wal_level is replica"),
            (ERROR, "max_replication_slots is 0, of which 0 are free: 1 needed"),
            (ERROR, "max_wal_senders is 0, of which 0 are free: 1 needed"),
            (WARNING, "max_slot_wal_keep_size is 64 MB"),
            (WARNING, "idle_replication_slot_timeout is"),
            (WARNING, "wal_sender_timeout is 2000 ms"),
            (INFO, "logical_decoding_work_mem is 64 kB"),
        ):
            (found,) = matching(findings, severity, words)
            checker.run_fix(found)
        assert matching(findings, INFO, "synchronous_commit is off")
        server.stop()
        server.start()
        findings = await checker.findings()
        assert [f for f in findings if "synchronous_commit" not in f.problem] == []


SERVER = SourceServer(
    version=18_00_01,
    version_text="18.1",
    system_identifier="1",
    timeline=1,
    flush_lsn=Lsn(1),
    database="shop",
    wal_level="logical",
    wal_sender_timeout_seconds=60,
    role="me",
    role_may_replicate=True,
    is_superuser=False,
    in_recovery=False,
    max_replication_slots=10,
    max_wal_senders=10,
    settings={"wal_sender_timeout": "60000"},
)


def _source(
    name: str, *, slots: int, walsenders: int, slot: Slot | None = None, initial: Initial
) -> SourceFacts:
    """A source with one table on a server that has two slots and two walsenders."""
    facts = SourceFacts(SourceMapping(name, None, Secret(""), ()))
    facts.server = replace(SERVER, max_replication_slots=2, max_wal_senders=2)
    facts.usage = Usage(
        "UTF8",
        may_create=True,
        slots=slots,
        walsenders=walsenders,
        large_objects=0,
        is_target=False,
    )
    facts.is_complete, facts.slot = True, slot
    relation = RelationName("public", "t")
    rule = TableRule(parse_relation("t", "public"), initial=initial)
    facts.mappings = [RelationMapping(relation, relation, rule)]
    return facts


SLOT = Slot("s", "pgoutput", "shop", None, Lsn(1), Lsn(1), None)


def test_slots_and_walsenders_for_all_sources_of_a_server() -> None:
    def found(*sources: SourceFacts) -> list[tuple[str, str]]:
        findings = check_capacity(sources, None)
        return [(f.severity.value, f.problem.partition(" ")[0]) for f in findings]

    copy, none = Initial.COPY, Initial.NONE
    assert found(_source("a", slots=0, walsenders=0, initial=copy)) == []
    # Two sources: each holds a slot and a walsender, and a copy needs one more walsender at once.
    two = [_source(name, slots=0, walsenders=0, initial=copy) for name in "ab"]
    assert found(*two) == [("warning", "max_replication_slots"), ("error", "max_wal_senders")]
    two = [_source(name, slots=0, walsenders=0, initial=none) for name in "ab"]
    assert found(*two) == [("warning", "max_replication_slots"), ("warning", "max_wal_senders")]
    (slots, _) = check_capacity(
        [_source(n, slots=1, walsenders=0, initial=none) for n in "ab"], None
    )
    assert slots.severity is ERROR
    assert "max_replication_slots is 2, of which 1 are free: 2 needed" in str(slots)
    assert "alter system set max_replication_slots = 4; and restart" in str(slots)
    # With a slot of its own a copy makes another; who streams already needs nothing.
    held = _source("a", slots=2, walsenders=0, slot=SLOT, initial=copy)
    assert found(held) == [("error", "max_replication_slots")]
    streaming = replace(SLOT, active_pid=1)
    assert found(_source("a", slots=2, walsenders=2, slot=streaming, initial=copy)) == [
        ("warning", "max_replication_slots"),
        ("warning", "max_wal_senders"),
    ]


def test_servers_that_are_not_at_hand() -> None:
    place = Place("shop")
    assert not [*check_server(place, SERVER), *check_settings(place, SERVER, streams=True)]
    for server, severity, words in (
        (replace(SERVER, version=19_00_00), WARNING, "newer than any"),
        (replace(SERVER, version=15_00_00, in_recovery=True), ERROR, "standby"),
        (replace(SERVER, in_recovery=True), WARNING, "publications cannot be changed here"),
    ):
        assert matching(list(check_server(place, server)), severity, words)


async def test_a_role_that_may_nothing_at_the_source(role: str, checker: Checker) -> None:
    source = checker.source
    source.server.execute(f"alter role {role} noreplication")
    source.execute(f"{ITEMS}; create schema inner_; create table inner_.t (id int primary key)")
    source.execute("alter table items enable row level security")
    source.url_user = role
    checker.configure("items: {}\ninner_.t: {}")

    await checker.mends(ERROR, "may not replicate")
    published = await checker.finds(ERROR, "cannot publish the tables", "does not own")
    await checker.mends(ERROR, 'schema "inner_"', "may not use it")
    await checker.mends(ERROR, "inner_.t", "may not read it")
    await checker.mends(ERROR, "public.items", "may not read it")
    await checker.mends(ERROR, "row level security would hide rows")
    checker.run_fix(published)
    assert not matching(await checker.findings(), ERROR)
    # A table that nobody published comes on top: what is missing is what is to be run.
    source.execute(f"create table later (id int primary key); grant select on later to {role}")
    checker.configure("items: {}\ninner_.t: {}\nlater: {}")
    found = await checker.mends(ERROR, "does not own publication", "does not own public.later")
    assert found.fix is not None
    assert found.fix.sql == ('alter publication "streamer_shop" add table only "public"."later"',)


async def test_a_role_with_publications_and_slot_made_for_it(
    role: str, checker: Checker, stream: MakeStreamer
) -> None:
    """LOGIN and REPLICATION are enough for a stream; SELECT is for a copy."""
    both(checker, ITEMS)
    checker.source.url_user = role
    checker.configure("items: {initial: none}")
    await checker.mends(ERROR, "cannot publish the tables", "lacks CREATE on database")
    checker.source.execute("select pg_create_logical_replication_slot('streamer_shop', 'pgoutput')")
    assert await checker.findings() == []
    async with stream("items: {initial: none}") as streamer:
        await streamer.caught_up()
        checker.source.execute("insert into items values (1)")
        await streamer.caught_up()
    assert checker.target.execute("select * from items") == [(1, None)]


async def test_publications_made_beforehand_that_keep_something_back(checker: Checker) -> None:
    checker.source.execute(
        f"{ITEMS}; create table p (id int primary key) partition by range (id);"
        "create publication streamer_shop for table only items, only p with (publish = 'insert');"
        "create publication streamer_shop_ins with (publish = 'truncate')"
    )
    checker.configure("items: {}\np: {}")
    await checker.mends(ERROR, "does not publish update, delete, truncate")
    await checker.mends(ERROR, "does not publish insert")
    await checker.mends(ERROR, '"streamer_shop": publishes partitions by their own names')
    await checker.mends(ERROR, '"streamer_shop_ins": publishes partitions by their own names')
    assert not matching(await checker.findings(), ERROR)

    checker.source.execute(
        "alter publication streamer_shop set table only items where (id > 5), only p"
    )
    await checker.finds(WARNING, "public.items", "keeps back rows by a filter")
    checker.source.execute("alter publication streamer_shop set table only items (id), only p")
    await checker.finds(WARNING, "public.items", "keeps back columns by a list")
    checker.source.execute("drop publication streamer_shop, streamer_shop_ins")
    assert not matching(await checker.findings(), ERROR)


async def test_transactions_that_a_new_slot_waits_for(
    role: str, checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_facts, "LONG_SECONDS", 0.0)
    checker.source.execute(ITEMS)
    checker.configure("items:")
    with prepared(checker.source, "it's"):
        found = await checker.mends(WARNING, "waits for prepared transaction 'it''s'")
        assert f'in database "{checker.source.name}"' in str(found)
    with checker.source.connect() as connection:
        connection.autocommit = False
        connection.execute("insert into items values (2)")
        pid = connection.info.backend_pid
        # Of others, the role may not see how long they have been at it.
        checker.source.url_user = role
        checker.configure("items:")
        await checker.finds(WARNING, "a transaction that is open for a while", f"pid {pid},")
        checker.source.url_user = "postgres"
        checker.configure("items:")
        found = await checker.mends(WARNING, "waits for a transaction that is", f"pid {pid},")
        assert checker.source.name in str(found)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select 1")


@contextlib.contextmanager
def prepared(db: Database, gid: str) -> Iterator[None]:
    """Have a prepared transaction for the length of a block, or until somebody ends it."""
    db.execute(f"begin; insert into items values (1); prepare transaction {quote_literal(gid)}")
    try:
        yield
    finally:
        left = f"select 1 from pg_prepared_xacts where gid = {quote_literal(gid)}"
        if db.execute(left):
            db.execute(f"rollback prepared {quote_literal(gid)}")


async def test_encodings(checker: Checker, tmp_path: Path) -> None:
    server = checker.source.server
    names = {e: f"enc_{e.lower()}_{os.getpid()}" for e in ("SQL_ASCII", "LATIN1")}
    for encoding, name in names.items():
        server.execute(
            f"create database {name} encoding '{encoding}' lc_collate 'C' lc_ctype 'C'"
            " template template0"
        )
    try:
        ascii_, latin = (Database(server, name) for name in names.values())
        for db in (ascii_, latin, checker.source):
            db.execute(ITEMS)
        for source, target, words in (
            (ascii_, checker.target, "its encoding is SQL_ASCII"),
            (checker.source, ascii_, "the target's encoding is SQL_ASCII"),
            (checker.source, latin, "its encoding is UTF8, the target's LATIN1"),
        ):
            one = Checker(tmp_path / "encoding.yaml", source, target)
            one.configure("items: {initial: none}")
            await one.finds(WARNING, words)
        one = Checker(tmp_path / "encoding.yaml", latin, checker.target)
        one.configure("items:")
        assert await one.findings() == []
    finally:
        for name in names.values():
            server.execute(f"drop database {name} with (force)")


# ---- slot and progress -------------------------------------------------------------------------


async def streamed(checker: Checker, stream: MakeStreamer) -> None:
    """Let streamer run once, so that slot and progress are there."""
    both(checker, ITEMS)
    async with stream("items: {initial: none}") as streamer:
        await streamer.caught_up()
    checker.configure("items: {initial: none}")
    assert await checker.findings() == []


async def run_resync(checker: Checker, finding: Finding) -> None:
    """Do what the command of a finding does, and what `run` does with it at its start."""
    assert finding.fix is not None
    assert finding.fix.sql == ("streamer resync '*.*' --database shop",)
    settings, _ = static.load(checker.path)
    address = TargetAddress.parse(settings.target.url)
    await requests_command.request(address, "resync", "*.*", database="shop", sid=None)
    checker.target.execute("update streamer.relation set state = 'init', snapshot_lsn = null")


async def test_a_slot_or_a_server_that_is_another(checker: Checker, stream: MakeStreamer) -> None:
    await streamed(checker, stream)
    with prepared(checker.source, "p"):  # nobody waits for it: slot and rows are there
        assert await checker.findings() == []
    checker.target.execute("update streamer.source set system_identifier = '7'")
    await checker.finds(ERROR, "the source is another server now", "need a resync")
    checker.target.execute("update streamer.source set system_identifier = null")
    checker.source.execute("select pg_drop_replication_slot('streamer_shop')")
    found = await checker.finds(ERROR, '"streamer_shop" is gone', "need a resync: public.items")
    await run_resync(checker, found)
    assert not matching(await checker.findings(), ERROR)


async def test_a_slot_that_is_ahead_of_the_target(checker: Checker, stream: MakeStreamer) -> None:
    await streamed(checker, stream)
    checker.source.execute("insert into items values (1)")
    checker.source.execute(
        "select pg_replication_slot_advance('streamer_shop', pg_current_wal_lsn())"
    )
    found = await checker.finds(ERROR, "ahead of", "need a resync: public.items")
    await run_resync(checker, found)
    await checker.finds(WARNING, "nothing depends on it, so `run` re-creates it")


async def test_an_invalidated_slot(server_directory: Path, tmp_path: Path) -> None:
    settings = {"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB", "max_wal_size": "32MB"}
    settings |= {"fsync": "on"}
    with (
        running(server_directory / "greedy", versions()["16"], settings) as server,
        database(server, "s") as source,
        database(server, "t") as target,
    ):
        both(checker := Checker(tmp_path / "config.yaml", source, target), ITEMS)
        checker.configure("items: {initial: none}")
        source.execute("select pg_create_logical_replication_slot('streamer_shop', 'pgoutput')")
        await checker.mends(WARNING, "max_slot_wal_keep_size is 1 MB")
        source.execute("alter system reset max_slot_wal_keep_size")
        source.execute("select pg_reload_conf()")
        for _ in range(4):
            source.execute("create table x (); drop table x; select pg_switch_wal()")
        source.execute("checkpoint")
        await checker.finds(WARNING, '"streamer_shop" was invalidated')
        record = "insert into streamer.source (database, slot, publication) values ('shop', '', '')"
        await prepare_bookkeeping(checker)
        target.execute(record)
        target.execute(
            "insert into streamer.relation (source_id, source, target, type, state)"
            " select id, 'public.items', 'public.items', 'clone', 'ready' from streamer.source"
        )
        await checker.finds(ERROR, '"streamer_shop" was invalidated', "need a resync")


async def prepare_bookkeeping(checker: Checker) -> None:
    from streamer.progress.bookkeeping import Bookkeeping
    from streamer.progress.schema import migrate

    settings, _ = static.load(checker.path)
    bookkeeping = Bookkeeping(TargetAddress.parse(settings.target.url))
    await migrate(bookkeeping)
    await bookkeeping.close()


async def test_a_slot_of_somebody_else_stops_it_and_stays(
    checker: Checker, stream: MakeStreamer
) -> None:
    both(checker, ITEMS)
    checker.source.execute("select pg_create_physical_replication_slot('streamer_shop')")
    try:
        checker.configure("items: {initial: none}")
        found = await checker.finds(ERROR, "belongs to plugin", "another name")
        async with stream("items: {initial: none}") as streamer:

            async def is_stopped() -> bool:
                return bool((await streamer.status())["state"] == "error")

            await streamer.eventually(is_stopped)
        assert checker.source.execute(
            "select 1 from pg_replication_slots where slot_type = 'physical'"
        )
        checker.run_fix(found)
        assert not matching(await checker.findings(), ERROR)
    finally:
        checker.source.execute(drop_slot_sql("streamer_shop"))


async def test_a_slot_that_somebody_else_streams_from(checker: Checker) -> None:
    checker.source.execute(f"{ITEMS}; create publication p for table items")
    checker.source.execute("select pg_create_logical_replication_slot('streamer_shop', 'pgoutput')")
    checker.configure("items:")
    await checker.is_gone(ERROR, "slot")
    _, mapping = static.load(checker.path)
    options = StreamOptions(("p",))
    stream = await ReplicationStream.start(mapping.sources[0], "streamer_shop", NOTHING, options)
    try:
        await checker.mends(ERROR, '"streamer_shop" is read by process', "not for this target")
    finally:
        await stream.close()


# ---- the mapping -------------------------------------------------------------------------------


async def test_rules_that_are_wrong_are_all_named(checker: Checker) -> None:
    checker.source.execute(
        'create table "Orders" (id int primary key); create table a1 (id int primary key);'
        "create schema b; create table b.t (id int primary key); create table t (id int primary key);"
        "create table lists (id int primary key, name text)"
    )
    checker.configure(
        "orders: {}\ngone: {}\n'a*': {}\n'*1': {}\n'none*': {}\nb.t: {}\nt: {}\n"
        "lists: {exclude: [nome], columns: {id: id, naam: name}}"
    )
    await checker.finds(ERROR, "public.orders", "not in the source", "write public.Orders")
    await checker.finds(ERROR, "public.gone", "not in the source")
    await checker.finds(ERROR, "public.a1", "both claim table")
    await checker.finds(ERROR, "b.t and public.t would both be written to target table public.t")
    await checker.finds(WARNING, "public.none*: matches no table")
    await checker.finds(WARNING, "public.lists", 'names column "naam"')
    await checker.finds(WARNING, "public.lists", 'names column "nome"', "its columns are: id, name")
    checker.configure("'none*':")
    await checker.finds(ERROR, "shop: no table matches its rules")


KINDS = """
create table items (id int primary key);
create unlogged table u (id int primary key);
create view v as select 1 as x;
create materialized view m as select 1 as x;
create foreign data wrapper w; create server s foreign data wrapper w;
create foreign table f (x int) server s;
create table p (id int primary key) partition by range (id);
create table p1 partition of p for values from (1) to (2);
"""


async def test_what_a_pattern_matches_and_is_not_replicated(checker: Checker) -> None:
    checker.source.execute(KINDS)
    checker.configure("'*':")
    await checker.finds(INFO, "public.*: also matches views, not replicated: public.v")
    await checker.finds(WARNING, "public.m: is a materialized view: not replicated")
    await checker.finds(WARNING, "public.f: is a foreign table: not replicated")
    await checker.mends(WARNING, "public.u: is unlogged: not replicated")
    await checker.finds(INFO, "TRUNCATE of a single partition is not replicated")
    assert not [f for f in await checker.findings() if "public.p1" in str(f)]
    assert not matching(await checker.findings(), ERROR)

    with checker.source.connect() as connection:
        connection.execute("create temporary table temporary_one (id int)")
        checker.configure("'*.*':")
        await checker.finds(INFO, "also matches temporary tables", "temporary_one")


async def test_what_is_named_and_cannot_be_replicated(checker: Checker) -> None:
    checker.source.execute(KINDS)
    checker.configure("u: {}\nv: {}\nm: {}\nf: {}\np1: {}\ntemporary_one: {}")
    await checker.mends(ERROR, "public.u: is unlogged and cannot be replicated")
    await checker.finds(ERROR, "public.v: is a view and cannot be replicated", "take it out")
    await checker.finds(ERROR, "public.m: is a materialized view and cannot")
    await checker.finds(ERROR, "public.f: is a foreign table and cannot")
    await checker.finds(
        ERROR, "public.p1: is a partition of public.p", "put its root public.p into"
    )
    with checker.source.connect() as connection:
        connection.execute("create temporary table temporary_one (id int)")
        await checker.finds(ERROR, "temporary_one: is a temporary table and cannot")
    checker.configure("'p1*': {}\nitems: {}")
    await checker.finds(WARNING, "public.p1: is a partition of public.p: not replicated")


async def test_children_large_objects_and_sequences(checker: Checker) -> None:
    checker.source.execute(f"{ITEMS}; create table child (primary key (id)) inherits (items)")
    checker.configure("items:")
    await checker.finds(WARNING, "public.child: inherits from public.items", "put it into `tables`")
    checker.configure("items: {}\nchild: {}")
    await checker.is_gone(WARNING, "inherits")
    checker.source.execute("create table counted (id serial primary key, n int)")
    checker.configure("counted:")
    await checker.finds(INFO, "sequences are not replicated", "public.counted_id_seq")
    await checker.is_gone(WARNING, "large objects")
    checker.source.execute("select lo_create(0)")
    await checker.finds(WARNING, "1 large objects are not replicated", "bytea")


async def test_tables_whose_updates_are_not_published(checker: Checker) -> None:
    cases = (
        ("", "has no primary key", "replica identity full"),
        ("alter table {} add unique (a)", "has no primary key", "using index"),
        ("create unique index on {} (b)", "has no primary key", "replica identity full"),
        ("alter table {} add primary key (a) deferrable", "deferrable", "replica identity full"),
        (
            "alter table {} add primary key (a), replica identity nothing",
            "has REPLICA IDENTITY NOTHING",
            "replica identity default",
        ),
        (
            (
                "create unique index i on {0} (a); alter table {0} replica identity using index i;"
                "drop index i"
            ),
            "whose index is gone",
            "replica identity full",
        ),
        (
            (
                "alter table {0} add g int generated always as (a) stored;"
                "alter table {0} alter g set not null, add primary key (b, g), add unique (a)"
            ),
            "has a generated column in its replica identity",
            "using index",
        ),
    )
    for number, (ddl, _, _) in enumerate(cases):
        name = f"t{number}"
        checker.source.execute(f"create table {name} (a int not null, b int); {ddl.format(name)}")
    checker.configure("'t*':")
    for number, (_, reason, fix) in enumerate(cases):
        words = (f"public.t{number}:", reason, "updates and deletes are not replicated")
        assert fix in str(await checker.mends(WARNING, *words))
    checker.configure("t0: {type: append}")
    checker.source.execute("alter table t0 replica identity nothing")
    await checker.finds(WARNING, "so updates are not replicated")


async def test_generated_columns_never_make_the_applications_updates_fail(
    checker: Checker, stream: MakeStreamer
) -> None:
    """From PostgreSQL 18 on, a publication of updates refuses whole rows with generated columns."""
    both(checker, "create table t (a int not null, g int generated always as (a + 1) stored)")
    checker.source.execute("alter table t replica identity full; insert into t values (1)")
    checker.configure("t: {initial: none}")
    async with stream("t: {initial: none}") as streamer:
        await streamer.caught_up()
        checker.source.execute("update t set a = 2")
    if str(checker.source.value("show server_version_num")) >= "180000":
        await checker.finds(WARNING, "FULL and generated columns", "add a primary key")
        checker.source.execute("create unique index i on t (a)")
        await checker.mends(WARNING, "FULL and generated columns", 'using index "i"')


async def test_whole_rows_as_identity_are_slow_without_a_key(checker: Checker) -> None:
    both(checker, "create table t (a int not null, b int); alter table t replica identity full")
    checker.configure("t:")
    await checker.finds(WARNING, "has no key, so every update and delete compares whole rows")
    checker.source.execute("create unique index t_a on t (a)")
    await checker.mends(WARNING, "has no key", 'replica identity using index "t_a"')
    await checker.mends(WARNING, "no unique index on (a)")


# ---- the target --------------------------------------------------------------------------------


async def test_a_role_that_may_nothing_at_the_target(role: str, checker: Checker) -> None:
    target, name = checker.target, checker.target.name
    checker.source.execute(f"{ITEMS}; create table more (id int primary key)")
    target.execute(
        f"{ITEMS}; create schema inner_; revoke usage on schema public from public;"
        f'revoke temporary on database "{name}" from public;'
        "revoke usage on language plpgsql from public"
    )
    target.url_user = role
    checker.configure("items: {}\nmore: {target: inner_.more}\n")
    await checker.mends(ERROR, "may not make temporary tables")
    checker.configure("items: {}\nmore: {target: nowhere_yet.more}\n")
    await checker.finds(
        ERROR, 'schema "nowhere_yet": is missing, and streamer may not create it', "create schema"
    )
    checker.configure("items: {}\nmore: {target: inner_.more}\n")
    await checker.mends(ERROR, "may not use language plpgsql")
    target.execute("drop extension plpgsql")
    await checker.mends(ERROR, "has no language plpgsql")
    found = await checker.mends(ERROR, 'schema "streamer"', "may not make schemas")
    assert f'grant create on database "{name}"' in str(found)
    await checker.mends(ERROR, 'schema "public"', "may not use it")
    await checker.mends(ERROR, 'schema "inner_"', "may not use it")
    await checker.mends(ERROR, 'schema "inner_"', "may not create the missing tables there")
    found = await checker.mends(ERROR, "lacks select, insert, update, delete, truncate")
    assert f'grant select, insert, update, delete, truncate on "public"."items" to "{role}"' in str(
        found
    )
    assert not matching(await checker.findings(), ERROR)
    target.execute("create publication onwards")
    await checker.mends(WARNING, "may not tag its writes as replicated", "session_setup(text)")


async def test_places_for_replication_origins(checker: Checker) -> None:
    checker.source.execute(ITEMS)
    checker.configure("items:", settings="workers: 64")
    await checker.is_gone(WARNING, "replication origins")
    checker.target.execute("create publication onwards")
    found = await checker.finds(WARNING, "replication origins", "up to 73 connections write")
    assert "alter system set max_" in str(found)
    checker.configure("items:", settings="workers: 1\nsync: {jobs: 1}")
    await checker.is_gone(WARNING, "replication origins")


async def test_a_source_that_is_a_target_too(
    checker: Checker, stream: MakeStreamer, second: Database
) -> None:
    for db in (checker.source, checker.target):
        db.execute(ITEMS)
    async with stream("items: {initial: none}") as streamer:
        await streamer.caught_up()
        checker.source.execute("insert into items values (1, 'a')")
        await streamer.caught_up()
    onwards = Checker(checker.path, checker.target, second)
    onwards.configure("items:")
    await onwards.finds(INFO, "a streamer writes into it as well", "forward_origins: true")
    onwards.configure("items:", group="forward_origins: true")
    await onwards.is_gone(INFO, "a streamer writes into it as well")


async def test_truncate_is_not_needed_where_nothing_is_truncated(
    role: str, checker: Checker
) -> None:
    both(checker, ITEMS)
    checker.target.execute(f'grant create on database "{checker.target.name}" to {role}')
    checker.target.execute(f"grant select, insert, update, delete on items to {role}")
    checker.target.url_user = role
    checker.configure("items: {type: append, initial: none}")
    assert await checker.findings() == []
    checker.configure("items: {type: append}")
    await checker.finds(WARNING, "lacks truncate", "a copy that is interrupted")
    checker.configure("items:")
    await checker.mends(ERROR, "lacks truncate")
    # What is not its own it must leave as it is, also while it copies.
    settings, _ = static.load(checker.path)
    checker.target.execute("create index on items (name)")
    async with target_connection(TargetAddress.parse(settings.target.url)) as connection:
        assert await defer_indexes(connection, RelationName("public", "items")) == 0


async def test_bookkeeping_that_is_not_ours(role: str, checker: Checker) -> None:
    both(checker, ITEMS)
    checker.configure("items:")
    checker.target.execute("create schema streamer; create table streamer.source (id int)")
    await checker.mends(ERROR, "is not streamer's, but has a table source")

    await prepare_bookkeeping(checker)
    assert not matching(await checker.findings(), ERROR)
    checker.target.execute(
        f'grant create on database "{checker.target.name}" to {role}; grant all on items to {role}'
    )
    checker.target.url_user = role
    checker.configure("items:")
    await checker.mends(ERROR, 'schema "streamer"', "may not use it")
    await checker.mends(ERROR, 'schema "streamer"', "may not write its tables")
    assert not matching(await checker.findings(), ERROR)
    checker.target.execute("insert into streamer.migration values (9999, 'from the future')")
    await checker.finds(ERROR, "was made by a newer streamer (migration 9999)")


async def test_foreign_keys_and_triggers_that_cannot_be_switched_off(
    role: str, checker: Checker
) -> None:
    both(checker, f"{ITEMS}; create table lines (id int primary key, item int references items)")
    checker.target.execute(
        "create function f() returns trigger language plpgsql as 'begin return new; end';"
        "create trigger audit before insert on lines for each row execute function f();"
        f'grant create on database "{checker.target.name}" to {role};'
        f"grant all on items, lines to {role}"
    )
    checker.configure("items: {}\nlines: {}")
    assert await checker.findings() == []
    checker.target.url_user = role
    checker.configure("items: {}\nlines: {}")
    await checker.finds(ERROR, "public.items", "foreign keys", "would be checked")
    await checker.finds(WARNING, "public.lines", "triggers", "(audit)")
    await checker.mends(ERROR, "public.lines", "foreign keys", "session_replication_role")
    assert await checker.findings() == []


# ---- target tables -----------------------------------------------------------------------------


async def test_missing_tables(checker: Checker) -> None:
    checker.source.execute("create type mood as enum ('sad', 'glad')")
    checker.source.execute("create table feelings (id int primary key, m mood)")
    checker.configure("feelings: {target: deep.feelings}")
    assert await checker.findings() == []
    checker.path.write_text(
        checker.path.read_text().replace("target: {url", "target: {create_tables: false, url")
    )
    await checker.mends(ERROR, "its target table deep.feelings is not there", "create type")
    assert await checker.findings() == []

    checker.source.execute("create collation mine (provider = libc, locale = 'C')")
    checker.source.execute("create table sorted (id text collate mine primary key)")
    checker.configure("sorted:")
    await checker.finds(ERROR, "the target has no collation public.mine", 'column "id"')
    checker.target.execute("create collation mine (provider = libc, locale = 'C')")
    assert await checker.findings() == []


async def test_targets_that_are_no_tables(checker: Checker) -> None:
    checker.source.execute(ITEMS)
    checker.target.execute("create view items as select 1 as id")
    checker.configure("items:")
    await checker.finds(ERROR, "its target public.items is a view", "another `target`")
    looped = Checker(checker.path, checker.source, checker.source)
    looped.configure("items:")
    await looped.finds(ERROR, "public.items: is its own target")


async def test_missing_columns_are_added_with_their_types(checker: Checker) -> None:
    checker.source.execute("create schema types; create type types.mood as enum ('sad', 'glad')")
    checker.source.execute(
        'create table t (id int primary key, "a ""b" numeric(10, 2), m types.mood, n int)'
    )
    checker.target.execute("create table t (id int primary key, n int)")
    checker.configure("t:")
    found = await checker.mends(ERROR, "has no column", "create type", "add column")
    assert 'add column "a ""b" numeric(10,2), add column "m" types.mood' in str(found)
    assert "or exclude the column in the mapping" in str(found)
    assert await checker.findings() == []


async def test_missing_columns_that_run_adds_or_ignores(checker: Checker) -> None:
    checker.source.execute("create type mood as enum ('sad', 'glad')")
    checker.source.execute("create table t (id int primary key, n numeric(3, 1), m mood)")
    checker.target.execute("create table t (id int primary key)")
    checker.configure("t: {on_column_added: ignore}")
    assert await checker.findings() == []
    checker.configure("t: {on_column_added: add}")
    await checker.mends(ERROR, 'the target lacks the type of "m"', "create type")
    await checker.finds(INFO, "lacks columns", 'add column "n" numeric(3,1)')


async def test_columns_that_cannot_be_written(checker: Checker) -> None:
    checker.source.execute(
        "create table t (id int primary key, n int, g int generated always as (1) stored)"
    )
    checker.target.execute(
        "create table t (id int primary key, n int generated always as identity,"
        " extra int not null, g int not null)"
    )
    checker.configure("t:")
    await checker.mends(ERROR, 'column "extra"', "NOT NULL", "drop not null")
    await checker.mends(ERROR, 'column "g"', "NOT NULL", "generated always as (1) stored")
    await checker.mends(
        ERROR, 'column "n"', "GENERATED ALWAYS AS IDENTITY", "set generated by default"
    )
    assert await checker.findings() == []


async def test_generated_columns_are_not_delivered(checker: Checker) -> None:
    checker.source.execute(
        "create table t (id int primary key, a text, big text generated always as (upper(a)) stored)"
    )
    checker.target.execute("create table t (id int primary key, a text, big text)")
    checker.configure("t:")
    await checker.mends(WARNING, '"big" is generated and not delivered')
    checker.target.execute("alter table t drop column big")
    await checker.mends(INFO, '"big" is generated, and the target has none')
    checker.configure("t: {exclude: [big]}")
    assert await checker.findings() == []


async def test_a_key_that_is_not_written(checker: Checker) -> None:
    checker.source.execute(ITEMS)
    checker.configure("items: {exclude: [id]}")
    await checker.finds(ERROR, 'key column "id"', "is not written to the target")
    checker.target.execute("create table items (name text)")
    await checker.finds(ERROR, 'key column "id"', "do not exclude it")


async def test_columns_named_sid(checker: Checker) -> None:
    checker.source.execute("create table t (id int primary key, sid text)")
    checker.configure("t:", sid="eu")
    await checker.finds(ERROR, 'column "sid"', "would be written where the sid goes")
    checker.configure("t: {columns: {id: id, sid: session}}", sid="eu")
    assert await checker.findings() == []
    checker.source.execute(ITEMS)
    checker.target.execute(
        "create table items (sid text, id int, name text, primary key (sid, id))"
    )
    checker.configure("items:")
    await checker.finds(
        ERROR, 'has a column "sid" but this source has no sid', "give its url a sid"
    )


async def test_history_tables_and_keys_without_an_index(checker: Checker) -> None:
    checker.source.execute(ITEMS)
    checker.target.execute("create table items (id int, name text)")
    checker.configure("items: {type: history}")
    await checker.mends(ERROR, 'has no column "kvsz_start"')
    await checker.mends(WARNING, "has no index on (id): slow")
    assert await checker.findings() == []
    checker.target.execute("drop table items; create table items (sid text, id int, name text)")
    checker.configure("items:", sid="eu")
    found = await checker.mends(WARNING, "no unique index on (sid, id): slow")
    assert 'create unique index on "public"."items" ("sid", "id")' in str(found)


async def test_rows_in_the_way_of_a_copy(checker: Checker) -> None:
    checker.source.execute(ITEMS)
    checker.target.execute(
        "create table items (sid text, id int, name text, primary key (sid, id));"
        "insert into items values ('us', 1)"
    )
    checker.configure("items:", sid="it's")
    assert await checker.findings() == []
    checker.target.execute("insert into items values ('it''s', 1)")
    for option in ("truncate_target: true", "initial: none"):
        checker.configure(f"items: {{{option}}}", sid="it's")
        assert await checker.findings() == []
    checker.configure("items:", sid="it's")
    found = await checker.mends(ERROR, "already holds rows of this source")
    assert "`truncate_target: true`" in str(found)
    assert "`initial: none`" in str(found)
    assert checker.target.execute("select sid from items") == [("us",)]

    checker.target.execute("drop table items")
    checker.target.execute(f"{ITEMS}; insert into items values (1)")
    checker.configure("items:")
    await checker.mends(ERROR, "already holds rows of this source", "truncate")


async def test_a_locked_target_table_is_not_waited_for(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    both(checker, ITEMS)
    checker.configure("items:")
    monkeypatch.setattr("streamer.commands.check.target_facts.STATEMENT_SECONDS", 1)
    with checker.target.connect() as connection:
        connection.autocommit = False
        connection.execute("lock table items")
        await checker.finds(WARNING, "could not be seen", "statement timeout")


async def test_unlogged_and_hidden_target_tables(role: str, checker: Checker) -> None:
    checker.source.execute(ITEMS)
    checker.target.execute("create unlogged table items (id int primary key, name text)")
    checker.configure("items:")
    await checker.mends(WARNING, "is unlogged: a crash there empties it")
    checker.target.execute(
        f"alter table items enable row level security; grant all on items to {role};"
        f'grant create on database "{checker.target.name}" to {role}'
    )
    checker.target.url_user = role
    checker.configure("items:")
    await checker.mends(ERROR, "row level security hides rows")


async def test_enum_labels_that_the_target_lacks(checker: Checker) -> None:
    checker.source.execute("create type mood as enum ('a', 'b', 'c''c', 'd')")
    checker.target.execute("create type mood as enum ('b', 'd')")
    both(checker, "create table t (id int primary key, m mood)")
    checker.configure("t:")
    await checker.mends(WARNING, "type public.mood", 'lacks "a", "c\'c"')
    labels = "select enum_range(null::mood)::text"
    assert checker.target.value(labels) == checker.source.value(labels)


async def test_types_of_extensions(checker: Checker) -> None:
    available = "select exists (select from pg_available_extensions where name = 'vector')"
    if not checker.source.value(available):
        pytest.skip("this server has no extension vector")
    checker.source.execute("create schema e; create extension vector schema e")
    checker.source.execute("create table t (id int primary key, v e.vector(3))")
    checker.configure("t:")
    found = await checker.mends(ERROR, "the target has no type e.vector", "create extension")
    assert 'create schema if not exists "e"; create extension "vector" schema "e"' in str(found)
    checker.target.execute("create schema x; alter extension vector set schema x")
    await checker.mends(ERROR, "the target has no type e.vector", "alter extension")


async def test_types_into_which_not_every_value_fits(checker: Checker) -> None:
    checker.source.execute("create table t (id bigint primary key, a text, b int[], c timestamptz)")
    checker.target.execute(
        "create domain short as varchar(3);"
        "create table t (id int primary key, a short, b smallint[], c text)"
    )
    checker.configure("t:")
    await checker.mends(WARNING, 'column "id" has type bigint, at the target integer: large values')
    await checker.mends(WARNING, 'column "a" has type text', "longer than 3 characters")
    await checker.mends(WARNING, 'column "b" has type integer[], at the target smallint[]')
    assert await checker.findings() == []


# ---- several sources ---------------------------------------------------------------------------


def two_sources(checker: Checker, tables: str, urls: dict[str, str]) -> None:
    listed = ", ".join(f'{{url: "{url}", sid: {sid}}}' for sid, url in urls.items())
    checker.configure(tables)
    lines = checker.path.read_text().splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("  urls:"))
    lines[at] = f"  urls: [{listed}]"
    checker.path.write_text("\n".join(lines))


@pytest.fixture
def second(shared_server: Server) -> Iterator[Database]:
    with database(shared_server, "second") as made:
        yield made


async def test_two_sources_of_one_table_without_a_sid_column(
    checker: Checker, second: Database
) -> None:
    both(checker, ITEMS)
    second.execute(ITEMS)
    two_sources(checker, "'*':", {"eu": checker.source.url, "us": second.url})
    found = await checker.finds(ERROR, "would write the same rows of target table public.items")
    assert "shop:eu and shop:us, because it has no column sid" in str(found)
    checker.run_fix(found)
    assert await checker.findings() == []


async def test_two_sources_whose_keys_meet(checker: Checker, second: Database) -> None:
    checker.source.execute(ITEMS)
    second.execute(ITEMS)
    checker.target.execute("create table items (id int primary key, name text, sid text not null)")
    two_sources(checker, "'*':", {"eu": checker.source.url, "us": second.url})
    await checker.mends(WARNING, "has a unique key (id) without the sid")
    assert await checker.findings() == []


async def test_two_groups_with_the_same_sid(checker: Checker, second: Database) -> None:
    checker.source.execute(ITEMS)
    second.execute(ITEMS)
    checker.configure("'*':", sid="eu")
    text = checker.path.read_text()
    group = text[text.index("- database: shop") :]
    other = group.replace("database: shop", "database: store").replace(
        checker.source.url, second.url
    )
    checker.path.write_text(f"{text}\n{other}")
    found = await checker.finds(ERROR, "would write the same rows", "shop:eu and store:eu")
    assert "different sids" in str(found)
    checker.path.write_text(f"{text}\n{other.replace('sid: eu', 'sid: us')}")
    assert await checker.findings() == []
    checker.path.write_text(f"{text}\n{other.replace(', sid: eu', '')}")
    await checker.finds(ERROR, "not all sources of target table public.items have a sid")


# ---- types, with PostgreSQL as the judge -------------------------------------------------------

VALUES = {
    "smallint": ["-32768", "32767"],
    "integer": ["-2147483648", "2147483647"],
    "bigint": ["-9223372036854775808", "9223372036854775807"],
    "numeric": ["0.12345678901234567890", "1e40", "NaN"],
    "numeric(5,0)": ["-99999"],
    "numeric(12,3)": ["999999999.999"],
    "numeric(20,0)": ["99999999999999999999"],
    "real": ["3.4028235e+38", "1.1", "NaN"],
    "double precision": ["1.7976931348623157e+308", "0.1", "0.30000000000000004"],
    "text": ["", "x" * 40, "  padded  "],
    "character varying": ["", "y" * 40],
    "character varying(2)": ["ab", "é€"],
    "character varying(12)": ["abcdefghijkl", ""],
    "character(3)": ["a  ", "abc"],
    "character(12)": ["abcdefghijkl"],
    "date": ["2024-02-29", "infinity", "4713-01-01 BC"],
    "timestamp without time zone": ["2024-02-29 23:59:59.999999", "-infinity"],
    "timestamp(0) without time zone": ["2024-02-29 23:59:59"],
    "timestamp with time zone": ["2024-02-29 23:59:59.999999+00"],
    "time without time zone": ["23:59:59.999999"],
    "time(3) without time zone": ["23:59:59.999"],
    "time with time zone": ["23:59:59.999999+05:30"],
    "boolean": ["t"],
    "uuid": ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"],
    "json": ['{"b": 1, "a":  2, "a": 3}'],
    "jsonb": ['{"a": 2, "b": 1}'],
    "bytea": ["\\x00ff"],
    "integer[]": ["{1,2147483647}"],
    "bigint[]": ["{1,9223372036854775807}"],
}


def _is_kept(connection: "psycopg.Connection[Any]", value: str, source: str, target: str) -> bool:
    """Whether a value, written to *target* as text, is the same when it is read as *source* again."""
    try:
        row = connection.execute(
            f"select (v::text::{target})::{source}::text = v::text"
            f" from (select %s::{source} as v) x".encode(),
            (value,),
        ).fetchone()
    except psycopg.Error:
        return False
    return bool(row and row[0])


def test_types_said_to_be_safe_are(shared_server: Server) -> None:
    with psycopg.connect(shared_server.url(), autocommit=True) as connection:
        connection.execute("set timezone = 'UTC'")
        for source, target in itertools.product(VALUES, repeat=2):
            if type_risk(source, target) is None:
                for value in VALUES[source]:
                    assert _is_kept(connection, value, source, target), (source, target, value)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("bigint", "integer"),
        ("integer", "numeric(5,0)"),
        ("numeric", "double precision"),
        ("numeric(12,3)", "bigint"),
        ("double precision", "real"),
        ("text", "character varying(10)"),
        ("character varying(12)", "character varying(2)"),
        ("character varying(2)", "character(3)"),
        ("timestamp with time zone", "timestamp without time zone"),
        ("timestamp without time zone", "timestamp(0) without time zone"),
        ("timestamp without time zone", "date"),
        ("json", "jsonb"),
        ("text", "uuid"),
        ("text", "public.mood"),
        ("integer[]", "integer"),
        ("bigint[]", "integer[]"),
    ],
)
def test_types_that_are_at_risk(source: str, target: str) -> None:
    assert type_risk(source, target)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("integer", "bigint"),
        ("integer", "text"),
        ("public.mood", "text"),
        ("character varying(2)", "character varying(12)"),
        ("numeric(12,3)", "numeric(20,3)"),
        ("smallint", "real"),
        ("real", "double precision"),
        ("date", "timestamp without time zone"),
        ("jsonb", "json"),
        ("integer[]", "bigint[]"),
    ],
)
def test_types_that_are_safe(source: str, target: str) -> None:
    assert type_risk(source, target) is None


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


async def test_a_source_column_sid(checker: Checker, stream: MakeStreamer) -> None:
    """It stands where the sid of the url would be written."""
    checker.source.execute("create table t (sid text, id int, v text, primary key (sid, id))")
    checker.configure("t:", sid="eu")
    await checker.finds(ERROR, 'column "sid" of source table "public.t"', "where the sid goes")
    async with stream("t:", sid="eu") as streamer:
        await streamer.table_state("public.t", "error")
        (table,) = (await streamer.status())["tables"]
        assert 'column "sid" of source table "public.t" would be' in table["error"]
