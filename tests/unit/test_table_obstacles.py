"""Obstacles to tables, and the tasks that run beside the discovery of tables."""

from typing import Any, cast

import pytest

from streamer.apply.lanes.lane import MappedRelation
from streamer.control.table_state import State, TableState
from streamer.errors.error_classes import TargetSchemaError
from streamer.runtime.tables import table_obstacles
from streamer.runtime.tables.table_obstacles import Obstacles
from tests.unit.build import mapped_relation, source_mapping


class Relations:
    def become(self, mapped: MappedRelation, state: TableState) -> None:
        mapped.become(state)


async def test_the_obstacle_is_there_before_another_task_can_call_the_table_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lane that drains while the state is stored calls each table without an obstacle ready."""
    mapped, relations = mapped_relation(), Relations()

    async def store(*_: Any) -> None:
        assert mapped.obstacle is not None

    monkeypatch.setattr(table_obstacles, "set_streaming_states", store)
    own = Obstacles(source_mapping(), cast("Any", None), cast("Any", relations))
    await own.stop(mapped, TargetSchemaError("it is unlogged"))
    assert mapped.state.shown is State.ERROR
