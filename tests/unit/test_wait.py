"""`streamer wait` over a target that fails over."""

from typing import Any
from unittest import mock

import pytest

from streamer.commands import wait as module
from streamer.commands.command_scope import ALL


async def test_a_long_wait_connects_to_the_server_that_the_url_leads_to_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_old_primary = True

    async def move() -> None:
        nonlocal at_old_primary
        at_old_primary = False

    async def find_obstacles(_: Any) -> list[str]:
        return ["behind"] if at_old_primary else []

    monkeypatch.setattr(module._Waiting, "_find_obstacles", find_obstacles)
    monkeypatch.setattr(module, "request_positions", mock.AsyncMock())
    monkeypatch.setattr(module, "RECONNECT_SECONDS", 0.0)
    bookkeeping: Any = mock.Mock(close=mock.AsyncMock(side_effect=move))
    waiting = module._Waiting(bookkeeping, ALL, {}, makes_definitions=False)
    await waiting.run()
    assert bookkeeping.close.await_count == 1
