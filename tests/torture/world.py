"""Two servers, a network on either side, the program, and everything that can go wrong with them."""

import asyncio
import contextlib
import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psycopg

from streamer.apply.target import TargetAddress
from streamer.commands import requests
from streamer.commands.embedded import Server
from streamer.errors import StreamerError
from streamer.route.mapping import Secret
from tests.support.postgres import Database, running, versions
from tests.support.process import Process, command
from tests.support.proxy import Proxy, Way
from tests.torture.checks import Violation, check_acknowledged, check_nothing_left, check_table
from tests.torture.tables import KINDS, TENANT_KINDS, Kind
from tests.torture.workload import Session, Source, settle_all_prepared

STOP_SECONDS_MAX = 30.0
"""What a stop may take: 10 seconds are promised, and the machine may be busy."""
END_SECONDS = 180.0

SOURCE_SETTINGS = {
    "logical_decoding_work_mem": "64kB",
    "wal_sender_timeout": "5s",
    "deadlock_timeout": "200ms",
}
TARGET_SETTINGS = {"synchronous_commit": "off", "wal_writer_delay": "10s"}


@dataclass(frozen=True)
class Options:
    """What a run is made of; the same options make the same schedule."""

    seconds: float
    seed: int
    workers: tuple[int, ...] = (1, 2, 3, 8)
    streaming: bool = True
    source_version: str = "18"
    target_version: str = "18"
    sessions: int = 2
    """For each source."""


@dataclass
class World:
    """Everything, set up. `torment` does one thing to it."""

    options: Options
    directory: Path
    source_server: Server
    target_server: Server
    source_proxy: Proxy
    target_proxy: Proxy
    target: Database
    sources: list[Source]
    random: Random
    config: Path
    resynced: list[tuple[Source, Kind]] = field(default_factory=list)
    """The tables that are paused and copied again; all others must survive without."""
    process: Process | None = None
    schedule: list[str] = field(default_factory=list)
    acknowledged: int = 0
    began: float = field(default_factory=time.monotonic)

    def note(self, what: str) -> None:
        self.schedule.append(f"{time.monotonic() - self.began:7.2f}  {what}")

    # ---- the program ---------------------------------------------------------------------------

    def start(self) -> None:
        workers = self.random.choice(self.options.workers)
        consistency = self.random.choice(("table", "transaction"))
        self._configure(workers, consistency)
        self.note(f"start, workers {workers}, consistency {consistency}")
        self.process = Process(self.config, spark=False)

    def _configure(self, workers: int, consistency: str) -> None:
        def url(source: Source) -> str:
            sid = f", sid: {source.sid}" if source.sid else ""
            port = self.source_proxy.port
            name = source.url.rpartition("/")[2]
            return f'{{url: "postgresql://postgres@127.0.0.1:{port}/{name}"{sid}}}'

        lone, *tenants = self.sources
        groups = [("lone", [lone], KINDS), ("shop", tenants, TENANT_KINDS)]
        lines = [
            f'target: {{url: "postgresql://postgres@127.0.0.1:{self.target_proxy.port}/dw"}}',
            'http: {listen: ""}',
            f"spool: {{directory: {self.directory / 'spool'}}}",
            f"workers: {workers}\nconsistency: {consistency}\nsources:",
        ]
        for database, sources, kinds in groups:
            lines.append(f"- database: {database}")
            lines.append(f"  urls: [{', '.join(map(url, sources))}]")
            lines.append(f"  streaming: {str(self.options.streaming).lower()}\n  tables:")
            lines += [f"    {kind.name}: {{type: {kind.type}}}" for kind in kinds]
        self.config.write_text("\n".join(lines))

    def _assert_alive(self) -> Process:
        assert self.process is not None
        if self.process.process.poll() is not None:
            code = self.process.process.returncode
            raise Violation(
                f"the program ended by itself with {code}:\n{self.process.output[-3000:]}"
            )
        return self.process

    def kill(self) -> None:
        """Kill it, and see that nothing acknowledged is missing."""
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
        # Before it has set up its signals, it ends the way any process does.
        if code != 0 and (has_begun or code != -signal.SIGTERM):
            raise Violation(f"stopped with {code}:\n{process.output[-3000:]}")
        self.check_acknowledged()

    def request(self, action: str, source: Source, table: str) -> None:
        address = TargetAddress.parse(Secret(self.target.url))
        with contextlib.suppress(StreamerError):  # not there yet
            asyncio.run(
                requests.request(address, action, table, database=source.database, sid=source.sid)
            )

    # ---- the end -------------------------------------------------------------------------------

    def end(self) -> None:
        """Let everything come to rest; then it must be equal, and again after a restart."""
        self.source_proxy.heal()
        self.target_proxy.heal()
        for source in self.sources:
            settle_all_prepared(source)
        for source, kind in self.resynced:
            self.request("resume", source, kind.name)
        self.wait()
        self.note("at rest")
        self._compare()
        self.stop()
        self.start()
        self.wait()
        self._compare()
        self.stop()
        check_nothing_left(self.sources, self.source_server, self.target)

    def wait(self) -> None:
        self._assert_alive()
        result = command(
            self.config, "wait", "--timeout", str(END_SECONDS), seconds=END_SECONDS + 60
        )
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


