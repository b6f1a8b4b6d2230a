"""Measures a case: prepares databases and sides, runs rounds, and checks after each that every side
has the source's rows.

All sides of a round apply the same changes on the same servers, side after side. The next round
begins with the next side.
"""

import contextlib
import statistics
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.cases import Case, Kind, Pgbench
from benchmarks.servers import Database, Sampler, wait_until
from benchmarks.sides import (
    START_SECONDS,
    TRANSPORTS,
    Launch,
    Native,
    Pglogical,
    Side,
    Streamer,
    launch,
)
from benchmarks.usage import Cpu, peak_memory, take_snapshot
from streamer.commands.demo.embedded_servers import Server

DRAIN_SECONDS: Final = 900.0
WARM_UP_SECONDS: Final = 2.0
"""The time for which a side streams before the measurement of a steady load."""
CLIENTS: Final = 4


@dataclass(frozen=True, slots=True)
class Options:
    """The size of a benchmark. ``sides``: names of sides, or empty for all."""

    changes: int = 100_000
    rounds: int = 3
    seconds: float = 10.0
    sides: tuple[str, ...] = ()
    with_pglogical: bool = False
    settings: tuple[str, ...] = ()
    """Lines of streamer's configuration."""
    launch: Launch = launch


@dataclass(frozen=True, slots=True)
class Measurement:
    """A side in a round.

    ``values``: by name of the figure: ``rate`` (changes a second), ``p50`` and ``p99`` (ms),
    ``cpu`` or ``seconds``. The value ``cpu`` is the percentage of a core that streamer's process or
    the apply worker uses.
    ``cpu``: CPU seconds of the round; ``memory``: bytes.
    """

    values: dict[str, float]
    cpu: Cpu = field(default_factory=Cpu)
    memory: int = 0
    is_binary: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """All sides in a round, by name. ``changes``: the number of changes that each side applied."""

    changes: int
    sides: dict[str, Measurement]


Report = Callable[[str], None]


