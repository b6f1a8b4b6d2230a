"""A server with a streaming standby, to fail over to."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from streamer.commands.demo.embedded_servers import Server
from tests.support.postgres import SETTINGS, Database, kept_running, own_directory, versions
from tests.support.waiting import eventually


class Standby(Server):
    """A physical standby of *primary*, made from a base backup, with streaming replication."""

    def __init__(
        self, primary: Server, directory: Path, major: str = "18", slot: str = "standby"
    ) -> None:
        super().__init__(directory, versions()[major], SETTINGS)
        self.primary = primary
        self.slot = slot
        self.keeps_slots = int(major) >= 17

    def create(self) -> None:
        """Take the base backup. The standby keeps the primary's settings."""
        self._run(
            *("pg_basebackup", "--pgdata", str(self.data), "--dbname", self.primary.url()),
            *("--write-recovery-conf", "--checkpoint", "fast", "--no-sync"),
            *("--create-slot", "--slot", self.slot),
        )
        self.configure(hot_standby_feedback="on")
        if self.keeps_slots:
            self.configure(sync_replication_slots="on")

    def wait(self) -> None:
        """Wait until the standby has replayed all WAL that the primary has written."""
        (row,) = self.primary.execute("select pg_current_wal_lsn()::text")
        replayed = f"select pg_last_wal_replay_lsn() >= '{row[0]}'"
        eventually(lambda: self.execute(replayed)[0][0], what="the standby replays")

    def cut(self) -> None:
        """End the replication from the primary: later writes are missing on the standby."""
        self.wait()
        # A dead address: an empty string would keep the WAL receiver waiting.
        self._receive_from("host=127.0.0.1 port=1")
        ended = "select not exists (select from pg_stat_wal_receiver where status = 'streaming')"
        eventually(lambda: self.execute(ended)[0][0], what="the WAL receiver ends")
        eventually(
            lambda: (
                not self.primary.execute(
                    f"select from pg_replication_slots where slot_name = '{self.slot}' and active"
                )
            ),
            what="the WAL sender ends",
        )

    def follow(self, primary: Server) -> None:
        """Follow a new primary, over a slot there."""
        primary.execute(f"select pg_create_physical_replication_slot('{self.slot}')")
        self.primary = primary
        self._receive_from(primary.url())

    def _receive_from(self, conninfo: str) -> None:
        self.execute(f"alter system set primary_conninfo = '{conninfo}'")
        self.execute("select pg_reload_conf()")

    def has_slot(self, slot: str) -> bool:
        """Wake the worker that synchronizes slots; return whether the standby has *slot* for a
        failover.

        The standby makes the slot once the primary's slot has passed the restart position of the
        standby's slot. For that the primary's slot must advance past a record of running
        transactions.
        """
        self.execute("select pg_reload_conf()")
        return bool(
            self.execute(
                f"select 1 from pg_replication_slots where slot_name = '{slot}' and synced"
                " and not temporary"
            )
        )

    def promote(self) -> None:
        """Make the standby a primary."""
        self.execute("select pg_promote()")


@contextlib.contextmanager
def standby(
    primary: Server, directory: Path, major: str = "18", slot: str = "standby"
) -> Iterator[Standby]:
    """Run a standby of *primary* during a block."""
    server = Standby(primary, own_directory(directory), major, slot)
    with kept_running(server):
        server.wait()
        yield server


class OnEither(Database):
    """A database that is on the primary of two servers, whichever that is."""

    def __init__(self, first: Server, second: Server, name: str) -> None:
        super().__init__(first, name)
        self.second = second
        self.options = "target_session_attrs=read-write"

    @property
    def url(self) -> str:
        hosts = f"127.0.0.1:{self.server.port},127.0.0.1:{self.second.port}"
        return f"postgresql://{self.url_user}@{hosts}/{self.name}?{self.options}"
