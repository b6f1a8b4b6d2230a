"""The parts of `make torture` that need no storm: sessions write, and a seed deals faults."""

from collections.abc import Iterable
from random import Random

import psycopg
import pytest

from streamer.util.lsn import Lsn
from tests.support.postgres import Database
from tests.support.waiting import eventually
from tests.torture.schedule import FREQUENT, RARE, _Deck, databases
from tests.torture.schemas import first_kinds
from tests.torture.tables import HOSTED_KINDS, KINDS, TENANT_KINDS, Kind
from tests.torture.workload import Session, Source
from tests.torture.world import Options, group_lines

TRANSACTIONS = 60


@pytest.mark.parametrize(
    ("sid", "kinds"),
    [(None, KINDS), ("eu", TENANT_KINDS), ("h0", HOSTED_KINDS + first_kinds("h0", 2))],
)
def test_a_session_writes_to_all_tables_and_remembers_its_commits(
    source: Database, sid: str | None, kinds: Iterable[Kind]
) -> None:
    its = Source("lone", sid, tuple(kinds), source.url)
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


def test_the_mapping_of_a_large_fleet_has_less_than_twenty_lines() -> None:
    options = Options(seconds=0, seed=1, faults=("move_schema",), databases=3, schemas=50, shards=4)
    groups: dict[str, dict[Source, str]] = {}
    for database, sid, kinds in databases(options):
        source = Source(database, sid, kinds, "")
        groups.setdefault(database, {})[source] = "postgresql://host/database"
    fleet = [groups["shop"], groups["hosted"]]
    assert [len(sources) for sources in fleet] == [4, 3]
    assert {len(source.schemas) for source in groups["hosted"]} == {50}
    assert sum(len(group_lines(sources, options)) for sources in fleet) < 20
