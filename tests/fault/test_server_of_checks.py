"""The checks of a source use the server of its stream."""

from pathlib import Path

import pytest

from streamer.runtime.guards import source_monitor
from streamer.runtime.heartbeat import Heartbeat
from streamer.runtime.session import pipeline, source_checks
from streamer.runtime.session.session import Session
from streamer.runtime.wal_retention.backlog_guard import BacklogGuard
from streamer.source.connection import put_host_first
from tests.support.postgres import Database, running, versions
from tests.support.standby import OnEither, standby
from tests.support.streamer import Streamer, write_config
from tests.support.waiting import until

ERROR = "select error from streamer.relation where source = 'public.parts'"


async def test_a_search_for_gaps_at_a_late_standby_of_the_source_hides_no_gap(
    target: Database,
    tmp_path: Path,
    server_directory: Path,
    without_spark: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = server_directory / tmp_path.name
    with running(own / "first", versions()["18"]) as first:
        first.execute("create database shop")
        first.execute("create table parts (id int primary key) partition by range (id)", "shop")
        first.execute("create table strays (id int primary key)", "shop")
        first.execute("insert into strays values (1)", "shop")
        with standby(first, own / "second") as second:
            # GIVEN a url that leads the first session of the checks to a standby
            source = OnEither(first, second, "shop")
            source.options = "target_session_attrs=any"
            check_source = source_checks.check_source
            attempts = 0

            async def check_at_standby(
                session: Session, heartbeat: Heartbeat, guard: BacklogGuard
            ) -> None:
                nonlocal attempts
                attempts += 1

                async def is_guarded() -> bool:
                    return session.monitor.digest is not None

                await until(is_guarded)
                await session.services.sources.close()
                server = second if attempts == 1 else first
                put_host_first(session.tables.source, ("127.0.0.1", str(server.port)))
                await check_source(session, heartbeat, guard)

            monkeypatch.setattr(pipeline, "check_source", check_at_standby)
            monkeypatch.setattr(source_monitor, "GUARD_SECONDS", 0.2)
            path = tmp_path / "config.yaml"
            write_config(path, source, target, "parts:")
            streamer = Streamer(path)
            streamer.start()
            try:
                await streamer.caught_up()

                async def are_checking() -> bool:
                    return attempts > 0

                await streamer.eventually(are_checking)

                # WHEN a session attaches a partition with rows, and the standby sees it late
                second.execute("select pg_wal_replay_pause()")
                first.execute(
                    "alter table parts attach partition strays for values from (0) to (9)", "shop"
                )

                # THEN the status shows the gap
                async def is_told() -> bool:
                    return "attached as a partition" in str(target.value(ERROR))

                await streamer.eventually(is_told, 40)
            finally:
                await streamer.stop()
