"""Passwords that change while a stream runs."""

import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.sources import read_source_records
from streamer.commands.demo.embedded_servers import Server
from streamer.postgres.secret_command import COMMAND_SECONDS
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database, database, running, versions
from tests.support.streamer import Streamer
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("without_spark", "short_backoffs")
SECONDS = 60.0
CONFIG = """\
target: {{url: "{target}", password_command: "cat {directory}/target", password_lifetime: 3600}}
http: {{listen: ""}}
spool: {{directory: "{directory}/spool"}}
sources:
- database: shop
  urls: [{{url: "{source}", password_file: "{directory}/source"}}]
  tables: {{t: {{}}}}
"""
END_SQL = "select count(pg_terminate_backend(pid)) from pg_stat_activity where usename = '{role}'"
SESSIONS_SQL = """
select pid from pg_stat_activity where usename = '{role}' and backend_type <> 'parallel worker'
"""


@pytest.fixture(scope="module")
def asking(server_directory: Path) -> Iterator[Server]:
    """A server that demands passwords of two roles."""
    with running(server_directory / "asking", versions()["18"]) as server:
        hba = server.data / "pg_hba.conf"
        asked = "host all,replication reader,writer 127.0.0.1/32 scram-sha-256\n"
        hba.write_text(asked + hba.read_text())
        server.reload()
        server.execute("create role reader superuser login; create role writer superuser login")
        yield server


@pytest.fixture
def source(asking: Server) -> Iterator[Database]:
    with database(asking, "shop") as made:
        made.url_user = "reader"
        yield made


@pytest.fixture
def target(asking: Server) -> Iterator[Database]:
    with database(asking, "dw") as made:
        made.url_user = "writer"
        yield made


async def test_passwords_change_without_a_restart(
    asking: Server,
    source: Database,
    target: Database,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def give(password: str, *, to_streamer: bool = True) -> None:
        for role in ("reader", "writer"):
            asking.execute(f"alter role {role} password '{password}'")
        if to_streamer:
            tell(password)

    def tell(password: str) -> None:
        for side in ("source", "target"):
            (tmp_path / side).write_text(f"{password}\n")

    def sessions(role: str) -> set[Any]:
        return {pid for (pid,) in asking.execute(SESSIONS_SQL.format(role=role))}

    async def arrives(number: int) -> None:
        source.execute(f"insert into t values ({number})")
        await streamer.caught_up(SECONDS)
        assert target.value("select max(id) from t") == number

    give("first-secret")
    source.execute("create table t (id int primary key); insert into t values (1)")
    path = tmp_path / "config.yaml"
    directory = shlex.quote(str(tmp_path))
    path.write_text(CONFIG.format(source=source.url, target=target.url, directory=directory))
    streamer = Streamer(path)
    streamer.start()
    try:
        await streamer.table_state("public.t", "ready", SECONDS)
        await arrives(2)

        # The servers get the second password first, and end all sessions.
        give("second-secret", to_streamer=False)
        for role in ("reader", "writer"):
            asking.execute(END_SQL.format(role=role))

        async def is_said() -> bool:
            return any("reads the password again" in str(r) for r in streamer.engine.readiness())

        await streamer.eventually(is_said, SECONDS)
        tell("second-secret")
        await arrives(3)

        # After SIGHUP all sessions have the third.
        give("third-secret")
        before = sessions("reader") | sessions("writer")
        await streamer.apply()
        await streamer.engine.renew_passwords(streamer.settings.target.url)
        await streamer.connect_again()  # including the sessions of the test
        await arrives(4)

        async def are_new() -> bool:
            return not before & (sessions("reader") | sessions("writer"))

        number = 5

        async def are_new_while_changes_come() -> bool:
            nonlocal number
            await arrives(number)
            number += 1
            return await are_new()

        await streamer.eventually(are_new_while_changes_come, SECONDS)
        assert target.value("select count(*) from t") == number - 1
        assert (await streamer.table("public.t"))["rows_copied"] == 1
    finally:
        await streamer.stop()
    said = "".join(capfd.readouterr())
    assert "-secret" not in said


async def test_password_commands_that_hang_stop_their_own_sources_only(
    asking: Server, source: Database, target: Database, tmp_path: Path
) -> None:
    for role, side in (("reader", "source"), ("writer", "target")):
        asking.execute(f"alter role {role} password 'secret'")
        (tmp_path / side).write_text("secret\n")
    source.execute("create table t (id int primary key); insert into t values (1)")
    directory = shlex.quote(str(tmp_path))
    (path := tmp_path / "config.yaml").write_text(
        CONFIG.format(source=source.url, target=target.url, directory=directory)
        + "".join(
            f"- database: hangs{n}\n"
            f'  urls: [{{url: "{source.url}", password_command: "sleep 30{n}"}}]\n'
            f"  tables: {{t: {{target: other{n}}}}}\n"
            for n in range(20)
        )
    )
    streamer = Streamer(path)
    bookkeeping = Bookkeeping(TargetAddress.parse(streamer.settings.target.url))
    began = time.monotonic()
    streamer.start()
    try:

        async def streams() -> bool:
            return bool(target.value("select to_regclass('public.t')")) and bool(
                target.value("select count(*) from t")
            )

        await until(streams, "the source with a file is copied")
        source.execute("insert into t values (2)")
        await until(lambda: target.value("select count(*) from t") == 2, "its change arrives")
        assert time.monotonic() - began < 2 * COMMAND_SECONDS, "before the first commands ended"

        async def is_said() -> bool:
            records = await read_source_records(bookkeeping)
            return {record.waiting_for for record in records} >= {
                "the output of its password_command",
                "its turn to run password_command, after the commands of other connections",
            }

        await until(is_said, "status says what the others wait for")
    finally:
        await bookkeeping.close()
        await streamer.stop()
