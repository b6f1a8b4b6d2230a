"""Requests of operators, on tables that share a lane."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from streamer.apply.lanes.lane import Hold, LaneOwner, MappedRelation
from streamer.control.progress_tracker import ProgressTracker
from streamer.control.resync_options import Resync
from streamer.control.table_state import State, TableState
from streamer.runtime.services import Health
from streamer.runtime.session.operator_requests import Requests
from streamer.runtime.tables.relations import Relations
from streamer.util.lsn import Lsn
from tests.unit.build import mapped_relation


class Tables:
    """Three tables in sync that share a lane, and requests for these tables."""

    def __init__(self) -> None:
        services: Any = SimpleNamespace(
            workers=[mock.Mock()], by_transaction=True, spools=mock.Mock()
        )
        self.relations = Relations(
            "shop", services, mock.Mock(spec=LaneOwner), Health(), ProgressTracker(Lsn(0))
        )
        coordinator: Any = mock.Mock(is_at=mock.Mock(return_value=False))
        record: Any = mock.Mock(source_id=1)
        self.requests = Requests(
            mock.Mock(),
            record,
            self.relations,
            coordinator,
            mock.AsyncMock(),
            mock.Mock(),
        )
        self.mapped = [self.add(number) for number in (1, 2, 3)]

    def add(self, number: int) -> MappedRelation:
        mapped = mapped_relation(number, source=f"public.t{number}")
        state = TableState.stored(State.READY, end_lsn=mapped.end_lsn)
        record: Any = SimpleNamespace(table_state=state, quarantined=0, error=None)
        self.relations.add(mapped, record)
        return mapped

    def pause(self, mapped: MappedRelation) -> None:
        self.requests._pause(mapped.relation_id)

    async def resync(self, mapped: MappedRelation) -> None:
        request: Any = SimpleNamespace(resync=Resync(), is_to_point=False)
        await self.requests._resync(mapped, request)


@pytest.fixture
def tables() -> Tables:
    return Tables()


async def test_a_resync_of_the_paused_table_lets_the_others_of_its_lane_go_on(
    tables: Tables,
) -> None:
    paused, other, _ = tables.mapped
    tables.pause(paused)
    shared = tables.relations.lane(other)
    assert Hold.PAUSED in shared.hold
    await tables.resync(paused)
    assert tables.relations.lane(paused) is not shared
    assert Hold.PAUSED not in shared.hold


async def test_a_table_that_is_still_paused_keeps_its_lane(tables: Tables) -> None:
    paused, also_paused, other = tables.mapped
    tables.pause(paused)
    tables.pause(also_paused)
    await tables.resync(paused)
    assert Hold.PAUSED in tables.relations.lane(other).hold


async def test_resume_of_one_table_leaves_another_one_of_its_lane_paused(tables: Tables) -> None:
    first, second, other = tables.mapped
    tables.pause(first)
    tables.pause(second)
    await tables.requests._resume(first)
    assert Hold.PAUSED in tables.relations.lane(other).hold
    await tables.requests._resume(second)
    assert Hold.PAUSED not in tables.relations.lane(other).hold
