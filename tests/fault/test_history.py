"""A broken link between a slot and the target is noticed, reported, and healed by a resync."""

import shutil
import signal
from pathlib import Path

import pytest

from streamer.commands.demo.embedded_servers import Server
from streamer.util.failpoints import VARIABLE
from tests.support.postgres import Database, assert_same, running, versions
from tests.support.process import Process, caught_up, command, is_frozen, status
from tests.support.streamer import write_config
from tests.support.waiting import eventually

DDL = "create table t (id int primary key, v text); create table log (line text)"
SETTINGS = {"wal_level": "logical", "max_slot_wal_keep_size": "32MB", "max_wal_size": "64MB"}


class Pair:
    """A source and a target of a test's own, and the program's configuration for them."""

    def __init__(
        self, source_server: Server, target_server: Server, directory: Path, *, copies: bool = True
    ) -> None:
        source_server.execute("create database shop")
        target_server.execute("create database dw")
        self.source = Database(source_server, "shop")
        self.target = Database(target_server, "dw")
        self.source.execute(DDL)
        self.config = directory / "config.yaml"
        tables = "t:\nlog:" if copies else "t: {initial: none}\nlog: {initial: none}"
        write_config(self.config, self.source, self.target, tables)

    def write(self, first: int, last: int) -> None:
        self.source.execute(
            f"insert into t select g, 'x' from generate_series({first}, {last}) g;"
            f" insert into log select g::text from generate_series({first}, {last}) g"
        )

    def assert_equal(self) -> None:
        assert_same(self.source, self.target, "t")
        assert_same(self.source, self.target, "log")

    def error(self) -> str | None:
        (source,) = status(self.config)
        return str(source["error"]) if source["state"] == "error" else None


def lose_wal(pair: Pair) -> None:
    for _ in range(6):
        pair.source.execute("select pg_switch_wal(); insert into log values ('lost'); checkpoint")
    eventually(
        lambda: (
            pair.source.value("select wal_status from pg_replication_slots") == "lost"
            or pair.source.execute(
                "insert into log values ('lost'); select pg_switch_wal(); checkpoint"
            )
            is None
        )
    )


def drop_slot(pair: Pair) -> None:
    pair.source.execute("select pg_drop_replication_slot('streamer_shop')")


def make_slot_anew(pair: Pair) -> None:
    drop_slot(pair)
    pair.write(1000, 1010)
    pair.source.execute("select pg_create_logical_replication_slot('streamer_shop', 'pgoutput')")


def advance_slot(pair: Pair) -> None:
    pair.write(1000, 1010)
    pair.source.execute(
        "select pg_replication_slot_advance('streamer_shop', pg_current_wal_flush_lsn())"
    )


def keep(server: Server) -> Path:
    """Take a backup of a server's files."""
    server.stop("fast")
    kept = server.directory.with_name(server.directory.name + "-kept")
    shutil.copytree(server.directory, kept, copy_function=shutil.copy2)
    give(server.directory, kept)
    server.start()
    return kept


def restore(server: Server, kept: Path) -> None:
    server.stop("fast")
    shutil.rmtree(server.directory)
    kept.rename(server.directory)
    server.start()


def give(like: Path, path: Path) -> None:
    """Give *path* the owner of *like*."""
    owner = like.stat()
    for each in (path, *path.rglob("*")):
        shutil.chown(each, owner.st_uid, owner.st_gid)


