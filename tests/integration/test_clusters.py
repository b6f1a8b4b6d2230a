"""Private servers of tests: copies that no test confuses."""

from pathlib import Path

import pytest

from tests.support.clusters import CopiedServer
from tests.support.postgres import SETTINGS, own_directory, versions


@pytest.mark.parametrize("major", sorted(versions()))
def test_each_copied_cluster_has_its_own_identifier_and_recovers(
    major: str, server_directory: Path
) -> None:
    identifiers = set()
    for _ in range(2):
        place = own_directory(server_directory / "copied")
        server = CopiedServer(place, versions()[major], SETTINGS)
        try:
            server.create()
            server.start()
            server.execute("create table kept as select 1 as a; select pg_switch_wal()")
            server.kill()
            server.start()
            assert server.execute("select a from kept") == [(1,)]
            found = server.execute("select system_identifier from pg_control_system()")
            identifiers.update(found)
        finally:
            server.remove()
    assert len(identifiers) == 2
