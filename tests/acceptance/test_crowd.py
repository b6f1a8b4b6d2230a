"""A crowd at the port of the page, without a login, delays no stream."""

import contextlib
import resource
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from streamer.commands.demo.embedded_servers import free_port
from tests.support.postgres import Database
from tests.support.process import Process
from tests.support.waiting import eventually

LIMIT = 1024
TOKEN = "token-of-the-crowd-test"
HEAD = "POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 8000000\r\n\r\n"
END_SQL = """
select count(pg_terminate_backend(pid)) from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid()
"""


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Let this process open the connections of the crowd."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_idle_connections_and_unfinished_logins_do_not_stop_replication(
    tmp_path: Path, source: Database, target: Database
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key)")
    port = free_port()
    (config := tmp_path / "config.yaml").write_text(
        f'target: {{url: "{target.url}"}}\n'
        f"http: {{listen: '127.0.0.1:{port}'}}\n"
        f"admin: {{token: {TOKEN}}}\n"
        f'spool: {{directory: "{tmp_path}/spool"}}\n'
        f'sources: [{{database: shop, urls: [{{url: "{source.url}"}}], tables: {{t: }}}}]\n'
    )

    def answers(path: str) -> bool:
        url = f"http://127.0.0.1:{port}{path}"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
            return bool(answer.status == 200)
        return False

    def connect(sent: bytes) -> socket.socket:
        crowd.enter_context(made := socket.create_connection(("127.0.0.1", port), timeout=10))
        with contextlib.suppress(OSError):  # the server may have ended the connection
            made.sendall(sent)
        return made

    with Process(config, spark=False) as process, contextlib.ExitStack() as crowd:
        facts = psutil.Process(process.process.pid)
        facts.rlimit(psutil.RLIMIT_NOFILE, (LIMIT, LIMIT))
        eventually(lambda: answers("/readyz"), what="the table is in step")
        before = facts.memory_info().rss
        for _ in range(LIMIT + 100):
            connect(b"")
        assert facts.num_fds() < LIMIT / 2
        # New connections need descriptors: those of a source that begins again, and of workers.
        source.execute(END_SQL)
        source.execute("insert into t values (1)")
        target.execute(END_SQL)
        eventually(lambda: target.execute("select id from t") == [(1,)], what="a change arrives")
        eventually(lambda: answers("/healthz") and answers("/readyz"), what="probes are answered")
        body = bytes(7_900_000)
        for _ in range(60):
            connect(HEAD.encode() + body)
        assert facts.memory_info().rss - before < 150_000_000
        eventually(lambda: answers("/readyz"), what="probes are answered")
        assert process.process.poll() is None, process.output