# ---- what can go wrong -------------------------------------------------------------------------


def kill(world: World) -> None:
    world.kill()
    world.start()


def restart(world: World) -> None:
    world.stop()
    world.start()


def suspend(world: World) -> None:
    process = world._assert_alive().process
    process.send_signal(signal.SIGSTOP)
    time.sleep(world.random.choice((0.5, 2, 8)))
    process.send_signal(signal.SIGCONT)


def _proxy(world: World) -> tuple[str, Proxy]:
    return world.random.choice((("source", world.source_proxy), ("target", world.target_proxy)))


def cut(world: World) -> None:
    name, proxy = _proxy(world)
    reset = world.random.random() < 0.5
    world.note(f"  {name}, reset {reset}")
    proxy.cut(reset=reset)


def cut_in_the_middle(world: World) -> None:
    name, proxy = _proxy(world)
    way, size = world.random.choice(list(Way)), world.random.randrange(1, 100_000)
    world.note(f"  {name}, after {size} bytes {way.value}")
    proxy.cut_after(size, way)


def lose_answers(world: World) -> None:
    world.target_proxy.lose_answers(b"commit\0", world.random.randrange(1, 5))


def lose_bookkeeping_answers(world: World) -> None:
    """Those to statements that commit by themselves."""
    world.target_proxy.lose_answers(b"E\0\0\0", world.random.randrange(1, 5))


def blackhole(world: World) -> None:
    name, proxy = _proxy(world)
    seconds = world.random.choice((1, 3, 7))
    world.note(f"  {name}, {seconds} s")
    proxy.blackhole()
    time.sleep(seconds)
    if world.random.random() < 0.5:
        proxy.cut(reset=True)
    proxy.heal()


def slow(world: World) -> None:
    name, proxy = _proxy(world)
    seconds = world.random.choice((0.02, 0.2))
    world.note(f"  {name}, {seconds} s")
    proxy.delay(seconds)
    time.sleep(3)
    proxy.heal()


def restart_server(world: World) -> None:
    name, server = world.random.choice(
        (("source", world.source_server), ("target", world.target_server))
    )
    mode = world.random.choice(("fast", "immediate"))
    world.note(f"  {name}, {mode}")
    server.stop(mode)
    time.sleep(world.random.choice((0, 1)))
    server.start()


def terminate_backends(world: World) -> None:
    server = world.random.choice((world.source_server, world.target_server))
    share = world.random.choice((0.1, 0.3, 1))
    server.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'streamer%'"
        f" and random() <= {share}"
    )


def lock(world: World) -> None:
    """A user of the target locks a table for a while."""
    source = world.random.choice(world.sources)
    table = world.random.choice(source.kinds).name
    mode = world.random.choice(("access exclusive", "share"))
    seconds = world.random.choice((0.5, 4))
    world.note(f"  {table}, {mode}, {seconds} s")
    with contextlib.suppress(psycopg.errors.UndefinedTable), world.target.connect() as connection:
        connection.execute(
            f"set deadlock_timeout = '10s'; begin; lock table {table} in {mode} mode; select pg_sleep({seconds}); commit".encode()
        )


def ask(world: World) -> None:
    """Pause, resume or copy a table again, several times in a row."""
    source, kind = world.random.choice(world.resynced)
    for _ in range(world.random.randrange(1, 4)):
        action = world.random.choice(("pause", "resume", "resync", "resync"))
        world.note(f"  {action} {source.slot} {kind.name}")
        world.request(action, source, kind.name)
        time.sleep(world.random.choice((0, 0.1, 0.7)))


def rewrite(world: World) -> None:
    source = world.random.choice(world.sources)
    table = world.random.choice(source.kinds).name
    statement = world.random.choice(
        ("vacuum full {0}", "vacuum analyze {0}", "checkpoint", "reindex table {0}")
    )
    world.note(f"  {source.slot}: {statement.format(table)}")
    with contextlib.suppress(psycopg.errors.DeadlockDetected):
        source.execute(statement.format(table))


