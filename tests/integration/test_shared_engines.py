"""Tests that share an engine do not disturb the separate tests of the module."""

import pytest

from tests.support.postgres import assert_same, version_of_targets, version_of_tests
from tests.support.shared import Engines, Shared, streams

SOURCE = "create table t (id int primary key); insert into t values (1)"


@streams("t:", source=SOURCE)
async def test_a_stopped_engine_leaves_no_session(shared: Shared, engines: Engines) -> None:
    await shared.caught_up()
    assert_same(shared.source, shared.target, "t")
    sessions = (
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and application_name like 'streamer%'"
    )
    sides = shared.source, shared.target
    assert all(side.value(sessions) for side in sides)
    await engines.stop_all()
    assert not any(side.value(sessions) for side in sides)


@streams("t:", source=SOURCE)
async def test_both_servers_have_the_versions_of_the_run(shared: Shared) -> None:
    version = "select split_part(current_setting('server_version'), '.', 1)"
    sides = shared.source, shared.target
    majors = tuple(side.value(version) for side in sides)
    assert majors == (version_of_tests(), version_of_targets())


def test_no_engine_stands_still_beside_a_test_that_runs_alone(
    request: pytest.FixtureRequest, engines: Engines
) -> None:
    # A statement that stops the engine's loop would keep a transaction open, which delays each new
    # slot.
    assert not engines.started
    assert "no_engine_runs" in request.fixturenames
    items = [item for item in request.session.items if item.path == request.node.path]
    assert items[0] is request.node
