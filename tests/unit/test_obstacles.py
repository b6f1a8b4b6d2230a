"""Obstacles to tables, and the tasks that run beside their discovery."""

from typing import Any, cast

import pytest

from streamer.errors import TargetSchemaError
from streamer.runtime import obstacles
from streamer.runtime.obstacles import Obstacles
from streamer.sync.states import State
from tests.unit.build import mapped_relation, source_mapping


class Relations:
    def __init__(self) -> None:
        self.now = State.READY

    def state(self, _: object) -> State:
        return self.now

    def set_state(self, _: object, state: State, error: object = None) -> None:
        self.now = state


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
    assert relations.now is State.ERROR
