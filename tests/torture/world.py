"""Two servers, a network on either side, the program, and all faults that may hit any of these."""

import asyncio
import contextlib
import itertools
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psycopg

from streamer.commands import table_requests
from streamer.commands import wait as wait_command
from streamer.commands.demo.embedded_servers import Server
from streamer.config import static_mapping
from streamer.control.resync_options import SKIP_CHANGES, Mode, Resync
from streamer.errors.error_classes import StreamerError
from streamer.postgres.secret import Secret
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database
from tests.support.process import Process, command
from tests.support.proxy import Proxy
from tests.torture.checks import Violation, check_acknowledged, check_nothing_left, check_table
from tests.torture.tables import HOSTED_EXCLUDED, HOSTED_RULES, Kind
from tests.torture.workload import Source, settle_all_prepared

STOP_SECONDS_MAX = 30.0
"""The time limit of a stop: the documentation promises 10 seconds, and the machine may be busy."""
COMING = "ap"
"""The sid of a tenant that comes and goes."""
CHUNKED_ABOVE = ("8kB", "64kB", "10GB")
"""Sizes of tables above which a start copies them in chunks: nearly all, some, none."""
OPERATOR_SECONDS = 12.0
"""How long the program has to notice a definition, and to act after a request."""

SOURCE_SETTINGS = {
    "logical_decoding_work_mem": "64kB",
    "wal_sender_timeout": "5s",
    "deadlock_timeout": "200ms",
}
TARGET_SETTINGS = {"synchronous_commit": "off", "wal_writer_delay": "10s"}


@dataclass(frozen=True)
class Options:
    """The options of a run; the same options make the same schedule."""

    seconds: float
    seed: int
    workers: tuple[int, ...] = (1, 2, 3, 8)
    streaming: bool = True
    source_version: str = "18"
    target_version: str = "18"
    sessions: int = 2
    """For each source."""
    faults: tuple[str, ...] = ()
    """Names of the faults to choose from; empty: all."""

    databases: int = 1
    """Databases with a schema for each tenant."""
    schemas: int = 3
    """Tenants of each of these databases, at the start."""
    shards: int = 2
    """Databases that share tables by disjoint keys, without a sid."""

    patience: float = 180.0
    """Seconds until all changes must be visible."""

    @property
    def captures_schemas(self) -> bool:
        """Whether tenants that are schemas change their definitions.

        Their changes need `consistency: table`, so half of the seeds are without.
        """
        is_chosen = self.has("move_schema", "rename_schema") and self.has("evolve")
        return is_chosen and self.seed % 2 == 0

    def has(self, *faults: str) -> bool:
        """Whether any of *faults* is chosen."""
        return not self.faults or bool(set(faults) & set(self.faults))


def mapping_lines(urls: dict[Source, str], options: Options) -> list[str]:
    """Return the lines of the configuration for all sources, whose databases come in turn."""
    groups = itertools.groupby(urls, lambda source: source.database)
    lines = ["sources:"]
    for _, sources in groups:
        lines += _group_lines({source: urls[source] for source in sources}, options)
    return lines


def _group_lines(urls: dict[Source, str], options: Options) -> list[str]:
    """Return the lines of the configuration for the sources of a database."""
    first = next(iter(urls))
    listed = ", ".join(
        f'{{url: "{url}"' + (f", sid: {source.sid}}}" if source.sid else "}")
        for source, url in urls.items()
    )
    rules = list(dict.fromkeys(kind.line for kind in first.kinds))
    lines = [f"- database: {first.database}", f"  urls: [{listed}]"]
    if not options.streaming:
        lines.append("  streaming: false")
    captures = options.captures_schemas if first.hosts_schemas else options.has("evolve")
    if captures and first.sid and not first.is_shard:
        lines.append("  ddl: capture")
        lines.append("  on_ddl: {drop_column: apply, detach_partition: apply}")
    if first.hosts_schemas:
        rules = list(HOSTED_RULES)
        lines.append(f"  exclude_tables: {HOSTED_EXCLUDED}")
    return [*lines, "  tables:", *(f"    {rule}" for rule in rules)]


