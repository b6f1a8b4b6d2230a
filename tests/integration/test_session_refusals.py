"""A server refuses a session of streamer: the statement of the remedy lets the next session in."""

from collections.abc import Iterator

import pytest

from streamer.errors.error_classes import StreamerError
from streamer.postgres.secret import Secret
from streamer.source.connection import connect
from streamer.target.connection import TargetAddress, TargetConnection
from tests.support.postgres import Database
from tests.unit.build import source_mapping

CAUSES = {
    "alter role {role} connection limit 0": "too many connections for role",
    "alter database {database} connection limit 0": "too many connections for database",
    "alter role {role} nologin": "is not permitted to log in",
    "drop role {role}": "does not exist",
    "revoke connect on database {database} from public": "permission denied for database",
    "alter database {database} allow_connections false": "is not currently accepting connections",
    "alter database {database} rename to {database}_former": "does not exist",
}


async def open_session(side: str, url: Secret) -> None:
    if side == "source":
        await (await connect(source_mapping(url=url))).close()
    else:
        await (await TargetConnection.connect(TargetAddress.parse(url), "streamer test")).close()


@pytest.fixture(params=["source", "target"])
def side(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(side: str, source: Database, target: Database) -> Iterator[Secret]:
    """The url of a role and a database of the test's own."""
    server = (source if side == "source" else target).server
    names = {"role": f"refused_{source.name}", "database": f"refused_in_{source.name}"}
    server.execute("create role {role} login".format(**names))
    server.execute("create database {database}".format(**names))
    yield Secret(server.url(names["database"], names["role"]))
    server.execute("drop database if exists {database}".format(**names))
    server.execute("drop database if exists {database}_former".format(**names))
    server.execute("drop role if exists {role}".format(**names))


@pytest.mark.follows("postgres.session_refusals:Refusal.remedy")
async def test_the_statement_of_the_remedy_lets_the_next_session_in(
    side: str, url: Secret, source: Database, target: Database
) -> None:
    server = (source if side == "source" else target).server
    names = {"role": f"refused_{source.name}", "database": f"refused_in_{source.name}"}
    await open_session(side, url)
    for sql, cause in CAUSES.items():
        server.execute(sql.format(**names))
        with pytest.raises(StreamerError, match=cause) as refused:
            await open_session(side, url)
        assert refused.value.remedy is not None
        (remedy,) = refused.value.remedy.sql
        assert remedy.side == side
        for statement in remedy.statements:
            server.execute(statement)
        await open_session(side, url)
