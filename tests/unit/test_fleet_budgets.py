"""Budgets of a source and of a table in a large fleet, which every machine keeps."""

import gc
import tracemalloc
from types import SimpleNamespace
from typing import Any
from unittest import mock

from streamer.apply.lanes.lane import MappedRelation
from streamer.control.table_state import State, TableState
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import resolve
from streamer.runtime.check_pace import FULL_PACE_SOURCES, FULL_PACE_TABLES, CheckPace
from streamer.runtime.guards.publications import Publishing
from streamer.runtime.services import Health
from streamer.runtime.tables.relations import relation_source
from streamer.runtime.tables.table_events import TableEvents
from streamer.util.lsn import Lsn
from tests.unit.build import source_mapping, source_relation, table_rule

TABLES = 200
TABLE_BYTES_MAX = 3000


def fresh(text: str) -> str:
    """Return a copy of a text: a driver makes a new object for each row."""
    return f"{text} "[:-1]


def events() -> TableEvents:
    services: Any = SimpleNamespace(
        workers=[mock.Mock()],
        by_transaction=False,
        spools=mock.Mock(),
        pace=CheckPace(),
        target_namespace="public",
    )
    source = source_mapping(rules=[table_rule("public.*")])
    return TableEvents(source, mock.Mock(), services, Health(), mock.Mock(), mock.Mock())


def add_tables(tables: TableEvents, publishing: Publishing, count: int) -> None:
    names = [RelationName(fresh("public"), f"table_{number}") for number in range(count)]
    for number, mapping in enumerate(resolve(tables.source, names, "public")):
        columns = [fresh(f"column_{position}") for position in range(10)]
        definition = source_relation(str(mapping.source), columns, primary_key=(columns[0],))
        mapped = MappedRelation(
            number,
            mapping,
            Lsn(1 << 40),
            relation_source(tables.source, definition, frozenset(), tables.fence),
        )
        record: Any = SimpleNamespace(
            relation_id=number,
            table_state=TableState(State.READY, through_lsn=mapped.end_lsn),
            quarantined=0,
            error=None,
            has_returned=False,
            publication_membership="m" * 32 + f"/{number}",
            identity=f"d {columns[0]}",
            source_oid=20_000 + number,
            identity_remedy=None,
        )
        tables.relations.add(mapped, record)
        publishing.load(record)


def test_an_idle_table_of_many_takes_three_kilobytes() -> None:
    """The table has definition, lane and state; a queue or an event would add a kilobyte."""
    tables = events()
    publishing = Publishing(tables.source, mock.Mock(), mock.Mock(), tables.relations)
    add_tables(tables, publishing, TABLES)
    tables = events()
    publishing = Publishing(tables.source, mock.Mock(), mock.Mock(), tables.relations)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        add_tables(tables, publishing, TABLES)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / TABLES < TABLE_BYTES_MAX


def test_idle_sources_share_the_checks_of_a_hundred_and_busy_ones_keep_their_pace() -> None:
    pace = CheckPace()

    def pauses(interval: float, table_count: int = 10) -> tuple[float, float]:
        idle = pace.seconds(interval, table_count, is_busy=False)
        return idle, pace.seconds(interval, table_count, is_busy=True)

    assert pauses(2) == (2, 2)
    with pace.source():
        assert pauses(2) == (2, 2)
    pace._sources = 10 * FULL_PACE_SOURCES
    assert pauses(2) == (20, 2)
    assert pauses(2, 2 * FULL_PACE_TABLES) == (20, 4)
    assert pauses(2, 20 * FULL_PACE_TABLES) == (40, 40)


async def test_a_source_with_changes_in_flight_or_behind_its_wal_is_busy(
    monkeypatch: Any,
) -> None:
    tables = events()
    add_tables(tables, mock.Mock(), 1)
    (mapped,) = tables.relations
    lane = tables.relations.lane(mapped)
    assert not tables.is_busy
    tables.tracker.dispatched(Lsn(100), [lane.pending])
    assert tables.is_busy
    tables.tracker.durable(lane.pending, Lsn(100))
    assert not tables.is_busy
    tables.lag.record_end(Lsn(200), -1e9)
    assert tables.is_busy
    tables.tracker.keepalive(Lsn(200))
    assert not tables.is_busy