class Runner:
    """Runs cases on two servers."""

    def __init__(
        self, source: Server, target: Server, directory: Path, options: Options, report: Report
    ) -> None:
        self._source = source
        self._target = target
        self._directory = directory
        self._options = options
        self._report = report

    def run(self, case: Case) -> list[Round]:
        """Return the measurements of a case. Raises SystemExit if the rows of a side differ."""
        with self._databases(case) as (sources, sides):
            _Filling(case, self._options, sources, [side.target for side in sides]).fill()
            if case.kind is not Kind.COPY:
                for side in sides:
                    self._report(f"{case.name}: preparing {side.name}")
                    side.prepare()
            return [
                self._round(case, number, sources, sides)
                for number in range(1, self._options.rounds + 1)
            ]

    @contextlib.contextmanager
    def _databases(self, case: Case) -> Iterator[tuple[list[Database], list[Side]]]:
        name = case.identifier
        sources = [Database(self._source, f"{name}_{number}") for number in range(case.sources)]
        sides = [
            self._side(case, side, sources, Database(self._target, f"{name}_{side}"))
            for side in self._names(case)
        ]
        databases = [*sources, *(side.target for side in sides)]
        for database in databases:
            database.create()
        try:
            yield sources, sides
        finally:
            for side in sides:
                if side.pid is not None:
                    side.stop()
        # After an error, the servers are removed with all databases.
        for database in reversed(databases):  # first the targets, whose sessions hold slots
            database.drop()

    def _names(self, case: Case) -> list[str]:
        names = ["native", *case.transports]
        if self._options.with_pglogical:
            names.append("pglogical")
        chosen = self._options.sides
        return [name for name in names if not chosen or name in chosen]

    def _side(self, case: Case, name: str, sources: Sequence[Database], target: Database) -> Side:
        if name in TRANSPORTS:
            return Streamer(
                case,
                name,
                sources,
                target,
                self._directory,
                self._options.settings,
                self._options.launch,
            )
        return (Native if name == "native" else Pglogical)(case, sources, target)

    def _round(
        self, case: Case, number: int, sources: Sequence[Database], sides: Sequence[Side]
    ) -> Round:
        turn = (number - 1) % len(sides) if sides else 0
        ordered = [*sides[turn:], *sides[:turn]]
        load = _Load(case, self._options, sources, number)
        of = f"round {number} of {self._options.rounds}"
        marks: list[str] = []
        if case.kind is Kind.DRAIN:
            self._report(f"{case.name}, {of}: workload")
            marks = load.make()
        measurements = {}
        for side in ordered:
            self._report(f"{case.name}, {of}: {side.name}")
            self._settle(side.target)
            match case.kind:
                case Kind.DRAIN:
                    measurements[side.name] = self._drain(side, sources, marks, load.changes)
                case Kind.COPY:
                    measurements[side.name] = self._copy(case, side)
                case _:
                    measurements[side.name] = self._stream(case, side, sources, load)
            self._check_equal(case, sources, side)
            if case.kind is Kind.COPY:
                self._empty(case, side)
        return Round(load.changes, measurements)

    def _settle(self, target: Database) -> None:
        """Finish the servers' work of earlier rounds."""
        target.execute("vacuum (analyze)")
        target.execute("checkpoint")
        self._source.execute("checkpoint")

    # ---- kinds ---------------------------------------------------------------------------------

    def _drain(
        self, side: Side, sources: Sequence[Database], marks: Sequence[str], changes: int
    ) -> Measurement:
        with self._started(side, sources) as began:
            start = take_snapshot(side.pid, side.target, self._source)
            ended = wait_until(side.target.url, side.reached_sql(marks), DRAIN_SECONDS, side)
            cpu = start.until(take_snapshot(side.pid, side.target, self._source))
            memory = 0 if side.pid is None else peak_memory(side.pid)
            is_binary = self._asks_for_binary(side)
        return Measurement({"rate": changes / (ended - began)}, cpu, memory, is_binary)

    def _stream(
        self, case: Case, side: Side, sources: Sequence[Database], load: "_Load"
    ) -> Measurement:
        """Measure latency, or CPU, under a steady load or none."""
        with self._started(side, sources), contextlib.ExitStack() as stack:
            time.sleep(min(WARM_UP_SECONDS, self._options.seconds))
            flushed = Sampler(sources[0], "pg_current_wal_flush_lsn()")
            visible = Sampler(side.target, side.position_sql)
            if case.kind is Kind.LATENCY:
                for sampler in (flushed, visible):
                    sampler.start()
                    stack.callback(sampler.stop)
            first, began = (
                take_snapshot(side.pid, side.target, self._source),
                time.monotonic(),
            )
            load.run_steadily()
            cpu = first.until(take_snapshot(side.pid, side.target, self._source))
            elapsed = time.monotonic() - began
            memory = 0 if side.pid is None else peak_memory(side.pid)
            is_binary = self._asks_for_binary(side)
            if case.workload:
                marks = load.touch()
                wait_until(side.target.url, side.reached_sql(marks), START_SECONDS, side)
        if case.kind is Kind.LATENCY:
            waits = delays(flushed.stop()[1:], visible.stop())
            cuts = statistics.quantiles(waits, n=100)
            values = {"p50": cuts[49] * 1000, "p99": cuts[98] * 1000}
        else:
            program = cpu.target if side.pid is None else cpu.program
            values = {"cpu": 100 * program / elapsed}
        return Measurement(values, cpu.scaled(1 / elapsed), memory, is_binary)

    def _copy(self, case: Case, side: Side) -> Measurement:
        began = time.monotonic()
        side.copy()
        ended = began
        for condition in side.copied_sql:
            ended = wait_until(side.target.url, condition, DRAIN_SECONDS, side)
        memory = 0 if side.pid is None else peak_memory(side.pid)
        side.stop()
        return Measurement({"seconds": ended - began}, memory=memory)

    @contextlib.contextmanager
    def _started(self, side: Side, sources: Sequence[Database]) -> Iterator[float]:
        """Run *side* during a block; yield the time when its first walsender began."""
        slots = ", ".join(f"'{slot}'" for slot in side.slots)
        active = (
            f"select count(*) > 0 from pg_replication_slots where active and slot_name in ({slots})"
        )
        side.start()
        try:
            yield wait_until(sources[0].url, active, START_SECONDS, side)
        finally:
            side.stop()
            idle = active.replace("count(*) > 0", "count(*) = 0")
            wait_until(sources[0].url, idle, START_SECONDS)

    def _asks_for_binary(self, side: Side) -> bool:
        slots = ", ".join(f"'{slot}'" for slot in side.slots)
        return bool(
            self._source.execute(
                "select coalesce(bool_and(a.query ~ 'binary ''(true|on)'''), false)"
                " from pg_stat_activity a join pg_replication_slots s on s.active_pid = a.pid"
                f" where s.slot_name in ({slots})"
            )[0][0]
        )

    # ---- equality ------------------------------------------------------------------------------

    def _check_equal(self, case: Case, sources: Sequence[Database], side: Side) -> None:
        of_side = case.compared
        if side.name in TRANSPORTS and case.compared_of_streamer is not None:
            of_side = case.compared_of_streamer
        for number, source in enumerate(sources):
            expected = _digests(source, case, case.compared.replace("{source}", str(number)))
            actual = _digests(side.target, case, of_side.replace("{source}", str(number)))
            if differing := [name for name in case.tables if expected[name] != actual[name]]:
                raise SystemExit(
                    f"{case.name}: {side.name} ended with other rows than the source in"
                    f" {', '.join(differing)}"
                )

    def _empty(self, case: Case, side: Side) -> None:
        """Create a new target for the next copy."""
        slots = side.slots
        side.forget()
        side.target.drop()
        for slot in slots:
            self._source.execute(
                f"select pg_drop_replication_slot('{slot}') from pg_replication_slots"
                f" where slot_name = '{slot}'"
            )
        side.target.create()
        if side.name not in TRANSPORTS:
            side.target.execute(case.schema)


