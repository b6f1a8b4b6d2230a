"""The programs that `make bench` compares. Each replicates the sources of a case to a separate
target.

The runner prepares a side once for a case, which sets its slots to the present end of the WAL. Then
it starts and stops the side as often as needed, and each start continues from there.
"""

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from benchmarks.cases import Case
from benchmarks.servers import Database, wait_until

START_SECONDS: Final = 120.0
STOP_SECONDS: Final = 30.0
TRANSPORTS: Final = ("binary", "text", "default")


class Process(Protocol):
    """The part of `subprocess.Popen` that a side needs."""

    pid: int

    def poll(self) -> int | None: ...

    def send_signal(self, number: int) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


Launch = Callable[[list[str], Path], Process]
"""Starts ``streamer`` with arguments; the path is the path of its log."""


def launch(arguments: list[str], log: Path) -> Process:
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "streamer", *arguments], stdout=subprocess.DEVNULL, stderr=file
        )


class Side(Protocol):
    """A program on a case."""

    name: str
    target: Database

    @property
    def slots(self) -> list[str]:
        """The slots that the side reads, of each source."""
        ...

    @property
    def pid(self) -> int | None:
        """The process of the side, unless it is a process of the server."""
        ...

    @property
    def position_sql(self) -> str:
        """A query at the target: all changes up to this position are visible."""
        ...

    def reached_sql(self, marks: Sequence[str]) -> str:
        """Return a condition at the target: every table has changes from after *marks*."""
        ...

    def prepare(self) -> None: ...

    def copy(self) -> None:
        """Begin the first copy of all tables."""
        ...

    @property
    def copied_sql(self) -> list[str]:
        """Conditions at the target, in order: all tables are copied."""
        ...

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def check(self) -> None:
        """Raise SystemExit if the side has ended by itself."""
        ...

    def forget(self) -> None:
        """Remove the side's objects, except slots, from the sources."""
        ...