@dataclass
class World:
    """The complete setup. `torment` makes a fault."""

    options: Options
    directory: Path
    source_server: Server
    target_server: Server
    source_proxy: Proxy
    target_proxy: Proxy
    standby_proxy: Proxy
    """Between a standby and the primary."""
    servers: contextlib.ExitStack
    """Stops the servers that replace the first servers."""
    target: Database
    sources: list[Source]
    random: Random
    config: Path
    resynced: list[tuple[Source, Kind]] = field(default_factory=list)
    """The tables that are paused and copied again; all remaining tables must survive without a
    copy.
    """
    process: Process | None = None
    schedule: list[str] = field(default_factory=list)
    met: Counter[str] = field(default_factory=Counter)
    """How often each fault was made. A fault that skipped a step counts under `skipped`."""
    skipped: Counter[str] = field(default_factory=Counter)
    _has_skipped: bool = False
    acknowledged: int = 0
    began: float = field(default_factory=time.monotonic)
    excused: set[tuple[str, str]] = field(default_factory=set)
    """Slots and tables that may stop: a fault is the reason. ``*``: the whole source."""
    acted: dict[tuple[str, str], float] = field(default_factory=dict)
    """The time of the operator's last request."""
    excused_at: float = 0.0
    evolved: int = 0
    """Steps of the tenants' migrations."""
    scripts: list[str] = field(default_factory=list)
    """Ids of scripts that an operator has run."""
    away: set[str] = field(default_factory=set)
    """The sids of tenants that an operator has removed."""
    purged: bool = False
    """Whether the target has no rows of removed tenants any more."""

    def note(self, what: str) -> None:
        line = f"{time.monotonic() - self.began:7.2f}  {what}"
        self.schedule.append(line)
        with (self.directory / "schedule.txt").open("a") as file:  # to follow a run
            file.write(f"{line}\n")

    def make(self, fault: Callable[["World"], None]) -> None:
        """Make a fault, and count the fault in this run."""
        name = fault.__name__
        self.note(name.replace("_", " "))
        self._has_skipped = False
        fault(self)
        (self.skipped if self._has_skipped else self.met)[name] += 1

    def skip(self, why: str) -> None:
        """Note that the present fault leaves out a step, and does not count as met."""
        self._has_skipped = True
        self.note(f"  skipped, {why}")

    # ---- the program ---------------------------------------------------------------------------

    def start(self) -> None:
        workers = self.random.choice(self.options.workers)
        consistency = self.random.choice(("table", "transaction"))
        if self.options.captures_schemas:
            consistency = "table"
        chunked = self.random.choice(CHUNKED_ABOVE)
        self._configure(workers, consistency, chunked)
        self.note(f"start, workers {workers}, consistency {consistency}, chunks above {chunked}")
        self.process = Process(self.config, spark=False)

    @property
    def mapped(self) -> list[Source]:
        """The sources that are in the configuration now."""
        return [source for source in self.sources if source.sid not in self.away]

    def url(self, source: Source) -> str:
        name = source.url.rpartition("/")[2]
        return f"postgresql://postgres@127.0.0.1:{self.source_proxy.port}/{name}"

    def _configure(self, workers: int, consistency: str, chunked: str) -> None:
        lines = [
            f'target: {{url: "postgresql://postgres@127.0.0.1:{self.target_proxy.port}/dw"}}',
            'http: {listen: ""}',
            f"spool: {{directory: {self.directory / 'spool'}}}",
            f"workers: {workers}\nconsistency: {consistency}",
            f"sync: {{resumable_above: {chunked}}}\ndiscovery_interval: 1",
        ]
        urls = {source: self.url(source) for source in self.mapped}
        self.config.write_text("\n".join([*lines, *mapping_lines(urls, self.options)]))

    def _assert_alive(self) -> Process:
        assert self.process is not None
        if self.process.process.poll() is not None:
            code = self.process.process.returncode
            raise Violation(
                f"the program ended by itself with {code}:\n{self.process.output[-3000:]}"
            )
        return self.process

    def hang_up(self) -> None:
        """Let the program read the configuration again."""
        self._assert_alive().process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """Kill the program, and check that no acknowledged change is missing."""
        process = self._assert_alive()
        process.kill()
        self.check_acknowledged()

    def check_acknowledged(self) -> None:
        counts = [check_acknowledged(source, self.target) for source in self.sources]
        self.acknowledged = max(self.acknowledged, sum(counts))
        self.note(f"acknowledged: {counts}")

    def stop(self) -> None:
        process = self._assert_alive()
        has_begun = bool(process.output)
        code = process.terminate(STOP_SECONDS_MAX)
        # Before the setup of signal handlers, a signal ends the process at once.
        if code != 0 and (has_begun or code != -signal.SIGTERM):
            raise Violation(f"stopped with {code}:\n{process.output[-3000:]}")
        self.check_acknowledged()

    def request(
        self, action: str, source: Source, table: str, mode: str | None = None,
        *, skips_changes: bool = False,
    ) -> None:  # fmt: skip
        address = TargetAddress.parse(Secret(self.target.url))
        resync = Resync(Mode(mode or Mode.RELOAD), skips_changes=skips_changes)
        options = resync.to_json() if action == "resync" else None
        with contextlib.suppress(StreamerError):  # not there yet
            asyncio.run(
                table_requests.request(
                    address, action, table,
                    database=source.database, sid=source.sid, options=options,
                )
            )  # fmt: skip

    # ---- the operator --------------------------------------------------------------------------

    def excuse(self, source: Source, table: str) -> None:
        self.excused.add((source.slot, table))
        self.excused_at = time.monotonic()

    def states(self) -> list[tuple[object, ...]]:
        """Return slot, state and error of each source, and name, state and error of the tables."""
        try:
            return self.target.execute(
                "select s.slot, s.state, s.error, r.source, r.state, r.error from streamer.source s"
                " left join streamer.relation r on r.source_id = s.id"
                " where s.state <> 'streaming' or r.state <> 'ready' or r.error is not null"
                " or s.error is not null order by s.slot, r.source"
            )
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
            return []

    def is_streaming(self, source: Source, seconds: float = 30.0) -> bool:
        """Wait until *source* streams; return False, with a note, after the deadline."""
        state = (
            f"select 1 from streamer.source where slot = '{source.slot}' and state = 'streaming'"
        )
        slot = f"select 1 from pg_replication_slots where slot_name = '{source.slot}' and active"
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._assert_alive()
            with contextlib.suppress(psycopg.errors.UndefinedTable):
                if self.target.execute(state) and self.source_server.execute(slot):
                    return True
            time.sleep(0.1)
        self.skip(f"{source.slot} does not stream")
        return False

    def is_copied(self, table: str, seconds: float = 60.0) -> bool:
        """Wait until the first copy of a table of the first source is complete."""
        copied = (
            "select 1 from streamer.relation where snapshot_lsn is not null"
            f" and source = 'public.{table}' and state = 'ready'"
        )
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.target.execute(copied):
                return True
            time.sleep(0.2)
        self.skip(f"{table} is not copied")
        return False

    def operate(self) -> None:
        """Follow the program's hints as an operator would, if a fault is the reason."""
        now = time.monotonic()
        for slot, state, error, table, table_state, table_error in self.states():
            source = next(each for each in self.sources if each.slot == slot)
            is_excused = any(its_slot == slot for its_slot, _ in self.excused)
            name = str(table).removeprefix("public.")
            if state == "error" and "never reaches the target" in str(error):
                self._settle_scripts(source)
            elif state == "error" and is_excused:
                action = "resync" if "streamer resync" in str(error) else "resume"
                self._act(now, source, action, "*.*", error)
            elif table_error is None or not {(slot, "*"), (slot, name)} & self.excused:
                continue
            elif table_state == "error":
                self._act(now, source, "resync", name, table_error)
            elif table_state == "ready":
                self._act(now, source, "resync", name, table_error, mode="diff")

    def _settle_scripts(self, source: Source) -> None:
        """Run by hand the scripts that a new slot leaves out, where the scripts have not run."""
        missed = self.target.execute(
            "select id, script from streamer.script where state = 'missed'"
        )
        for script_id, text in missed:
            self.note(
                f"  the operator: {script_id} by hand, which the stream of {source.slot} lacks"
            )
            for server in (source, self.target):
                if not server.execute("select to_regclass('public.scripts')")[0][0] or not (
                    server.execute(f"select 1 from scripts where id = '{script_id}'")
                ):
                    server.execute(str(text))
                elif server is self.target:
                    raise Violation(f"{script_id} counts as missed, but the target has run it")
            command(
                self.config, "execute", "--id", str(script_id), "--skip",
                "--database", source.database, seconds=60,
            )  # fmt: skip

    def _act(
        self, now: float, source: Source, action: str, table: str, why: object,
        mode: str | None = None,
    ) -> None:  # fmt: skip
        if now - self.acted.get((source.slot, table), -OPERATOR_SECONDS) < OPERATOR_SECONDS:
            return
        self.acted[source.slot, table] = now
        self.note(f"  the operator: {action} {source.slot} {table}, because: {why}")
        self.request(action, source, table, mode, skips_changes=SKIP_CHANGES in str(why))

    def rest(self) -> None:
        """Operate until all present commits are visible and every table is ready.

        A single wait keeps the position until then. A new wait every few seconds would request a
        later position each time, and never end while the sessions go on and the stream lags.
        """
        for source, kind in self.resynced:  # a fault may have paused these
            self.request("resume", source, kind.name)
        deadline = time.monotonic() + self.options.patience
        missing: str | None = "nothing was asked"
        with ThreadPoolExecutor(1) as threads:
            while missing is not None and time.monotonic() < deadline:
                waiting = threads.submit(self._wait_here, deadline - time.monotonic())
                while not waiting.done():
                    self._assert_alive()
                    self.operate()
                    time.sleep(0.5)
                missing = waiting.result()
        if missing is not None:
            raise Violation(f"{missing}\n{self.states()}\n{self._assert_alive().output[-3000:]}")

    def _wait_here(self, seconds: float) -> str | None:
        settings, mapping = static_mapping.load(self.config)
        try:
            address = TargetAddress.parse(settings.target.url)
            return asyncio.run(wait_command.wait(address, mapping, seconds))
        except StreamerError as exc:
            time.sleep(0.5)
            return str(exc)

    # ---- the end -------------------------------------------------------------------------------

    def heal(self) -> None:
        self.source_proxy.heal()
        self.target_proxy.heal()

    def end(self, check: Callable[["World"], None]) -> None:
        """Wait until all changes are visible; then both sides must be equal, and again after a
        restart.

        *check*: compares more than rows.
        """
        for source in self.sources:
            settle_all_prepared(source)
        while self.excused and time.monotonic() < self.excused_at + OPERATOR_SECONDS:
            time.sleep(0.5)  # the program notices a definition within seconds
        self.rest()
        self.note("at rest")
        check(self)
        self._compare()
        self.stop()
        self.start()
        self.wait()
        self._compare()
        self.stop()
        check_nothing_left(self.sources, self.source_server, self.target)

    def wait(self, times: float = 1) -> None:
        """Wait until all changes are visible, *times* as long as the program may take at rest."""
        self._assert_alive()
        patience = times * self.options.patience
        result = command(self.config, "wait", "--timeout", str(patience), seconds=patience + 60)
        process = self._assert_alive()
        if result.returncode:
            raise Violation(f"{result.stderr}\n{process.output[-3000:]}")

    def _compare(self) -> None:
        found = []
        for source in self.sources:
            for kind in source.kinds:
                try:
                    check_table(source, self.target, kind)
                except Violation as exc:
                    found.append(str(exc))
        if found:
            raise Violation("\n".join(found))
