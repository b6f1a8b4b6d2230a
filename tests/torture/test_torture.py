"""The parts of `make torture` that need no storm: sessions write, and a seed deals faults."""

from collections.abc import Iterable
from pathlib import Path
from random import Random

import psycopg
import pytest

from streamer.config import static_mapping
from streamer.util.lsn import Lsn
from tests.support.postgres import Database
from tests.support.waiting import eventually
from tests.torture.schedule import FREQUENT, RARE, _Deck, databases
from tests.torture.schemas import first_kinds
from tests.torture.tables import HOSTED_KINDS, KINDS, TENANT_KINDS, Kind, kinds_of_shard
from tests.torture.workload import HOSTED, SPLIT, Session, Source
from tests.torture.world import Options, mapping_lines

TRANSACTIONS = 60


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
