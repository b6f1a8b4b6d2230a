"""Both sides over TLS: streamer verifies certificates, and names a wrong certificate."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamer.errors.error_classes import (
    SourceConnectionError,
    StreamerError,
    TargetConnectionError,
)
from streamer.mapping.rules import SourceMapping
from streamer.postgres.secret import Secret
from streamer.source.connection import connection
from streamer.target.connection import TargetAddress, target_connection
from tests.support.postgres import Database, database
from tests.support.streamer import MakeStreamer
from tests.support.tls import Authority, Certificate, TlsServer, tls_server

pytestmark = pytest.mark.usefixtures("without_spark")


class _Pki:
    """Two authorities, of which the servers have the first, and a client's certificate."""

    def __init__(self, directory: Path) -> None:
        self.ours, self.other = Authority(directory, "ours"), Authority(directory, "other")
        self.server = self.ours.issue("server")
        self.client = self.ours.issue("certified")

    def parameters(
        self, authority: Authority | None = None, client: Certificate | None = None
    ) -> str:
        found = f"sslmode=verify-full&sslrootcert={(authority or self.ours).path}"
        if client is not None:
            found += f"&sslcert={client.path}&sslkey={client.key_path}"
        return found


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> _Pki:
    return _Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def speaking(pki: _Pki, server_directory: Path) -> Iterator[TlsServer]:
    with tls_server(server_directory / "tls", pki.ours, pki.server) as server:
        server.server.execute("create role certified superuser login")
        yield server


@pytest.fixture(params=["postgres", "certified"])
def parameters(request: pytest.FixtureRequest, pki: _Pki) -> tuple[str, str]:
    """Return a role, and the libpq parameters of the role's urls."""
    client = pki.client if request.param == "certified" else None
    return request.param, pki.parameters(client=client)


@pytest.fixture
def source(speaking: TlsServer, parameters: tuple[str, str]) -> Iterator[Database]:
    with _database(speaking, "shop", parameters) as made:
        yield made


@pytest.fixture
def target(speaking: TlsServer, parameters: tuple[str, str]) -> Iterator[Database]:
    with _database(speaking, "dw", parameters) as made:
        yield made


@contextlib.contextmanager
def _database(speaking: TlsServer, prefix: str, parameters: tuple[str, str]) -> Iterator[Database]:
    with database(speaking.server, prefix) as made:
        made.port = speaking.port
        made.url_user, made.parameters = parameters
        yield made


async def _failures(url: str) -> list[StreamerError]:
    """Return the errors of a source and a target at *url*; None for a side that answers."""
    found: list[StreamerError] = []
    try:
        async with connection(SourceMapping("shop", None, Secret(url), ())):
            pass
    except StreamerError as exc:
        found.append(exc)
    try:
        async with target_connection(TargetAddress.parse(Secret(url))):
            pass
    except StreamerError as exc:
        found.append(exc)
    return found


async def test_verified_certificates_carry_copy_and_stream(
    speaking: TlsServer, source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute("create table t (id int primary key); insert into t values (1)")
    async with stream("t: {}") as streamer:
        await streamer.table_state("public.t", "ready")
        source.execute("insert into t values (2)")
        await streamer.caught_up()
        assert target.execute("select id from t order by 1") == [(1,), (2,)]
        if speaking.port == speaking.server.port:
            assert source.value(_PLAIN_SQL) == 0


_PLAIN_SQL = """
select count(*) from pg_stat_activity join pg_stat_ssl using (pid)
where application_name like 'streamer%' and not ssl
"""


async def test_a_certificate_that_does_not_verify_is_named(pki: _Pki, speaking: TlsServer) -> None:
    """The error is transient, because an operator can renew a certificate at the server."""
    url = speaking.server.url().replace(f":{speaking.server.port}/", f":{speaking.port}/")
    wanted = f"{url}?{pki.parameters()}"
    assert await _failures(wanted) == []

    async def is_refused(url: str, *words: str) -> None:
        source, target = await _failures(url)
        assert isinstance(source, SourceConnectionError)
        assert isinstance(target, TargetConnectionError)
        for error in (source, target):
            assert "sslrootcert" in (error.hint or ""), error
            assert any(word in error.message for word in words), error

    await is_refused(f"{url}?{pki.parameters(pki.other)}", "certificate verify failed")
    speaking.present(pki.ours.issue("expired", days=-1))
    try:
        await is_refused(wanted, "expired", "certificate verify failed")
        speaking.present(pki.ours.issue("elsewhere", address="127.0.0.9"))
        await is_refused(wanted, "does not match", "mismatch")
        assert await _failures(wanted.replace("verify-full", "verify-ca")) == []
    finally:
        speaking.present(pki.server)


async def test_a_missing_client_certificate_is_refused(pki: _Pki, speaking: TlsServer) -> None:
    url = speaking.server.url(user="certified")
    url = url.replace(f":{speaking.server.port}/", f":{speaking.port}/")
    assert await _failures(f"{url}?{pki.parameters(client=pki.client)}") == []
    assert len(await _failures(f"{url}?{pki.parameters()}")) == 2
    stranger = pki.other.issue("certified")
    assert len(await _failures(f"{url}?{pki.parameters(client=stranger)}")) == 2
