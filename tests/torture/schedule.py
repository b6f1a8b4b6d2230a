"""A run: a storm of random faults over random work, then rest and comparison."""

import contextlib
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from tests.support.postgres import Database, running, versions
from tests.support.proxy import Proxy
from tests.torture import (
    definitions,
    evolution,
    faults,
    installations,
    schemas,
    shards,
    tenants,
)
from tests.torture.tables import HOSTED_KINDS, KINDS, TENANT_KINDS, Kind, kinds_of_shard
from tests.torture.workload import HOSTED, SPLIT, Session, Source
from tests.torture.world import COMING, SOURCE_SETTINGS, TARGET_SETTINGS, Options, World

Fault = Callable[[World], None]

FREQUENT: tuple[tuple[Fault, int], ...] = (
    (faults.kill, 6),
    (faults.restart, 2),
    (faults.suspend, 2),
    (faults.cut, 4),
    (faults.cut_in_the_middle, 4),
    (faults.lose_answers, 3),
    (faults.lose_bookkeeping_answers, 2),
    (faults.blackhole, 2),
    (faults.slow, 1),
    (faults.restart_server, 4),
    (faults.terminate_backends, 4),
    (faults.lock, 3),
    (faults.ask, 4),
    (faults.rewrite, 2),
    (faults.grow, 1),
    (faults.change_identity, 1),
    (faults.write_elsewhere, 1),
    (faults.leave_alone, 3),
    (schemas.move_schema, 4),
    (shards.move_table, 3),
)
"""Faults with weights."""
RARE: tuple[Fault, ...] = (
    definitions.add_and_fill,
    evolution.evolve,
    evolution.run_script,
    definitions.drop_and_create,
    definitions.drop_while_copied,
    definitions.gain_identity,
    definitions.leaf_identity,
    definitions.lock_unmapped,
    definitions.readd_column,
    definitions.reattach_partition,
    definitions.resync_in_large,
    definitions.swap_by_rename,
    installations.fail_over_source,
    installations.fail_over_target,
    installations.second_installation,
    schemas.rename_schema,
    tenants.move_tenant,
)
"""Slow faults. Each comes once before any fault repeats."""
RARE_SHARE = 0.35
CHUNK = "chunk of a table copied"
WORK_ONLY = ("deferrable_keys",)
"""Names that choose tables for the sessions, without a fault."""
NAMES = (
    *(fault.__name__ for fault, _ in FREQUENT),
    *(fault.__name__ for fault in RARE),
    *WORK_ONLY,
)


class _Deck:
    """Deals faults: rare faults in a random order, frequent faults by weight."""

    def __init__(self, options: Options, random: Random) -> None:
        self._random = random
        self._frequent = [
            fault
            for fault, weight in FREQUENT
            if options.has(fault.__name__)
            for _ in range(weight)
        ]
        self._rare = [fault for fault in RARE if options.has(fault.__name__)]
        self._left: list[Fault] = []

    def deal(self) -> Fault:
        is_rare = self._random.random() < RARE_SHARE
        if self._rare and (is_rare or not self._frequent):
            if not self._left:
                self._left = self._random.sample(self._rare, len(self._rare))
            return self._left.pop()
        return self._random.choice(self._frequent or [faults.leave_alone])


