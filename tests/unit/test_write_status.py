"""The waits that a process stores: the sessions that block drainers at the target."""

from typing import Any
from unittest import mock

import asyncpg
import pytest

from streamer.apply.lanes.lane import Hold, MappedRelation
from streamer.drain.drainer import _needs_report
from streamer.errors.error_classes import TargetContentionError
from streamer.errors.error_reports import TableWait
from streamer.postgres.blocking_sessions import Blockers
from streamer.runtime.session import write_status
from streamer.runtime.session.write_status import _StatusReport
from tests.unit.build import mapped_relation

PID = 7


class _Relations:
    """A table with its lane, and the wait that a report shows last."""

    have_held_lanes = True

    def __init__(self) -> None:
        self.mapped = mapped_relation()
        self.only_lane = mock.Mock(hold=Hold.BUSY, backend_pid=None, queues_since=None)
        self.wait: TableWait | None = None

    def __iter__(self) -> Any:
        return iter([self.mapped])

    def lane(self, _: MappedRelation) -> Any:
        return self.only_lane

    async def show_wait(self, _: object, wait: TableWait | None) -> None:
        self.wait = wait


async def test_a_wait_lasts_from_one_attempt_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    relations, blockers = _Relations(), {PID: Blockers("pid 9 (psql)")}
    read = mock.AsyncMock()
    monkeypatch.setattr(write_status, "read_blockers", read)
    report = _StatusReport(mock.Mock(relations=relations), mock.Mock())
    for pid, blocking, is_waiting in (
        (PID, blockers, True),
        (None, {}, True),  # between two attempts
        (PID, {}, True),  # an attempt that has not reached the lock
        (PID, blockers, True),
        (PID, {}, True),
        (PID, {}, False),  # the drainer applies changes
        (PID, blockers, True),
    ):
        relations.only_lane.backend_pid, read.return_value = pid, blocking
        await report._write_waiting()
        assert (relations.wait is not None) is is_waiting
    relations.only_lane.hold, relations.only_lane.backend_pid = Hold.NONE, None
    await report._write_waiting()
    assert relations.wait is None, "the lane is live"


@pytest.mark.parametrize(
    ("cause", "is_reported"),
    [(asyncpg.LockNotAvailableError("lock timeout"), False), (asyncpg.DiskFullError("full"), True)],
)
def test_the_drainer_reports_no_lock_because_the_status_names_its_holder(
    cause: Exception, is_reported: bool
) -> None:
    error = TargetContentionError("target: busy")
    error.__cause__ = cause
    assert _needs_report(error) is is_reported