def grow(world: World) -> None:
    """A column more, at the target first."""
    name = f"c{len(world.schedule)}"
    world.target.execute(f"alter table if exists grown add column if not exists {name} int")
    lone = world.sources[0]
    with contextlib.suppress(psycopg.errors.DeadlockDetected):
        lone.execute(f"alter table grown add column if not exists {name} int")
        lone.execute(f"update grown set {name} = id where id % 3 = 1")


def change_identity(world: World) -> None:
    identity = world.random.choice(("full", "default"))
    with contextlib.suppress(psycopg.errors.DeadlockDetected):
        world.sources[0].execute(f"alter table keyed replica identity {identity}")


def write_elsewhere(world: World) -> None:
    """WAL that concerns nobody."""
    world.source_server.execute(
        "create table if not exists noise (v text);"
        " insert into noise select repeat('n', 500) from generate_series(1, 3000)"
    )


def leave_alone(world: World) -> None:
    time.sleep(1)


FAULTS: tuple[tuple[Callable[[World], None], int], ...] = (
    (kill, 6),
    (restart, 2),
    (suspend, 2),
    (cut, 4),
    (cut_in_the_middle, 4),
    (lose_answers, 3),
    (lose_bookkeeping_answers, 2),
    (blackhole, 2),
    (slow, 1),
    (restart_server, 4),
    (terminate_backends, 4),
    (lock, 3),
    (ask, 4),
    (rewrite, 2),
    (grow, 1),
    (change_identity, 1),
    (write_elsewhere, 1),
    (leave_alone, 3),
)


@contextlib.contextmanager
def _sessions(world: World) -> Iterator[None]:
    sessions = [
        Session(source, f"{world.options.seed}-{source.slot}-{number}")
        for source in world.sources
        for number in range(world.options.sessions)
    ]
    for session in sessions:
        session.start()
    try:
        yield
    finally:
        for session in sessions:
            session.end()
        for session in sessions:
            session.join(60)
        for session in sessions:
            if session.failure is not None:
                raise session.failure


@contextlib.contextmanager
def _made(options: Options, directory: Path) -> Iterator[World]:
    here = versions()
    source_settings = dict(SOURCE_SETTINGS)
    with (
        running(
            directory / "source", here[options.source_version], source_settings
        ) as source_server,
        running(
            directory / "target", here[options.target_version], TARGET_SETTINGS
        ) as target_server,
        Proxy(source_server) as source_proxy,
        Proxy(target_server) as target_proxy,
    ):
        target_server.execute("create database dw")
        sources = []
        for database, sid, kinds in (
            ("lone", None, KINDS),
            ("shop", "eu", TENANT_KINDS),
            ("shop", "us", TENANT_KINDS),
        ):
            name = f"{database}_{sid}" if sid else database
            source_server.execute(f"create database {name}")
            sources.append(Source(database, sid, kinds, source_server.url(name)))
            sources[-1].execute("; ".join(kind.ddl for kind in kinds))
        target = Database(target_server, "dw")
        for kind in KINDS:
            if kind.target_ddl:
                target.execute(kind.target_ddl)
        random = Random(options.seed)
        candidates = [
            (source, kind)
            for source in sources
            for kind in source.kinds
            if kind.operations and kind.target_ddl is None
        ]
        world = World(
            options, directory, source_server, target_server, source_proxy, target_proxy,
            target, sources, random, directory / "config.yaml", random.sample(candidates, 4),
        )  # fmt: skip
        try:
            yield world
        finally:
            if world.process is not None:
                with world.process:
                    pass


def torture(options: Options, directory: Path) -> World:
    """Run the whole test. Raises Violation, with the schedule as a note."""
    with _made(options, directory) as world:
        try:
            with _sessions(world):
                time.sleep(1)
                world.start()
                if options.seed % 3:
                    world.wait()  # otherwise the first copies are made in the storm
                world.note("the storm begins")
                deadline = time.monotonic() + options.seconds
                faults = [fault for fault, weight in FAULTS for _ in range(weight)]
                while time.monotonic() < deadline:
                    fault = world.random.choice(faults)
                    world.note(fault.__name__.replace("_", " "))
                    fault(world)
                    world._assert_alive()
                    time.sleep(world.random.random() * 1.5)
            world.end()
        except BaseException as exc:
            exc.add_note(describe(world))
            raise
        return world


def describe(world: World) -> str:
    """Return what was done, for who has to find out why."""
    done = textwrap.indent("\n".join(world.schedule), "  ")
    return f"torture {world.options}\nin {world.directory}\n{done}"
