"""`streamer wait` over a target that fails over."""

from typing import Any
from unittest import mock

import pytest

from streamer.bookkeeping.positions import RelationPosition, SourcePosition
from streamer.commands import wait as module
from streamer.errors.error_classes import SourceConnectionError
from streamer.mapping.rules import SourceLabel
from streamer.mapping.scope import ALL, Scope
from streamer.util.lsn import Lsn


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


def table(name: str, row_sid: str, *, lsn: int) -> RelationPosition:
    return RelationPosition(1, name, row_sid, "ready", Lsn(lsn), has_request=False)


@pytest.mark.parametrize(
    ("scope", "obstacles"),
    [
        (Scope(sid="a"), []),
        (Scope(sid="b"), ['table "b.t" of "shop": visible 0/1, waiting for 0/9']),
        (Scope(sid="none"), ['no table with sid "none" is streamed']),
        (Scope(("a.*",), sid="b"), ['no table "a.*" with sid "b" is streamed']),
        (ALL, ['source "shop": confirmed 0/1, waiting for 0/9', "lost"]),
    ],
    ids=str,
)
async def test_a_wait_for_a_tenant_reads_the_positions_of_its_tables(
    monkeypatch: pytest.MonkeyPatch, scope: Scope, obstacles: list[str]
) -> None:
    """A source that does not answer, and has no table of the tenant, is no obstacle."""
    shop, bank = SourceLabel("shop", None), SourceLabel("bank", None)
    tables = [table("a.t", "a", lsn=9), table("b.t", "b", lsn=1)]
    positions = {
        label: SourcePosition(label, Lsn(1), relations)
        for label, relations in ((shop, tables), (bank, []))
    }
    awaited: module.EndPositions = {shop: Lsn(9), bank: SourceConnectionError("lost")}
    monkeypatch.setattr(module, "is_installed", mock.AsyncMock(return_value=True))
    monkeypatch.setattr(module, "read_positions", mock.AsyncMock(return_value=positions))
    waiting = module._Waiting(mock.Mock(), scope, awaited, makes_definitions=False)
    assert await waiting._find_obstacles() == obstacles
