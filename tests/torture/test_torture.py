"""The parts of `make torture` that need no storm: sessions write, and a seed deals faults."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random

import psycopg
import pytest

from streamer.commands.demo.embedded_servers import Server
from streamer.config import static_mapping
from streamer.util.lsn import Lsn
from tests.support.postgres import Database, database
from tests.support.streamer import Streamer
from tests.support.waiting import eventually
from tests.torture.checks import Violation, check_table
from tests.torture.schedule import FREQUENT, RARE, _Deck, databases
from tests.torture.schemas import create_schema, drop_schema, first_kinds
from tests.torture.shards import create_table, drop_table
from tests.torture.tables import HOSTED_KINDS, KINDS, TENANT_KINDS, Kind, kinds_of_shard
from tests.torture.workload import (
    _APPLICATION_ERRORS,
    HOSTED,
    SPLIT,
    Session,
    Source,
    settle_all_prepared,
)
from tests.torture.world import Options, mapping_lines

TRANSACTIONS = 60
PATIENCE = 180
"""Seconds in which tables join one after another on a busy machine."""
SETTLED = (psycopg.errors.UndefinedObject, psycopg.errors.ObjectNotInPrerequisiteState)
"""A session has ended the prepared transaction first."""


@pytest.mark.parametrize(
    ("database", "sid", "kinds"),
    [
        ("lone", None, KINDS),
        ("shop", "eu", TENANT_KINDS),
        (HOSTED, "h0", HOSTED_KINDS + first_kinds("h0", 2)),
        (SPLIT, "p1", kinds_of_shard(1)),
    ],
)
def test_a_session_writes_to_all_tables_and_remembers_its_commits(
    source: Database, database: str, sid: str | None, kinds: Iterable[Kind]
) -> None:
    its = Source(database, sid, tuple(kinds), source.url)
    its.execute("; ".join(kind.ddl for kind in its.kinds))
    session = Session(its, "1")
    session.start()
    try:
        eventually(lambda: its.transactions > TRANSACTIONS or session.failure)
    finally:
        session.end()
        session.join()
    session.check()
    with psycopg.connect(its.url, autocommit=True) as connection:
        for kind in its.kinds:
            for operation in kind.operations:
                connection.execute("begin")
                for statement in operation(Random(1)):
                    connection.execute(statement.encode())
                connection.execute("rollback")
    end = its.execute("select pg_current_wal_insert_lsn()::text")[0][0]
    committed = {number for (number,) in its.execute(f"select id from {its.ledger.tables[0]}")}
    remembered = its.ledger.through(Lsn.parse(str(end)))
    assert remembered
    assert remembered <= committed


def test_a_seed_deals_the_same_faults_again_and_each_rare_one_before_any_comes_twice() -> None:
    options = Options(seconds=0, seed=7)
    first, second = (_Deck(options, Random(options.seed)) for _ in range(2))
    dealt = [first.deal() for _ in range(500)]
    assert dealt == [second.deal() for _ in range(500)]
    assert set(dealt) == {fault for fault, _ in FREQUENT} | set(RARE)
    rare = [fault for fault in dealt if fault in RARE]
    assert set(rare[: len(RARE)]) == set(RARE)
    only = _Deck(Options(seconds=0, seed=7, faults=("kill",)), Random(7))
    assert {only.deal().__name__ for _ in range(20)} == {"kill"}


def change(source: Source, statements: str) -> None:
    """Run *statements* in a transaction; prepared transactions that hold locks end."""
    while True:
        with contextlib.suppress(*_APPLICATION_ERRORS, *SETTLED), psycopg.connect(source.url) as c:
            settle_all_prepared(source)
            c.execute(f"set lock_timeout = '1s'; {statements}".encode())
            return


def write(sources: Iterable[Source], count: int, changes: Mapping[Source, str]) -> None:
    """Run *count* transactions of torture at each of *sources*, and *changes* meanwhile."""
    sessions = [Session(source, f"small-{source.slot}") for source in sources]
    ends = {source: source.transactions + count for source in sources}
    for session in sessions:
        session.start()
    try:
        for source, statements in changes.items():
            change(source, statements)
        eventually(lambda: all(source.transactions > end for source, end in ends.items()))
    finally:
        for session in sessions:
            session.end()
        for session in sessions:
            session.join()
    for session in sessions:
        session.check()
    for source in sources:
        settle_all_prepared(source)


def join_and_drop(number: int, source: Source) -> str:
    """Change the tables of *source*; return the statements that create and drop the tables."""
    if source.hosts_schemas:
        joining, create = create_schema(source, "tenant_t7")
        drop = drop_schema(source, "tenant_t1")
    else:
        table, create = create_table(10 + number)
        joining = (table,)
        drop = drop_table(source, next(kind for kind in source.kinds if kind.into))
    source.kinds += joining
    return f"{create}; {drop}"


@pytest.mark.timeout(3 * PATIENCE)
@pytest.mark.usefixtures("without_spark", "short_backoffs")
async def test_a_small_fleet_of_schemas_and_shards_ends_equal(
    shared_server: Server, target: Database, tmp_path: Path
) -> None:
    options = Options(0, 1, faults=("move_schema", "move_table"), databases=2, schemas=2)
    path = tmp_path / "config.yaml"
    with contextlib.ExitStack() as stack:
        sources = []
        for name, sid, kinds in databases(options):
            if name in (HOSTED, SPLIT):
                made = stack.enter_context(database(shared_server, "source"))
                sources.append(Source(name, sid, kinds, made.url))
                made.execute("; ".join(kind.ddl for kind in kinds))
        urls = {source: source.url for source in sources}
        header = f"target: {{url: '{target.url}'}}\nhttp: {{listen: ''}}\ndiscovery_interval: 0.5\n"
        spool = f"spool: {{directory: {tmp_path / 'spool'}}}\n"
        path.write_text(header + spool + "\n".join(mapping_lines(urls, options)))
        write(sources, 20, {})
        streamer = Streamer(path)
        streamer.start()
        try:
            await streamer.caught_up(PATIENCE)
            changes = {s: join_and_drop(number, s) for number, s in enumerate(sources)}
            await asyncio.to_thread(write, sources, 40, changes)

            async def is_equal() -> bool:
                try:
                    for source in sources:
                        for kind in source.kinds:
                            check_table(source, target, kind)
                except (Violation, psycopg.errors.UndefinedTable):
                    return False
                return True

            await streamer.eventually(is_equal, PATIENCE)
            await streamer.caught_up(PATIENCE)
            states = [table for s in await streamer.statuses() for table in s["tables"]]
            assert {table["state"] for table in states} == {"ready"}
        finally:
            await streamer.stop()


def test_the_mapping_of_a_large_fleet_has_less_than_twenty_lines(tmp_path: Path) -> None:
    """The part of torture's file for three databases of fifty schemas, and four shards."""
    options = Options(
        *(0, 1), faults=("move_schema", "move_table"), databases=3, schemas=50, shards=4
    )
    fleet = [Source(*made, "") for made in databases(options) if made[0] in (HOSTED, SPLIT)]
    tenants = [len(source.schemas) for source in fleet if source.hosts_schemas]
    assert (tenants, sum(source.is_shard for source in fleet)) == ([50] * 3, 4)
    lines = mapping_lines(dict.fromkeys(fleet, "postgresql://host/database"), options)
    assert len(lines) < 20
    path = tmp_path / "config.yaml"
    path.write_text("\n".join(["target: {url: 'postgresql://host/dw'}", *lines]))
    _, mapping = static_mapping.load(path)
    assert len(mapping.sources) == 7