BREAKS = {
    "dropped": drop_slot,
    "made anew": make_slot_anew,
    "advanced": advance_slot,
    "invalidated": lose_wal,
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_slot_is_said(name: str, tmp_path: Path, server_directory: Path) -> None:
    place = server_directory / f"history-{name.replace(' ', '-')}"
    with running(place, versions()["18"], SETTINGS) as server:
        pair = Pair(server, server, tmp_path, copies=False)
        with Process(pair.config) as process:
            caught_up(process)
            pair.write(1, 10)
            caught_up(process)
            assert process.terminate() == 0
        pair.write(11, 20)
        BREAKS[name](pair)
        with Process(pair.config) as process:
            error = eventually(pair.error)
            assert "streamer_shop" in error
            assert "streamer resync '*.*' --database shop" in error
            assert "public.t" in error
            # Nothing goes on with a hole.
            pair.source.execute("insert into t values (5000, 'after')")
            assert not pair.target.execute("select id from t where id > 10")
            assert process.terminate() == 0


def test_a_slot_that_moves_between_its_check_and_the_stream(
    tmp_path: Path, server_directory: Path
) -> None:
    """PostgreSQL begins a stream at the slot's position if the client asks for an earlier one."""
    with running(server_directory / "moved", versions()["18"], SETTINGS) as server:
        pair = Pair(server, server, tmp_path, copies=False)
        with Process(pair.config) as process:
            caught_up(process)
            pair.write(1, 10)
            caught_up(process)
            assert process.terminate() == 0
        with Process(pair.config, environment={VARIABLE: "slot.checked=stop"}) as process:
            # GIVEN a process that has checked the slot and does not read it yet
            eventually(lambda: is_frozen(process))
            # WHEN another one reads it further, as the journal of a replica does
            advance_slot(pair)
            process.process.send_signal(signal.SIGCONT)
            # THEN the source stops with the changes that are lost, and nothing goes on
            error = eventually(pair.error)
            assert "streamer resync '*.*' --database shop" in error
            assert "before this process read it" in process.output
            pair.source.execute("insert into t values (5000, 'after')")
            assert pair.target.value("select max(id) from t") == 10
            assert process.terminate() == 0


def test_a_resync_heals(tmp_path: Path, server_directory: Path) -> None:
    with running(server_directory / "healed", versions()["18"], SETTINGS) as server:
        pair = Pair(server, server, tmp_path)
        pair.write(1, 10)
        with Process(pair.config, spark=False) as process:
            caught_up(process)
            assert process.terminate() == 0
        pair.write(11, 20)
        drop_slot(pair)
        with Process(pair.config, spark=False) as process:
            eventually(pair.error)
            result = command(pair.config, "resync", "*.*", "--database", "shop")
            assert result.returncode == 0, result.stderr
            caught_up(process)
            pair.assert_equal()
            pair.write(6000, 6010)
            caught_up(process)
            pair.assert_equal()
            assert process.terminate() == 0


def test_the_target_is_restored_to_an_earlier_time(tmp_path: Path, server_directory: Path) -> None:
    with (
        running(server_directory / "restored-source", versions()["18"], SETTINGS) as source,
        running(server_directory / "restored-target", versions()["18"]) as target,
    ):
        pair = Pair(source, target, tmp_path, copies=False)
        with Process(pair.config) as process:
            caught_up(process)
            pair.write(1, 10)
            caught_up(process)
            assert process.terminate() == 0
            kept = keep(target)
        with Process(pair.config) as process:
            pair.write(11, 20)
            caught_up(process)
            restore(target, kept)
            error = eventually(pair.error)
            assert "restored" in error
            pair.write(21, 30)
            assert target.execute("select max(id) from t", "dw") == [(10,)]
            assert process.terminate() == 0


@pytest.mark.parametrize("rows", [0, 20_000], ids=["behind", "past"])
def test_the_source_is_restored_to_an_earlier_time(
    rows: int, tmp_path: Path, server_directory: Path
) -> None:
    """With *rows* it has written past its old position before streamer asks for it."""
    with (
        running(server_directory / f"older-source-{rows}", versions()["18"], SETTINGS) as source,
        running(server_directory / f"older-target-{rows}", versions()["18"]) as target,
    ):
        pair = Pair(source, target, tmp_path, copies=False)
        with Process(pair.config) as process:
            caught_up(process)
            pair.write(1, 10)
            caught_up(process)
            assert process.terminate() == 0
        kept = keep(source)
        with Process(pair.config) as process:
            pair.write(11, 20)
            caught_up(process)
            assert process.terminate() == 0
        was_at = pair.source.value("select pg_current_wal_flush_lsn()::text")
        restore(source, kept)
        pair.write(100, 100 + rows)
        is_past = f"select pg_current_wal_flush_lsn() > '{was_at}'"
        assert pair.source.value(is_past) is (rows > 0)
        with Process(pair.config) as process:
            error = eventually(pair.error)
            assert "restored" in error
            assert "streamer resync" in error
            assert process.terminate() == 0


@pytest.mark.parametrize("what", ["script", "definition"])
def test_a_source_is_restored_that_lacks_only_a_transaction_without_rows(
    what: str, tmp_path: Path, server_directory: Path
) -> None:
    """The target has its effect, and the source has written past its old position since."""
    with (
        running(server_directory / f"rowless-{what}", versions()["18"], SETTINGS) as source,
        running(server_directory / f"rowless-target-{what}", versions()["18"]) as target,
    ):
        pair = Pair(source, target, tmp_path, copies=False)
        text = pair.config.read_text()
        pair.config.write_text(text.replace("  tables:", "  ddl: capture\n  tables:"))
        with Process(pair.config) as process:
            caught_up(process)
            pair.write(1, 10)
            caught_up(process)
            assert process.terminate() == 0
        kept = keep(source)
        with Process(pair.config) as process:
            if what == "script":
                script = tmp_path / "script.sql"
                script.write_text("create table made (id int)")
                assert command(pair.config, "execute", str(script), "--id", "made").returncode == 0
            else:
                pair.source.execute("alter table t add column more int")
                sql = "select count(*) from pg_attribute where attname = 'more'"
                eventually(lambda: pair.target.value(sql) == 1)
            caught_up(process)
            assert process.terminate() == 0
        restore(source, kept)
        pair.write(100, 20_100)
        with Process(pair.config) as process:
            error = eventually(pair.error)
            assert "different histor" in error
            assert process.terminate() == 0


def test_another_server_in_its_place(tmp_path: Path, server_directory: Path) -> None:
    with (
        running(server_directory / "first", versions()["18"], SETTINGS) as first,
        running(server_directory / "other", versions()["18"], SETTINGS) as other,
    ):
        pair = Pair(first, first, tmp_path, copies=False)
        with Process(pair.config) as process:
            caught_up(process)
            pair.write(1, 10)
            caught_up(process)
        elsewhere = Pair(other, other, tmp_path, copies=False)
        elsewhere.write(100, 110)
        write_config(
            pair.config, elsewhere.source, pair.target, "t: {initial: none}\nlog: {initial: none}"
        )
        with Process(pair.config) as process:
            error = eventually(pair.error)
            assert "system identifier" in error
            assert not pair.target.execute("select id from t where id >= 100")


def test_a_dropped_publication(tmp_path: Path, server_directory: Path) -> None:
    with running(server_directory / "publication", versions()["18"], SETTINGS) as server:
        pair = Pair(server, server, tmp_path)
        pair.write(1, 10)
        with Process(pair.config, spark=False) as process:
            caught_up(process)
            pair.source.execute("drop publication streamer_shop")
            pair.write(11, 20)
            pair.source.execute("create publication streamer_shop for table t, log")
            error = eventually(pair.error)
            assert "publication" in error
            assert "streamer resync '*.*' --database shop" in error
            assert command(pair.config, "resync", "*.*", "--database", "shop").returncode == 0
            caught_up(process)
            pair.assert_equal()
