"""The target has a separate state, while no source streams and no session writes."""

import pytest

from streamer.commands.status import read_report
from streamer.postgres.secret import Secret
from streamer.runtime import target_health
from streamer.runtime.target_health import TargetState, check_once
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database
from tests.support.proxy import Proxy
from tests.support.remedies import Operator
from tests.support.streamer import MakeStreamer, Streamer
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def tables(source: Database, target: Database) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key)")


def metric(streamer: Streamer, name: str, **labels: str) -> float | None:
    return streamer.engine.metrics.registry.get_sample_value(name, labels)


@pytest.mark.parametrize("way", ["leave", "blackhole"])
@pytest.mark.follows("postgres.conninfo:reach_hint")
async def test_an_idle_source_reports_that_the_target_is_down_and_ages_grow(
    source: Database, target: Database, target_proxy: Proxy, stream: MakeStreamer, way: str
) -> None:
    shop = {"database": "shop", "sid": ""}
    async with stream("t: {initial: none}", settings="heartbeat_interval: 0.2") as streamer:
        await streamer.caught_up()

        async def has_beaten() -> bool:
            return metric(streamer, "streamer_heartbeat_seconds", **shop) is not None

        await streamer.eventually(has_beaten, 60)
        assert streamer.engine.readiness() == []
        assert metric(streamer, "streamer_target_up") == 1

        getattr(target_proxy, way)()

        async def is_reported() -> bool:
            # The source may find the outage first, because a pipeline loses its own session.
            return any(reason["state"] == "unreachable" for reason in streamer.engine.readiness())

        await until(is_reported)
        (first, *_) = streamer.engine.readiness()
        assert first["state"] == "unreachable", "the target's state is the first reason"
        assert "pg_isready" in first["hint"]
        assert metric(streamer, "streamer_target_up") == 0

        async def ages_grow() -> bool:
            silent = metric(streamer, "streamer_target_silent_seconds") or 0
            beat = metric(streamer, "streamer_heartbeat_seconds", **shop) or 0
            return silent > 3 and beat > 3

        await until(ages_grow)

        remedy = streamer.engine.target.remedy
        assert remedy is not None
        assert "pg_isready" in str(remedy)
        operator = Operator(streamer.path, source, target)
        if way == "leave":
            with pytest.raises(AssertionError, match="pg_isready"):
                await operator.follow(remedy)
        target_proxy.heal()
        await operator.follow(remedy)
        await streamer.caught_up(60)

        async def is_well() -> bool:
            return streamer.engine.readiness() == [] and (
                metric(streamer, "streamer_target_silent_seconds") == 0
            )

        await streamer.eventually(is_well, 60)


async def test_a_target_that_is_a_standby_is_not_well(
    target: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_health, "_IS_READ_ONLY_SQL", "select true")
    health = await check_once(TargetAddress.parse(Secret(target.url)), "streamer test")
    assert health.state is TargetState.READ_ONLY
    assert "pg_promote" in (health.hint or "")


async def test_status_names_a_source_that_is_down_beside_the_target(
    target_proxy: Proxy, source_proxy: Proxy, stream: MakeStreamer
) -> None:
    """The source's own error and hint, and not those of the target, which has a separate state."""
    async with stream("t: {initial: none}") as streamer:
        await streamer.caught_up()
        target_proxy.leave()
        source_proxy.leave()
        report = await read_report(
            TargetAddress.parse(streamer.settings.target.url), streamer.mapping
        )
        for proxy in (target_proxy, source_proxy):
            proxy.heal()
    (shop,) = report.to_json()["sources"]
    assert (shop["state"], shop["error_code"]) == ("unreachable", "source_down")
    assert "the target" not in shop["error"]
    assert f"-p {source_proxy.port}" in shop["hint"]


async def test_status_reports_a_target_that_is_down_and_still_asks_the_sources(
    target_proxy: Proxy, stream: MakeStreamer
) -> None:
    async with stream("t: {initial: none}") as streamer:
        await streamer.caught_up()
        address = TargetAddress.parse(streamer.settings.target.url)
        target_proxy.leave()
        report = (await read_report(address, streamer.mapping)).to_json()
        target_proxy.heal()
    assert report["target"]["state"] == "unreachable"
    assert report["target"]["commands"][0].startswith("pg_isready ")
    (shop,) = report["sources"]
    assert shop["state"] == "unknown"
    assert shop["confirmed_flush_lsn"] is not None
