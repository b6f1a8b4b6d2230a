"""States of tables that the target is too busy to store at once."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from streamer.error_reports import ErrorReport
from streamer.errors import TargetConnectionError, TargetSchemaError
from streamer.lsn import Lsn
from streamer.progress.table_state import State, TableState
from streamer.runtime import table_events
from streamer.runtime.services import Health
from streamer.runtime.table_events import TableEvents
from tests.unit.build import mapped_relation, source_mapping


async def test_a_state_that_waits_for_the_target_does_not_overwrite_a_later_error(
    monkeypatch: pytest.MonkeyPatch, short_backoffs: None
) -> None:
    services: Any = SimpleNamespace(
        workers=[mock.Mock()],
        all_workers=[],
        by_transaction=True,
        spools=mock.Mock(),
        bookkeeping=None,
        metrics=mock.Mock(),
        drainer=mock.Mock(),
    )
    events = TableEvents(
        source_mapping(), mock.Mock(), services, Health(), mock.Mock(), mock.Mock()
    )
    mapped = mapped_relation()
    state = TableState(State.CATCHING_UP, through_lsn=Lsn(8))
    record: Any = SimpleNamespace(quarantined=0, table_state=state)
    events.relations.add(mapped, record)
    error = ErrorReport.of(TargetSchemaError("it is unlogged"))
    stored: list[str] = []

    async def store(_: object, __: int, state: str, ___: object) -> None:
        if not stored:
            # As the guard does, whose own statement waits for the same target.
            events.relations.become(mapped, mapped.state.failing(error))
            stored.append(State.ERROR)
            raise TargetConnectionError("the target is away")
        stored.append(state)

    monkeypatch.setattr(table_events, "set_streaming_state", store)
    await events.lane_drained(events.relations.lane(mapped))
    assert set(stored) == {State.ERROR}
    assert mapped.state.shown is State.ERROR
