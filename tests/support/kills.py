"""Processes of a configuration that die at failpoints, in turn.

Each process continues where the process before died. So a faulty state at a death keeps the next
process from reaching its failpoint, or shows in the final rows.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from streamer.util.failpoints import VARIABLE
from tests.support.postgres import Database
from tests.support.process import Process, caught_up, run, status
from tests.support.streamer import Streamer, write_config
from tests.support.waiting import eventually, until

PLAIN = "tests.support.plain_streamer"
ACTS_MAX = 1500
DEATH_SECONDS = 120.0


def arm(failpoint: str) -> dict[str, str]:
    """Return the variable that lets a process die at ``name`` or, the third time, at ``name@3``."""
    name, at, count = failpoint.partition("@")
    return {VARIABLE: f"{name}=kill{at}{count}"}


class Kills:
    """A source, its target, and the processes that stream.

    ``acts``: how often a test has changed the source while a process ran. ``deaths``: how many
    processes have died at a failpoint. ``failpoint``: where the process that runs is to die.
    ``outputs``: the log of each process.
    """

    def __init__(
        self,
        directory: Path,
        source: Database,
        target: Database,
        rules: str = "t:",
        *,
        program: str = PLAIN,
        **options: Any,
    ) -> None:
        self.source, self.target = source, target
        self.config = directory / "config.yaml"
        self.program = program
        self.acts = self.deaths = 0
        self.failpoint: str | None = None
        self.outputs: list[str] = []
        self.configure(rules, **options)

    def configure(self, rules: str, **options: Any) -> None:
        """Give the next process new rules."""
        write_config(self.config, self.source, self.target, rules, **options)

    def process(self, failpoint: str | None = None) -> Process:
        self.failpoint = failpoint
        environment = {} if failpoint is None else arm(failpoint)
        return Process(self.config, environment=environment, program=self.program)

    def call(self, *arguments: str, failpoint: str | None = None) -> tuple[int, str]:
        """Run a command of the program until *failpoint* kills the command; return exit code and
        output.
        """
        environment = {} if failpoint is None else arm(failpoint)
        words = ("--config", str(self.config), *arguments)
        result = run(PLAIN, *words, environment=environment, seconds=DEATH_SECONDS)
        return result.returncode, result.stdout + result.stderr

    def command(self, *arguments: str) -> None:
        code, output = self.call(*arguments)
        assert code == 0, output

    def state(self) -> dict[str, Any]:
        """Return the status of the source."""
        return status(self.config)[0]

    def begin(self, until: Callable[[], object] | None = None) -> None:
        """Run until every commit is visible or *until* holds, and kill the process there."""
        with self.process() as process:
            if until is None:
                caught_up(process)
            else:
                eventually(until, what=process.output)
            process.kill()
            self.outputs.append(process.output)

    def die(self, failpoint: str, act: Callable[[], object] | None = None) -> None:
        """Run until *failpoint* kills the process; repeat *act* until then."""
        with self.process(failpoint) as process:
            self._ends(process, failpoint, act)

    def die_of(self, failpoint: str, act: Callable[[], object], *, repeats: bool = False) -> None:
        """Run, call *act* once the source streams, and wait until *failpoint* kills the process.

        If the failpoint is in work that an earlier process left, *act* may follow the death.
        """
        with self.process(failpoint) as process:

            def has_begun() -> bool:
                is_alive = process.process.poll() is None
                return not is_alive or self.state()["state"] == "streaming"

            eventually(has_begun, what=failpoint)
            act()
            self.acts += 1
            self._ends(process, failpoint, act if repeats else None)

    def _ends(self, process: Process, failpoint: str, act: Callable[[], object] | None) -> None:
        deadline, acts_max = time.monotonic() + DEATH_SECONDS, self.acts + ACTS_MAX
        while not process.process.ends_within(1 if act is None else 0.1):
            is_late = time.monotonic() > deadline or self.acts > acts_max
            assert not is_late, f"{failpoint} was not reached\n{process.output}"
            if act is not None:
                act()
                self.acts += 1
        assert process.process.returncode == -9, f"{failpoint}\n{process.output}"
        self.deaths += 1
        self.outputs.append(process.output)

    def part_dies(self, failpoint: str, act: Callable[[], object]) -> None:
        """Run until the copying process dies at *failpoint*, call *act*, and kill the program."""
        with self.process(failpoint) as process:
            eventually(lambda: "the Spark job is started again" in process.output)
            act()
            process.kill()

    async def recover(self) -> None:
        """Stream in this process until every commit is visible and every request is answered."""
        streamer = Streamer(self.config)
        streamer.start()
        try:
            await streamer.caught_up()
            taken = "select from streamer.request where state = 'taken'"
            await until(lambda: self.target.execute(taken) == [], what=taken)
        finally:
            await streamer.stop()

    def end(self, until: Callable[[], object] | None = None) -> None:
        """Run until every commit is visible and *until* holds, and stop in order."""
        with self.process() as process:
            eventually(lambda: self.state()["state"] == "streaming", what=process.output)
            caught_up(process)
            if until is not None:
                eventually(until, what=process.output)
            assert process.terminate() == 0, process.output
            self.outputs.append(process.output)


Act = str | Callable[[Kills], object]
"""SQL for the source, where an empty line ends a transaction, or a function. ``{n}`` stands for the
number of the act, ``{last}`` for that of the act before, and ``{deaths}`` for the number of deaths.
"""
Rows = str | tuple[str, str]
"""A query for both sides, or a query for each side."""


def perform(act: Act, kills: Kills) -> None:
    if callable(act):
        act(kills)
        return
    text = act.format(n=kills.acts + 1, last=kills.acts, deaths=kills.deaths)
    for statements in text.split("\n\n"):
        kills.source.execute(statements)


def differing(kills: Kills, rows: Sequence[Rows]) -> list[Rows]:
    """Return the queries to which the two sides have different answers."""
    pairs = [(query, query) if isinstance(query, str) else query for query in rows]
    return [
        (at_source, at_target)
        for at_source, at_target in pairs
        if kills.source.execute(at_source) != kills.target.execute(at_target)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Story:
    """Processes that die in turn, and the final rows of both sides."""

    failpoints: tuple[str, ...]
    """Where the processes die, in order."""
    both: str = ""
    source: str = ""
    target: str = ""
    """Statements for both sides and for each side, before the first process."""
    rules: str = "t:"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of `write_config`."""
    program: str = PLAIN
    begins: bool = True
    """A process runs until all tables are ready, before the first process dies."""
    first: Act = ""
    """Runs before the first process that dies, while none runs."""
    between: Act = ""
    """Runs after each death, while none runs."""
    act: Act = ""
    """Runs again and again from the moment that the process streams, until the process dies."""
    once: Act = ""
    """Runs once for each streaming process."""
    until: Callable[[Kills], object] = lambda _: True
    """The last process runs until this holds."""
    rows: Sequence[Rows] = ()
    """Rows that are the same on both sides in the end. The last process waits for these, too."""
    expected: dict[str, object] = dataclasses.field(default_factory=dict)
    """The final rows of the target, by query."""
    after: Callable[[Kills], object] = lambda _: None
    """Checks besides rows."""

    def play(self, directory: Path, source: Database, target: Database) -> None:
        for db, sql in ((source, self.source), (target, self.target)):
            db.execute(f"{self.both};{sql}")
        kills = Kills(directory, source, target, self.rules, program=self.program, **self.options)
        if self.begins:
            kills.begin()
        perform(self.first, kills)
        for failpoint in self.failpoints:
            if act := self.once or self.act:
                kills.die_of(failpoint, partial(perform, act, kills), repeats=not self.once)
            else:
                kills.die(failpoint)
            perform(self.between, kills)
        kills.end(lambda: self.until(kills) and not differing(kills, self.rows))
        assert differing(kills, self.rows) == []
        assert {query: target.execute(query) for query in self.expected} == self.expected
        self.after(kills)
