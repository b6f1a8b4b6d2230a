"""A webhook gets one message at the beginning of each problem, and one message at its end."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from streamer.report.notice_duty import NoticeDuty
from streamer.report.problems import Problem
from streamer.runtime.health import notifier, problem_log
from streamer.runtime.process.engine import Engine, StopCondition
from streamer.runtime.replicas.mapping_follower import MappingFollower
from tests.support.postgres import Database
from tests.support.proxy import Proxy
from tests.support.receiver import Receiver, receiving
from tests.support.streamer import MakeStreamer, Streamer, write_config
from tests.support.waiting import until

RULES = "{t: {initial: none}, u: {initial: none}}"
BEGUN = ("begun", "table", "shop public.t")
ENDED = ("ended", "table", "shop public.t")


@pytest.fixture
async def receiver(
    source: Database, target: Database, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Receiver]:
    """Receive, beside tables of which the target refuses rows of ``t`` with a negative key."""
    for db in (source, target):
        db.execute("create table t (id int primary key); create table u (id int primary key)")
    target.execute("alter table t add constraint positive check (id > 0)")
    monkeypatch.setattr(problem_log, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(notifier, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(notifier, "ABSENT_SECONDS", 3.0)
    async with receiving() as receiver:
        yield receiver


def settings(receiver: Receiver, on: str = "table") -> str:
    return f"notify: {{webhook: '{receiver.url}/hook', key: signing, on: [{on}]}}"


def outcomes(streamer: Streamer) -> tuple[float, float]:
    """Return how many messages were sent, and how many failed."""
    values = [
        streamer.engine.metrics.registry.get_sample_value(
            "streamer_notifications_total", {"outcome": outcome}
        )
        for outcome in ("sent", "failed")
    ]
    return values[0] or 0.0, values[1] or 0.0


async def test_a_problem_gives_one_notice_despite_refusals_and_a_restart(
    source: Database, target: Database, stream: MakeStreamer, receiver: Receiver
) -> None:
    async with stream(RULES, settings=settings(receiver)) as streamer:
        await streamer.caught_up()
        receiver.status = 500
        source.execute("insert into t values (-77)")
        await until(lambda: len(receiver.refused) > 1)
        # A receiver that refuses disturbs no other table.
        source.execute("insert into u values (1)")
        await until(lambda: target.execute("select id from u") == [(1,)])
        assert outcomes(streamer)[1] > 0
        receiver.status = 200
        await until(lambda: receiver.events == [BEGUN])
        (delivery,) = receiver.accepted
        assert delivery.path == "/hook"
        assert "public.t" in delivery.content["text"]
        assert "-77" not in delivery.body.decode()
        assert {each.headers["webhook-id"] for each in receiver.refused} == {
            delivery.headers["webhook-id"]
        }
        await streamer.stop()

        streamer.start()
        await streamer.source_state("streaming")
        target.execute("alter table t drop constraint positive")
        await streamer.ask("resume")
        await streamer.caught_up()
        await until(lambda: receiver.events == [BEGUN, ENDED])
        await until(lambda: target.execute("select * from streamer.notification") == [])


async def test_a_new_receiver_is_adopted_while_the_sources_stream(
    source: Database, target: Database, stream: MakeStreamer, receiver: Receiver, tmp_path: Path
) -> None:
    async with (
        receiving() as second,
        stream(RULES, settings=settings(receiver, "wal")) as streamer,
    ):
        await streamer.caught_up()
        source.execute("insert into t values (-1)")
        await streamer.table_state("public.t", "error")
        write_config(streamer.path, source, target, RULES, settings=settings(second))
        await streamer.apply()
        await until(lambda: second.events == [BEGUN])
        assert receiver.accepted == []


async def test_of_two_replicas_one_tells_of_a_problem_and_the_other_of_its_end(
    source: Database, target: Database, receiver: Receiver, tmp_path: Path
) -> None:
    replicas = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "config.yaml"
        write_config(path, source, target, RULES, settings=settings(receiver))
        replicas.append(Streamer(path))
    first, second = replicas
    first.start()
    try:
        await first.caught_up()
        second.start()
        await until(lambda: any(not each.is_assigned for each in second.engine.supervisors))
        source.execute("insert into t values (-1)")
        await until(lambda: receiver.events == [BEGUN])
        await first.stop()
        await until(lambda: all(each.is_streaming for each in second.engine.supervisors))
        target.execute("alter table t drop constraint positive")
        await second.ask("resume")
        await until(lambda: receiver.events == [BEGUN, ENDED])
    finally:
        await asyncio.gather(first.stop(), second.stop())


async def test_a_process_with_a_part_of_the_mapping_reports_no_source_of_another_process(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second process runs no source here, as with `--only` and a source not yet mapped."""
    monkeypatch.setattr(notifier, "ABSENT_SECONDS", 0.1)
    checks: Counter[bool] = Counter()
    check = notifier.Notifier.check

    def count(self: notifier.Notifier, problems: Sequence[Problem], duty: NoticeDuty) -> None:
        checks[bool(duty.own)] += 1
        check(self, problems, duty)

    monkeypatch.setattr(notifier.Notifier, "check", count)
    async with stream(RULES, settings=settings(receiver)) as streamer:
        await streamer.caught_up()
        source.execute("insert into t values (-1)")
        await until(lambda: receiver.events == [BEGUN])
        second = Engine(
            streamer.settings,
            replace(streamer.mapping, sources=()),
            StopCondition(),
            is_partial=True,
        )
        second.following = MappingFollower(lambda: streamer.mapping, lambda: None)
        running = asyncio.create_task(second.run())
        await until(lambda: second.target.is_well)
        checks.clear()
        await until(lambda: checks[False] > 20)
        second.stop()
        await running
        assert receiver.events == [BEGUN]


async def test_the_receiver_hears_that_the_target_is_away(
    target: Database, target_proxy: Proxy, stream: MakeStreamer, receiver: Receiver
) -> None:
    async with stream(RULES, settings=settings(receiver, "target")) as streamer:
        await streamer.caught_up()
        target_proxy.leave()
        await until(lambda: len(receiver.accepted) == 1)
        target_proxy.heal()
        await until(lambda: len(receiver.accepted) == 2)
        assert [event[:2] for event in receiver.events] == [
            ("begun", "target"),
            ("ended", "target"),
        ]
        await streamer.caught_up()
