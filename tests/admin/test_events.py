"""The events that listeners receive."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from streamer.admin.live import events as module
from streamer.errors.error_reports import ErrorReport
from streamer.runtime.services import Health
from tests.support.admin import Admin, OpenAdmin
from tests.support.waiting import until


class Source:
    """A supervisor's outside."""

    def __init__(self, label: str) -> None:
        self.pipeline = SimpleNamespace(lag_bytes=7, lag_seconds=lambda: 0.5)
        self.source = SimpleNamespace(label=label)
        self.health = Health("streaming")
        self.retained_wal_bytes = 56
        self.runs_elsewhere = True  # the charts read no samples

    @property
    def condition(self) -> tuple[str, ErrorReport | None]:
        return self.health.state, self.health.error


def source(label: str = "shop:eu") -> Any:
    return Source(label)


async def told(stream: Any) -> tuple[str, dict[str, Any]]:
    text = await asyncio.wait_for(anext(stream), 60)
    name, data = text.removesuffix("\n\n").split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


@pytest.fixture(autouse=True)
def without_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.01)


async def test_only_changes_give_events(open_admin: OpenAdmin) -> None:
    async with open_admin() as admin:
        supervisor = source()
        supervisor.health.table_states = {"public.t": "ready"}
        admin.engine.supervisors.append(supervisor)
        stream = admin.events.stream(admin.events.subscribe())

        name, snapshot = await told(stream)
        assert name == "snapshot"
        assert [state["state"] for state in snapshot["states"]] == ["streaming", "ready"]

        supervisor.health.table_states = {"public.t": "error"}
        error = ErrorReport("postgresql://u:hunter2@h/db is down", "target_down")
        supervisor.health.table_errors = {"public.t": error}
        name, state = await told(stream)
        assert (name, state["table"], state["state"]) == ("state", "public.t", "error")
        assert "hunter2" not in state["error"]
        assert (state["error_code"], state["runbook"]) == (
            "target_down", "/help/runbooks/target-away",
        )  # fmt: skip

        supervisor.pipeline.lag_bytes = 8
        assert await told(stream) == (
            "lag",
            {"source": "shop:eu", "lag_bytes": 8, "lag_seconds": 0.5},
        )
        admin.engine.supervisors.clear()
        assert (await told(stream))[1]["state"] == "removed"
        await stream.aclose()


async def test_a_snapshot_is_of_this_moment(
    open_admin: OpenAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHECK_SECONDS", 60)
    async with open_admin() as admin:
        admin.events.start()
        admin.engine.supervisors.append(source())
        _, snapshot = await told(admin.events.stream(admin.events.subscribe()))
        assert [state["state"] for state in snapshot["states"]] == ["streaming"]


async def test_a_listener_that_comes_after_all_have_left_gets_events(
    open_admin: OpenAdmin,
) -> None:
    async with open_admin() as admin:
        admin.engine.supervisors.append(source())
        for state in ("waiting", "streaming"):
            stream = admin.events.stream(admin.events.subscribe())
            assert (await told(stream))[0] == "snapshot"
            admin.engine.supervisors[0].health.state = state
            assert (await told(stream))[1]["state"] == state
            await stream.aclose()


async def test_a_slow_listener_is_disconnected(open_admin: OpenAdmin) -> None:
    async with open_admin() as admin:
        queue = admin.events.subscribe()
        for number in range(module.QUEUE_MAX + 5):
            admin.events.publish("draft", {"number": number})
        stream = admin.events.stream(queue)
        seen = [event async for event in stream]
        assert len(seen) < module.QUEUE_MAX + 5


async def test_streams_end_with_the_server(open_admin: OpenAdmin) -> None:
    async with open_admin() as admin:
        stream = admin.events.stream(admin.events.subscribe())
        assert (await told(stream))[0] == "snapshot"
        await admin.events.close()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert await closed(admin)


async def closed(admin: Admin) -> bool:
    return [event async for event in admin.events.stream(admin.events.subscribe())] == []


async def test_listening_ends_with_the_session(open_admin: OpenAdmin) -> None:
    async with open_admin() as admin:
        is_logged_in = True
        stream = admin.events.stream(admin.events.subscribe(), lambda: is_logged_in)
        assert (await told(stream))[0] == "snapshot"
        is_logged_in = False
        admin.events.publish("draft", {"action": "discard"})
        with pytest.raises(StopAsyncIteration):
            await told(stream)


async def test_rates_and_errors_are_kept_for_later_listeners(open_admin: OpenAdmin) -> None:
    async with open_admin() as admin:
        supervisor = source()
        supervisor.health.table_states = {"public.t": "ready"}
        admin.engine.supervisors.append(supervisor)
        admin.events.start()
        changes = admin.engine.metrics.changes_of_sources
        changes["shop:eu"] = 1000
        wrong = ErrorReport("password=hunter2 is wrong", "target_auth")
        supervisor.health.table_errors = {"public.t": wrong}
        await until(lambda: admin.events.errors("shop:eu"))
        supervisor.health.table_errors = {}

        stream = admin.events.stream(admin.events.subscribe())
        _, snapshot = await told(stream)
        (rates,) = snapshot["rates"]
        assert (rates["source"], max(rates["changes_per_second"]) > 0) == ("shop:eu", True)
        (error,) = admin.events.errors("shop:eu", "public.t")
        assert (error.table, "hunter2" in error.text) == ("public.t", False)
        assert admin.events.errors("shop:eu", "public.u") == []
        await stream.aclose()
