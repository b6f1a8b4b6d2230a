"""Reports of lanes and copies: the states to store, and the copies to ask for again."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from streamer.apply.lanes.lane import Hold, MappedRelation
from streamer.control.resync_options import Resync
from streamer.control.table_state import State, TableState
from streamer.errors.error_classes import SyncError, TargetConnectionError, TargetSchemaError
from streamer.errors.error_reports import ErrorReport
from streamer.runtime.services import Health
from streamer.runtime.tables import table_events
from streamer.runtime.tables.table_events import TableEvents
from streamer.util.lsn import Lsn
from tests.unit.build import mapped_relation, source_mapping


@pytest.fixture
def events() -> TableEvents:
    services: Any = SimpleNamespace(
        workers=[mock.Mock()],
        all_workers=[],
        by_transaction=True,
        spools=mock.Mock(),
        bookkeeping=None,
        metrics=mock.Mock(),
        drainer=mock.Mock(),
    )
    return TableEvents(source_mapping(), mock.Mock(), services, Health(), mock.Mock(), mock.Mock())


def add(events: TableEvents, state: State, relation_id: int = 1) -> MappedRelation:
    mapped = mapped_relation(relation_id, source=f"public.t_{relation_id}")
    stored = TableState(state, through_lsn=Lsn(8))
    record: Any = SimpleNamespace(quarantined=0, table_state=stored, error=None)
    events.relations.add(mapped, record)
    return mapped


async def test_a_state_that_waits_for_the_target_does_not_overwrite_a_later_error(
    events: TableEvents, monkeypatch: pytest.MonkeyPatch, short_backoffs: None
) -> None:
    mapped = add(events, State.CATCHING_UP)
    error = ErrorReport.of(TargetSchemaError("it is unlogged"))
    stored: list[str] = []

    async def store(_: object, outcomes: dict[int, tuple[State, object]]) -> None:
        if not stored:
            # As the guard does, whose own statement waits for the same target.
            events.relations.become(mapped, mapped.state.failing(error))
            stored.append(State.ERROR)
            raise TargetConnectionError("the target is away")
        stored.extend(state for state, _ in outcomes.values())

    monkeypatch.setattr(table_events, "set_streaming_states", store)
    await events.lane_drained(events.relations.lane(mapped))
    assert set(stored) == {State.ERROR}
    assert mapped.state.shown is State.ERROR


async def test_states_of_lanes_that_drain_together_are_stored_together(
    events: TableEvents, monkeypatch: pytest.MonkeyPatch, short_backoffs: None
) -> None:
    """The first statement has a single state, and fails; the next statement has all."""
    relations = [add(events, State.CATCHING_UP, number) for number in range(1, 6)]
    stored: list[set[int]] = []

    async def store(_: object, outcomes: dict[int, tuple[State, object]]) -> None:
        stored.append(set(outcomes))
        await asyncio.sleep(0)
        if len(stored) == 1:
            raise TargetConnectionError("the target is away")

    monkeypatch.setattr(table_events, "set_streaming_states", store)
    async with asyncio.TaskGroup() as group:
        for mapped in relations:
            group.create_task(events.lane_drained(events.relations.lane(mapped)))
    ids = {mapped.relation_id for mapped in relations}
    assert stored == [{relations[0].relation_id}, ids]


async def test_a_copy_of_columns_that_met_a_waiting_lane_is_asked_for_again_once_the_lane_drains(
    events: TableEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    async def request(_: object, relation_id: int) -> None:
        asked.append(relation_id)

    monkeypatch.setattr(table_events, "request_still_unfilled", request)
    mapped = add(events, State.READY)
    events.relations.become(mapped, mapped.state.part_requested(Resync(columns=("v",))))
    lane: Any = events.relations.lane(mapped)
    lane.add_hold(Hold.ERROR, "the target refuses a change")
    lane.spool.held.counts_of.return_value = (1, 100)
    with pytest.raises(SyncError, match="cannot be applied") as raised:
        await events.reach(mapped, Lsn(16))
    events.copy_failed(mapped, ErrorReport.of(raised.value))
    assert asked == []
    lane.release(Hold.ERROR)
    await events.lane_drained(lane)
    await events.lane_drained(lane)
    assert asked == [mapped.relation_id]
