"""The end of a round whose copies fail."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from streamer.copy.copy_coordinator import SyncCoordinator
from streamer.copy.finish_copies import Finisher
from streamer.errors.error_classes import StreamerError, SyncError, TargetFencedError
from tests.unit.build import mapped_relation


@pytest.mark.parametrize("failure", [None, TargetFencedError("another process took the source")])
async def test_copies_that_end_while_a_failure_is_stored_end_with_the_cause(
    monkeypatch: pytest.MonkeyPatch, failure: StreamerError | None
) -> None:
    """Seen failing: the failed copy began a removal in the closed group of the rounds.

    That ended the source with an internal error. *failure*: a removal of a second table fails; None:
    the owner cancels the copies.
    """
    is_cleaning = asyncio.Event()

    async def clear_up(*_: object) -> None:
        is_cleaning.set()
        await asyncio.Event().wait()

    async def do_nothing(*_: object) -> None:
        pass

    async def refuse(*_: object) -> None:
        raise SyncError("the target refuses a statement of the round")

    monkeypatch.setattr(SyncCoordinator, "_restore_leftovers", do_nothing)
    monkeypatch.setattr(SyncCoordinator, "_round", refuse)
    monkeypatch.setattr(Finisher, "_clear_up", clear_up)
    context: Any = SimpleNamespace(
        label="shop",
        source=SimpleNamespace(label="shop", database="shop", sid=None),
        metrics=SimpleNamespace(count_error=lambda *_: None),
        events=SimpleNamespace(step=lambda *_, **__: None),
        bookkeeping=None,
    )
    coordinator = SyncCoordinator(context)
    failing, removed = mapped_relation(1), mapped_relation(2)
    coordinator.request(failing)
    coordinator.request(removed)
    copies = asyncio.create_task(coordinator.run())
    await is_cleaning.wait()
    if failure is None:
        copies.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copies
        return

    async def fail() -> None:
        raise failure

    async def is_withdrawn(*_: object) -> bool:
        return True

    monkeypatch.setattr("streamer.copy.round_removal.withdraw_parts", is_withdrawn)
    coordinator._leaving.remove(removed, then=fail)
    with pytest.raises(ExceptionGroup) as caught:
        await copies
    assert caught.value.exceptions == (failure,)
