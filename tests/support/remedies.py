"""The catalogue of remedies: the places that make steps for operators, and the tests that follow.

A place is a function of the program that makes a command or SQL of `streamer.errors.remedies`, or a block
of a runbook. A test that runs the steps in the situation in which an operator reads them has the
marker ``follows``.
"""

import ast
import asyncio
import shlex
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

from streamer.errors.remedies import Command, Remedy, Sql, Step
from streamer.report.problem_facts import source_of_row
from streamer.report.problems import Problem, ProblemKind, needs_operator, of_source
from tests.support.postgres import Database
from tests.support.process import Process, command
from tests.support.streamer import Streamer

ROOT: Final = Path(__file__).parents[2]
MAKERS: Final = {
    *("run", "at_source", "at_target", "Command", "resync_source", "end_blocking_sessions")
}
"""The names of `streamer.errors.remedies` that make steps."""

SECONDS: Final = 60.0
"""The longest wait for a problem, or for its end."""
Find = Callable[[str, ProblemKind], Awaitable[Problem]]


def read_places() -> dict[str, set[str]]:
    """Return the places of the program by ``module:function``, with the makers that they call."""
    places: dict[str, set[str]] = {}
    for path in sorted((ROOT / "streamer").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        makers = MAKERS & _imported(tree)
        if makers and path.name != "remedies.py":
            module = ".".join(path.relative_to(ROOT / "streamer").with_suffix("").parts)
            for function, call in _calls(tree, ()):
                if call in makers:
                    places.setdefault(f"{module}:{function}", set()).add(call)
    return places


def _imported(tree: ast.Module) -> set[str]:
    return {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "streamer.errors.remedies"
        for alias in node.names
    }


def _calls(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the calls below *node* with the qualified name of their function."""
    for child in ast.iter_child_nodes(node):
        inner = names
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = (*names, child.name)
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Name):
            yield ".".join(inner), child.func.id
        yield from _calls(child, inner)


def read_followed() -> dict[str, list[str]]:
    """Return the tests with a marker ``follows``, by the places that the marker names.

    A block of a runbook counts only in a module that uses the text of the block.
    """
    followed: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.follows(" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for place in _marked(node):
                    page, _, name = place.partition(":")
                    if page != "runbooks" or f'"{name}"' in text:
                        followed.setdefault(place, []).append(f"{path.name}::{node.name}")
    return followed


def _marked(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [
        str(argument.value)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.follows"
        for argument in decorator.args
        if isinstance(argument, ast.Constant)
    ]


async def remedy_of(
    streamer: Streamer, table: str | None, words: str, sid: str | None = None
) -> Remedy:
    """Wait until the error of *table* has *words*, and return its remedy.

    *table*: a name with its schema; None for the error of the source. *sid*: the sid of the source,
    if several sources exist.
    """
    remedies: list[Remedy | None] = []

    async def is_told() -> bool:
        source = next(s for s in await streamer.statuses() if sid in (None, s["sid"]))
        tables = [row for row in source["tables"] if row["source"] == table]
        for row in [source] if table is None else tables:
            remedies[:] = [Remedy.from_json(row["remedy"])]
            return words in (row["error"] or "")
        return False

    await streamer.eventually(is_told)
    assert remedies[0] is not None
    return remedies[0]


def find_in(streamer: Streamer) -> Find:
    async def find(table: str, kind: ProblemKind) -> Problem:
        """Wait until *table* has a problem of *kind*, and return that."""
        found: list[Problem] = []

        async def is_there() -> bool:
            problems = await read_problems(streamer)
            found[:] = [p for p in problems if (p.subject.table, p.kind) == (table, kind)]
            return bool(found)

        await streamer.eventually(is_there, SECONDS)
        return found[0]

    return find


async def read_problems(streamer: Streamer) -> list[Problem]:
    """Return the problems of the only source that need an operator."""
    return needs_operator(of_source(source_of_row(await streamer.status())))


async def are_gone(streamer: Streamer) -> None:
    """Wait until the source has no problem that needs an operator."""

    async def is_well() -> bool:
        return not await read_problems(streamer)

    await streamer.eventually(is_well, SECONDS)


class Operator:
    """Runs the steps of remedies as printed, beside a file with the name FILE."""

    def __init__(self, config: Path, source: Database, target: Database) -> None:
        self._config = config
        self._databases = {"source": source, "target": target}

    async def follow(self, remedy: Remedy, *, choose: int | None = None) -> str:
        """Run all steps of *remedy*, or only the step with the number *choose*; return their
        output.
        """
        steps = remedy.steps if choose is None else remedy.steps[choose : choose + 1]
        assert steps, remedy
        return "".join([await self._take(step) for step in steps])

    def start(self, remedy: Remedy) -> Process:
        """Start the program by the line `streamer run …` of *remedy*."""
        (step,) = remedy.commands
        program, action, *arguments = shlex.split(step.line)
        assert (program, action) == ("streamer", "run"), step
        return Process(self._config, *arguments, spark=False)

    async def _take(self, step: Step) -> str:
        if isinstance(step, Sql):
            for statement in step.statements:
                self._databases[step.side].execute(statement)
            return ""
        assert isinstance(step, Command)
        program, *arguments = shlex.split(step.line)

        def run() -> "subprocess.CompletedProcess[str]":
            if program == "streamer":
                return command(self._config, *arguments)
            return subprocess.run([program, *arguments], capture_output=True, text=True)

        # The engine runs in this thread, and the command may wait for it.
        result = await asyncio.to_thread(run)
        assert result.returncode == 0, f"{step}\n{result.stdout}{result.stderr}"
        return result.stdout
