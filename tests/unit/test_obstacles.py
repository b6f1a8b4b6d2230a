"""Obstacles to tables, and the tasks that run beside their discovery."""

from typing import Any, cast

import pytest

from streamer.apply.lane import MappedRelation
from streamer.errors import TargetSchemaError
from streamer.progress.table_state import State, TableState
from streamer.runtime import obstacles
from streamer.runtime.obstacles import Obstacles
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

    monkeypatch.setattr(obstacles, "set_streaming_state", store)
    own = Obstacles(source_mapping(), cast("Any", None), cast("Any", relations))
    await own.stop(mapped, TargetSchemaError("it is unlogged"))
    assert mapped.state.shown is State.ERROR