class Streamer:
    """`streamer run`, with a transport."""

    def __init__(
        self,
        case: Case,
        transport: str,
        sources: Sequence[Database],
        target: Database,
        directory: Path,
        settings: Sequence[str] = (),
        launch: Launch = launch,
    ) -> None:
        self.name = transport
        self.target = target
        self._case = case  # names the slots, which belong to the whole server
        self._sources = sources
        self._launch = launch
        self._process: Process | None = None
        self._log = directory / f"{case.name}-{transport}.log"
        self._config = directory / f"{case.name}-{transport}.yaml"
        self._settings = settings
        self._config.write_text(self._configuration(directory / f"spool-{case.name}-{transport}"))

    def _configuration(self, spool: Path) -> str:
        sids = [f"s{number}" for number in range(len(self._sources))]
        urls = [
            f'{{url: "{source.url}"' + (f", sid: {sid}}}" if len(sids) > 1 else "}")
            for sid, source in zip(sids, self._sources, strict=True)
        ]
        tables = ", ".join(f"{name}: {{{self._case.rule}}}" for name in self._case.tables)
        chosen = f"   transport: {self.name}\n" if self.name != "default" else ""
        return (
            f'target: {{url: "{self.target.url}"}}\n'
            'http: {listen: ""}\n'
            + "".join(f"{line}\n" for line in self._settings)
            + f"spool: {{directory: {spool}}}\n"
            "sources:\n"
            f" - database: {self._case.identifier}_{self.name}\n"
            f"   urls: [{', '.join(urls)}]\n{chosen}"
            f"   tables: {{{tables}}}\n"
        )

    @property
    def slots(self) -> list[str]:
        name = f"streamer_{self._case.identifier}_{self.name}"
        if len(self._sources) == 1:
            return [name]
        return [f"{name}_s{number}" for number in range(len(self._sources))]

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def position_sql(self) -> str:
        return "select min(end_lsn) from streamer.relation"

    def reached_sql(self, marks: Sequence[str]) -> str:
        behind = " ".join(
            f"when '{slot}' then '{mark}'::pg_lsn"
            for slot, mark in zip(self.slots, marks, strict=True)
        )
        return (
            "select bool_and(r.end_lsn > case s.slot " + behind + " end)"
            " from streamer.relation r join streamer.source s on s.id = r.source_id"
        )

    def prepare(self) -> None:
        """Let a first run create publication, slot and bookkeeping."""
        process = self._run("--stop-when-caught-up")
        if process.wait(START_SECONDS):
            raise SystemExit(self._log.read_text())

    def copy(self) -> None:
        self._process = self._run()

    @property
    def copied_sql(self) -> list[str]:
        count = len(self._case.tables) * len(self._sources)
        return [
            "select to_regclass('streamer.relation') is not null",
            f"select count(*) = {count} and bool_and(state = 'ready') from streamer.relation",
        ]

    def start(self) -> None:
        self._process = self._run()

    def _run(self, *arguments: str) -> Process:
        return self._launch(["--config", str(self._config), "run", *arguments], self._log)

    def stop(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        finally:
            process.kill()

    def check(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            raise SystemExit(self._log.read_text())

    def forget(self) -> None:
        process = self._launch(["--config", str(self._config), "teardown", "--yes"], self._log)
        if process.wait(START_SECONDS):
            raise SystemExit(self._log.read_text())


class Native:
    """PostgreSQL's own subscriptions, with ``binary = true``."""

    name = "native"
    pid = None

    def __init__(self, case: Case, sources: Sequence[Database], target: Database) -> None:
        self.target = target
        self._case = case
        self._sources = sources
        self._names = [f"native_{case.identifier}_{number}" for number in range(len(sources))]

    @property
    def slots(self) -> list[str]:
        return self._names

    @property
    def position_sql(self) -> str:
        return (
            "select min(o.remote_lsn) from pg_replication_origin_status o"
            " join pg_subscription s on o.external_id = 'pg_' || s.oid"
            " where s.subdbid = (select oid from pg_database where datname = current_database())"
        )

    def reached_sql(self, marks: Sequence[str]) -> str:
        behind = " ".join(
            f"when '{name}' then '{mark}'::pg_lsn"
            for name, mark in zip(self._names, marks, strict=True)
        )
        return (
            f"select count(*) = {len(marks)} and bool_and(o.remote_lsn > case s.subname {behind}"
            " end) from pg_replication_origin_status o"
            " join pg_subscription s on o.external_id = 'pg_' || s.oid"
            " where s.subdbid = (select oid from pg_database where datname = current_database())"
        )

    def prepare(self) -> None:
        for name, source in zip(self._names, self._sources, strict=True):
            self._publish(name, source)
            source.execute(f"select pg_create_logical_replication_slot('{name}', 'pgoutput')")
            self._subscribe(name, source, "create_slot = false, enabled = false, copy_data = false")

    def copy(self) -> None:
        for name, source in zip(self._names, self._sources, strict=True):
            self._publish(name, source)
            self._subscribe(name, source, "copy_data = true")

    def _publish(self, name: str, source: Database) -> None:
        if not source.value(f"select count(*) from pg_publication where pubname = '{name}'"):
            source.execute(f"create publication {name} for table {', '.join(self._case.tables)}")

    def _subscribe(self, name: str, source: Database, options: str) -> None:
        if self._case.streams_natively:
            version = int(str(self.target.value("show server_version_num")))
            options += f", streaming = {'parallel' if version >= 160000 else 'on'}"
        self.target.execute(
            f"create subscription {name} connection '{source.url}' publication {name}"
            f" with (binary = true, slot_name = {name}, {options})"
        )

    @property
    def copied_sql(self) -> list[str]:
        count = len(self._case.tables) * len(self._sources)
        return [
            f"select count(*) = {count} and bool_and(srsubstate = 'r') from pg_subscription_rel"
        ]

    def start(self) -> None:
        for name in self._names:
            self.target.execute(f"alter subscription {name} enable")

    def stop(self) -> None:
        for name in self._names:
            self.target.execute(f"alter subscription {name} disable")

    def check(self) -> None: ...

    def forget(self) -> None: ...


class Pglogical:
    """The extension pglogical."""

    name = "pglogical"
    pid = None

    def __init__(self, case: Case, sources: Sequence[Database], target: Database) -> None:
        self.target = target
        self._case = case
        self._sources = sources
        self._names = [f"pglogical_{case.identifier}_{number}" for number in range(len(sources))]

    @property
    def slots(self) -> list[str]:
        rows = self.target.execute("select sub_slot_name from pglogical.subscription order by 1")
        return [str(slot) for (slot,) in rows]

    @property
    def position_sql(self) -> str:
        return (
            "select min(remote_lsn) from pg_replication_origin_status where external_id in"
            " (select sub_slot_name from pglogical.subscription)"
        )

    def reached_sql(self, marks: Sequence[str]) -> str:
        behind = " ".join(
            f"when '{name}' then '{mark}'::pg_lsn"
            for name, mark in zip(self._names, marks, strict=True)
        )
        return (
            f"select count(*) = {len(marks)} and bool_and(o.remote_lsn > case s.sub_name {behind}"
            " end) from pg_replication_origin_status o"
            " join pglogical.subscription s on o.external_id = s.sub_slot_name"
        )

    def prepare(self) -> None:
        self._subscribe(copies=False)
        for name in self._names:
            synced = (
                "select bool_and(status = 'replicating') from"
                f" pglogical.show_subscription_status('{name}')"
            )
            wait_until(self.target.url, synced, START_SECONDS)
        self.stop()

    def _subscribe(self, *, copies: bool) -> None:
        self.target.execute("create extension pglogical")
        self.target.execute(f"select pglogical.create_node('target', '{self.target.url}')")
        for name, source in zip(self._names, self._sources, strict=True):
            if not source.value("select count(*) from pg_extension where extname = 'pglogical'"):
                source.execute("create extension pglogical")
                source.execute(f"select pglogical.create_node('{name}', '{source.url}')")
            for table in self._case.tables:
                keyed = source.value(
                    "select count(*) from pg_index"
                    f" where indrelid = '{table}'::regclass and indisprimary"
                )
                kind = "default" if keyed else "default_insert_only"
                source.execute(f"select pglogical.replication_set_add_table('{kind}', '{table}')")
            self.target.execute(
                f"select pglogical.create_subscription('{name}', '{source.url}',"
                f" synchronize_structure := false, synchronize_data := {str(copies).lower()})"
            )

    def copy(self) -> None:
        self._subscribe(copies=True)

    @property
    def copied_sql(self) -> list[str]:
        return [
            "select count(*) > 0 and bool_and(sync_status = 'r') from pglogical.local_sync_status"
        ]

    def start(self) -> None:
        for name in self._names:
            self.target.execute(f"select pglogical.alter_subscription_enable('{name}', true)")

    def stop(self) -> None:
        for name in self._names:
            self.target.execute(f"select pglogical.alter_subscription_disable('{name}', true)")

    def check(self) -> None: ...

    def forget(self) -> None:
        for name in self._names:
            self.target.execute(f"select pglogical.drop_subscription('{name}')")