def _digests(database: Database, case: Case, query: str) -> dict[str, object]:
    union = " union all ".join(
        f"select '{name}', count(*), sum(hashtextextended(r::text, 0)::numeric)"
        f" from ({query.replace('{table}', name)}) r"
        for name in case.tables
    )
    return {str(name): digest for name, *digest in database.execute(union)}


def delays(
    flushed: Sequence[tuple[float, int]], visible: Sequence[tuple[float, int]]
) -> list[float]:
    """Return the seconds from the flush of each position to its visibility. Leave out positions
    after the last visible position, which are not commits of the load. Pure.
    """
    positions = [position for _, position in visible]
    seconds = []
    for at, position in flushed:
        index = bisect_left(positions, position)
        if index < len(visible):
            seconds.append(max(0.0, visible[index][0] - at))
    return seconds


class _Filling:
    """Fills all databases of a case with the same rows."""

    def __init__(
        self,
        case: Case,
        options: Options,
        sources: Sequence[Database],
        targets: Sequence[Database],
    ) -> None:
        self._case = case
        self._options = options
        self._sources = sources
        self._targets = targets

    def fill(self) -> None:
        case = self._case
        for number, source in enumerate(self._sources):
            self._make(source, case.schema, [number])
            if case.procedure:
                source.execute(case.procedure)
            if case.kind is Kind.DRAIN:  # the creation of a backlog is not measured
                source.execute(f'alter database "{source.name}" set synchronous_commit = off')
        is_copy = case.kind is Kind.COPY
        for target in self._targets:
            is_streamer = target.name.rpartition("_")[2] in TRANSPORTS
            schema = case.schema
            if is_streamer and case.schema_of_streamer is not None:
                schema = case.schema_of_streamer
            if not is_copy:
                self._make(target, schema, range(len(self._sources)), with_sid="sid" in schema)
            elif not is_streamer:
                target.execute(schema)

    def _make(
        self, database: Database, schema: str, numbers: Sequence[int], *, with_sid: bool = False
    ) -> None:
        case = self._case
        if case.pgbench_scale:
            scale = case.pgbench_scale if self._options.changes >= 10_000 else 1
            arguments = ("--initialize", "--quiet", "--scale", str(scale))
            database.run_program("pgbench", *arguments)
        if schema:
            database.execute(schema)
        for number in numbers if case.fill else ():
            fill = case.fill.format(rows=rows_of(case, self._options), source=number)
            if with_sid:
                fill = fill.replace("select ", f"select 's{number}', ", 1)
            database.execute(fill)
        database.execute("vacuum (freeze, analyze)")