@contextlib.contextmanager
def _sessions(world: World) -> Iterator[list[Session]]:
    sessions = [
        Session(source, f"{world.options.seed}-{source.slot}-{number}")
        for source in world.sources
        for number in range(world.options.sessions)
    ]
    for session in sessions:
        session.start()
    try:
        yield sessions
    except BaseException as exc:
        for session in sessions:
            if session.failure is not None:
                exc.add_note(f"session {session.name} ended with {session.failure!r}")
        raise
    finally:
        for session in sessions:
            session.end()
        for session in sessions:
            session.join(60)
    for session in sessions:
        session.check()


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
        Proxy(target_server) as standby_proxy,
        contextlib.ExitStack() as servers,
    ):
        target_server.execute("create database dw")
        sources = []
        for database, sid, kinds in databases(options):
            name = f"{database}_{sid}" if sid else database
            source_server.execute(f"create database {name}")
            chosen = tuple(kind for kind in kinds if not kind.faults or options.has(*kind.faults))
            sources.append(Source(database, sid, chosen, source_server.url(name)))
            sources[-1].execute("; ".join(kind.ddl for kind in chosen))
            sources[-1].execute("create table unmapped (id int)")
        target = Database(target_server, "dw")
        for kind in KINDS:
            if kind.target_ddl and (not kind.faults or options.has(*kind.faults)):
                target.execute(kind.target_ddl)
        random = Random(options.seed)
        candidates = [
            (source, kind)
            for source in sources
            for kind in source.kinds
            if kind.operations and kind.target_ddl is None and not kind.faults
        ]
        world = World(
            options, directory, source_server, target_server, source_proxy, target_proxy,
            standby_proxy, servers, target, sources, random, directory / "config.yaml",
            [*random.sample(candidates, 4), *evolution.operated(sources),
             *shards.operated(sources)],
        )  # fmt: skip
        try:
            yield world
        finally:
            if world.process is not None:
                with world.process:
                    pass


def databases(options: Options) -> Iterator[tuple[str, str | None, tuple[Kind, ...]]]:
    """Yield database, sid and tables of each source."""
    yield "lone", None, KINDS
    for sid in ("eu", "us"):
        yield "shop", sid, TENANT_KINDS
    if options.has("move_tenant"):
        yield "shop", COMING, TENANT_KINDS
    if options.has("move_schema", "rename_schema"):
        for number in range(options.databases):
            kinds = schemas.first_kinds(f"h{number}", options.schemas)
            yield HOSTED, f"h{number}", HOSTED_KINDS + kinds
    if options.has("move_table"):
        for number in range(options.shards):
            yield SPLIT, f"p{number}", kinds_of_shard(number)


def torture(options: Options, directory: Path) -> World:
    """Run the whole test. Raises Violation, with the schedule as a note."""
    with _made(options, directory) as world:
        try:
            with _sessions(world) as sessions:
                time.sleep(world.random.choice((1, 10)))  # tables of 10 s have several chunks
                world.start()
                if options.seed % 3:
                    # Otherwise the first copies are made in the storm. The tables grow: a copy in
                    # chunks follows until a chunk is larger than the new rows meanwhile.
                    world.wait(3)
                world.note("the storm begins")
                deadline = time.monotonic() + options.seconds
                deck = _Deck(options, world.random)
                while time.monotonic() < deadline:
                    world.make(deck.deal())
                    world._assert_alive()
                    world.operate()
                    time.sleep(world.random.random() * 1.5)
                    for session in sessions:
                        session.check()
            world.heal()
            tenants.restore_records(world)
            world.end(evolution.check)
        except BaseException as exc:
            exc.add_note(describe(world))
            raise
        return world


def describe(world: World) -> str:
    """Return the actions of the run, for the search for a cause."""
    done = textwrap.indent("\n".join(world.schedule), "  ")
    return f"torture {world.options}\nin {world.directory}\n{done}\n{summarize(world)}"


def summarize(world: World) -> str:
    """Return the numbers of faults made, made in part, and never made, and the number of chunks."""
    chosen = [name for name in NAMES if world.options.has(name) and name not in WORK_ONLY]
    never = [name for name in chosen if not world.met[name] and not world.skipped[name]]
    chunks = sum(log.read_text().count(CHUNK) for log in world.directory.glob("run-*.log"))
    return f"chunks copied: {chunks}\n" + "\n".join(
        f"{title}: {', '.join(names) or 'none'}"
        for title, names in (
            ("faults met", _counted(world.met)),
            ("faults skipped in part", _counted(world.skipped)),
            ("faults not met", never),
        )
    )


def _counted(faults: Counter[str]) -> list[str]:
    return [f"{name} {count}" for name, count in sorted(faults.items())]
