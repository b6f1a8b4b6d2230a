"""The state of a source while an attempt starts."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from streamer.errors.error_classes import SlotMissingError
from streamer.errors.error_reports import ErrorReport
from streamer.runtime.services import Health
from streamer.runtime.session import start_waits
from streamer.runtime.session.start_waits import StartWaits

GONE = ErrorReport.of(SlotMissingError("the slot is gone"))


@pytest.mark.asyncio
async def test_an_error_stays_visible_while_the_next_attempt_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[tuple[str, ErrorReport | None, str | None]] = []

    async def store(
        _: Any, __: int, state: str, error: ErrorReport | None, *, waiting_for: str | None
    ) -> None:
        shown.append((state, error, waiting_for))

    monkeypatch.setattr(start_waits, "set_source_state", store)
    attempt = SimpleNamespace(
        source=None,
        services=SimpleNamespace(bookkeeping=None),
        fence=SimpleNamespace(source_id=1),
        health=Health(),
    )
    waits = StartWaits(cast("Any", attempt))
    await waits.show()
    attempt.health.state, attempt.health.error = "error", GONE
    await waits.show()
    await waits.show(waiting_for="its turn")
    assert shown == [
        ("starting", None, None),
        ("error", GONE, None),
        ("starting", None, "its turn"),
    ]
