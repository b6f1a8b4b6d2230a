"""States of tables that the target is too busy to store at once."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from streamer.error_reports import ErrorReport
from streamer.errors import TargetConnectionError, TargetSchemaError
from streamer.lsn import Lsn
from streamer.mapping.resync import Resync
from streamer.progress.table_state import State
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
    record: Any = SimpleNamespace(
        state="catching_up",
        error=None,
        quarantined=0,
        needs_resync=False,
        snapshot_lsn=Lsn(8),
        end_lsn=Lsn(8),
        chunks=None,
        resync=Resync(),
    )
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
