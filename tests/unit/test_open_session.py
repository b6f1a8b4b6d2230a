"""Opening a session, without servers."""

from typing import Any
from unittest import mock

import pytest

from streamer.errors import TargetConnectionError
from streamer.runtime.session import open_session


async def test_a_session_that_cannot_be_opened_gives_up_its_lanes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempt: Any = mock.Mock()
    monkeypatch.setattr(
        "streamer.runtime.session.read_source_record",
        mock.AsyncMock(side_effect=TargetConnectionError("away")),
    )
    tables: Any = mock.AsyncMock()
    with pytest.raises(TargetConnectionError):
        await open_session(attempt, tables)
    tables.close.assert_awaited_once_with()
