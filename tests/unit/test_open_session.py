"""Opening a session, without servers."""

import asyncio
from typing import Any
from unittest import mock

import pytest

from streamer.errors.error_classes import TargetConnectionError
from streamer.runtime.session import open_session as opening
from streamer.runtime.session import start_waits
from streamer.runtime.session.open_session import open_session


async def test_a_session_that_cannot_be_opened_gives_up_its_lanes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempt: Any = mock.Mock()
    away = mock.AsyncMock(side_effect=TargetConnectionError("away"))
    monkeypatch.setattr(opening, "read_source_record", away)
    tables: Any = mock.AsyncMock()
    with pytest.raises(TargetConnectionError):
        await open_session(attempt, tables)
    tables.close.assert_awaited_once_with()


async def test_a_session_whose_opening_is_cancelled_closes_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of the reports of the password is awaited, with the connection open already."""
    connection: Any = mock.AsyncMock()

    async def connect_and_be_cancelled(*_: object, **__: object) -> Any:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return connection

    monkeypatch.setattr(start_waits, "set_source_state", mock.AsyncMock())
    for name, replacement in {
        "read_source_record": mock.AsyncMock(),
        "take_requests": mock.AsyncMock(),
        "prefer_newest": mock.AsyncMock(),
        "connect": connect_and_be_cancelled,
    }.items():
        monkeypatch.setattr(opening, name, replacement)
    attempt: Any = mock.Mock()
    task = asyncio.create_task(open_session(attempt, mock.AsyncMock()))
    await asyncio.wait([task])
    assert task.cancelled()
    connection.close.assert_awaited_once_with()