def changes_of(case: Case, options: Options) -> int:
    """Return the changes of a round at a source: whole transactions. Pure."""
    count = int(options.changes * case.share)
    return max(1, count // case.per_transaction) * case.per_transaction


def rows_of(case: Case, options: Options) -> int:
    """Return the rows of the fill. Pure."""
    if case.rows is not None:
        return case.rows
    if case.kind is Kind.COPY:
        return changes_of(case, options)
    return changes_of(case, options) * options.rounds


class _Load:
    """The changes of a round."""

    def __init__(
        self, case: Case, options: Options, sources: Sequence[Database], number: int
    ) -> None:
        self._case = case
        self._options = options
        self._sources = sources
        self._number = number
        self._changes = changes_of(case, options)
        self.changes = (self._changes + case.touched) * len(sources)
        if case.kind is not Kind.DRAIN:
            self.changes = 0

    def make(self) -> list[str]:
        """Create the backlog at every source; return the positions before its last transactions."""
        start = [_written(source) for source in self._sources]
        with ThreadPoolExecutor(len(self._sources)) as threads:
            marks = list(threads.map(self._make, range(len(self._sources))))
        for source, written in zip(self._sources, start, strict=True):
            expected = written + self.changes // len(self._sources)
            wait_until(source.url, f"select ({_WRITTEN_SQL}) >= {expected}", 30)
            if (now := _written(source)) != expected:
                raise SystemExit(
                    f"{self._case.name}: the workload made {now - written} changes instead of"
                    f" {expected - written}"
                )
        return marks

    def _make(self, number: int) -> str:
        case, source = self._case, self._sources[number]
        transactions = self._changes // case.per_transaction
        if isinstance(case.workload, Pgbench):
            per_client = str(max(1, transactions // CLIENTS))
            self._changes = int(per_client) * CLIENTS * case.per_transaction
            self.changes = self._changes + case.touched
            arguments = ("--no-vacuum", "--client", str(CLIENTS), "--transactions", per_client)
            source.run_program("pgbench", *arguments)
        else:
            workload = case.workload.format(
                changes=self._changes,
                transactions=transactions,
                round=self._number,
                first=(self._number - 1) * self._changes,
                rows=rows_of(case, self._options),
                source=number,
            )
            source.execute(workload)
        return self._touch(number)

    def touch(self) -> list[str]:
        return [self._touch(number) for number in range(len(self._sources))]

    def _touch(self, number: int) -> str:
        source = self._sources[number]
        mark = str(source.value("select pg_current_wal_insert_lsn()"))
        source.execute(self._case.touch.format(round=self._number, source=number))
        return mark

    def run_steadily(self) -> None:
        """Run the load, if any, for the time of a measurement."""
        workload, seconds = self._case.workload, self._options.seconds
        if not isinstance(workload, Pgbench):
            threading.Event().wait(seconds)
            return
        arguments = ["--no-vacuum", "--client", str(CLIENTS), "--time", str(max(1, int(seconds)))]
        arguments += ["--rate", str(workload.rate)]
        if workload.script is not None:
            script = Path(self._sources[0].server.directory) / f"{self._case.name}.sql"
            script.write_text(f"{workload.script};\n")
            arguments += ["--file", str(script)]
        self._sources[0].run_program("pgbench", *arguments)


_WRITTEN_SQL: Final = (
    "select coalesce(sum(n_tup_ins + n_tup_upd + n_tup_del), 0)::int8 from pg_stat_user_tables"
)


def _written(source: Database) -> int:
    return int(str(source.value(_WRITTEN_SQL)))
