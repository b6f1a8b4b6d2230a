"""The program in the test's own process, on a configuration written as YAML.

The environment sets the values that a test leaves open, so that all tests can run with each. The
variables are TEST_WORKERS (a number), TEST_STREAMING (on or off) and TEST_TRANSPORT (text or
binary).
"""

import asyncio
import contextlib
import os
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from streamer.bookkeeping.relation_records import read_relation_records
from streamer.bookkeeping.requests import make_request
from streamer.commands import ddl_decisions
from streamer.compare import differences_at_point, local_program
from streamer.config import static_mapping
from streamer.copy import plan_copies
from streamer.copy.parts.part_copier import CopyEnds, TransientError, copy_parts
from streamer.copy.spark.launcher import SparkLauncher
from streamer.errors.error_classes import ComparisonError
from streamer.mapping.rules import Mapping
from streamer.mapping.scope import ALL, Scope
from streamer.runtime.process.engine import Engine, StopCondition
from streamer.util.backoff import Backoff
from tests.support.observer import Observer
from tests.support.postgres import Database
from tests.support.waiting import until

T = TypeVar("T")

CATCH_UP_SECONDS = 60.0


class Streamer:
    """An engine that runs as a task."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings, self.mapping = static_mapping.load(path)
        self.engine = Engine(self.settings, self.mapping, StopCondition())
        self.observer = Observer(self.settings)
        self._has_run = False
        self._task: asyncio.Task[None] | None = None

    @property
    def scope(self) -> Scope:
        """The tables to wait for."""
        return ALL

    def start(self) -> None:
        if self._has_run:  # a process that starts again has no state of the former process
            self.engine = Engine(self.settings, self.mapping, StopCondition())
        self._has_run = True
        self._task = asyncio.create_task(self.engine.run(), name="engine")

    async def apply(self) -> None:
        """Read the configuration again, as at SIGHUP."""
        self.settings, self.mapping = static_mapping.load(self.path)
        self.engine.adopt(self.settings)
        await self.engine.apply(self.mapping)

    async def stop(self) -> None:
        """Stop in order."""
        await self.connect_again()
        if self._task is not None:
            self.engine.stop()
            await self._task
            self._task = None

    async def kill(self) -> None:
        """Cancel all tasks at once, as if the process had been killed."""
        await self.connect_again()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def caught_up(self, seconds: float = CATCH_UP_SECONDS) -> None:
        """Wait until all present commits are visible at the target."""
        waiting = asyncio.create_task(self.observer.wait(self.mapping, seconds, self.scope))
        assert self._task is not None
        await asyncio.wait([waiting, self._task], return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            waiting.cancel()
            self._task.result()
            raise AssertionError("the engine ended")
        missing = waiting.result()
        if missing is not None:
            raise AssertionError(f"{missing}\n{await self.dump()}")

    async def connect_again(self) -> None:
        """Let the next `caught_up` connect anew, because an address now leads to a different
        server.
        """
        await self.observer.close()

    async def status(self) -> dict[str, Any]:
        """Return the status of the only source, as JSON."""
        return (await self.statuses())[0]

    async def statuses(self) -> list[dict[str, Any]]:
        return await self._asked(self.observer.statuses(self.mapping))

    async def _asked(self, question: Awaitable[T]) -> T:
        try:
            return await question
        finally:
            if self._task is None:  # nothing will close the connections
                await self.connect_again()

    async def table(self, name: str) -> dict[str, Any]:
        tables = (await self.status())["tables"]
        return next(table for table in tables if table["source"] == name)

    async def dump(self) -> str:
        return "\n".join(map(str, await self.statuses()))

    async def eventually(
        self, condition: Callable[[], Awaitable[bool]], seconds: float = CATCH_UP_SECONDS
    ) -> None:
        """Wait until *condition* holds."""
        try:
            await until(condition, seconds=seconds)
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{await self.dump()}") from exc

    async def ask(self, action: str, table: str = "public.t", **options: Any) -> None:
        """Make a request as the commands do, and wait until the engine has taken it."""
        records = await read_relation_records(self.observer.bookkeeping)
        relation = next(record for record in records if record.source == table)
        await make_request(self.observer.bookkeeping, relation.relation_id, action, options)

        async def is_taken() -> bool:
            async with self.observer.bookkeeping.connection() as connection:
                sql = "select not exists (select from streamer.request where state = 'queued')"
                return bool(await connection.fetch_value(sql))

        await self.eventually(is_taken)

    async def decide(
        self, action: str, table: str = "t", statements: Sequence[str] | None = None
    ) -> None:
        """Decide about the change of a definition for which *table* waits, as the commands do."""
        (source,) = self.mapping.sources
        await ddl_decisions.store_decision(
            self.observer.address, action, table, source.database, source.sid, statements
        )

    async def source_state(self, state: str, seconds: float = CATCH_UP_SECONDS) -> None:
        """Wait until the only source is in *state*."""

        async def is_so() -> bool:
            return bool((await self.status())["state"] == state)

        await self.eventually(is_so, seconds)

    async def table_state(self, name: str, state: str, seconds: float = CATCH_UP_SECONDS) -> None:
        """Wait until a table is in *state*."""

        async def is_so() -> bool:
            return any(
                table.source == name and table.state == state
                for table in await self._asked(self.observer.tables())
            )

        await self.eventually(is_so, seconds)


def _with_default(block: str, key: str, variable: str) -> str:
    """Add *key* with the environment's value to a block of YAML that has none."""
    block = textwrap.dedent(block)
    value = os.environ.get(variable)
    if value is None or any(line.startswith(f"{key}:") for line in block.splitlines()):
        return block
    return f"{key}: {value}\n{block}"


def write_config(
    path: Path,
    source: Database,
    target: Database,
    tables: str,
    *,
    settings: str = "",
    sid: str | None = None,
    others: dict[str, Database] | None = None,
    group: str = "",
    database: str = "shop",
    port: int | None = None,
) -> None:
    """Write a configuration for one source, with the environment's settings where it has none.

    *others*: more tenants, by sid. *port*: where to serve HTTP.
    """
    settings = _with_default(settings, "workers", "TEST_WORKERS")
    group = _with_default(group, "streaming", "TEST_STREAMING")
    group = _with_default(group, "transport", "TEST_TRANSPORT")
    urls = [f'{{url: "{source.url}"' + (f", sid: {sid}" if sid else "") + "}"]
    urls += [f'{{url: "{db.url}", sid: {other}}}' for other, db in (others or {}).items()]
    blocks = [
        f'target: {{url: "{target.url}"}}',
        f'http: {{listen: "{"" if port is None else f"127.0.0.1:{port}"}"}}',
        f"spool: {{directory: {path.parent / 'spool'}}}",
        settings,
        "sources:",
        f"- database: {database}",
        f"  urls: [{', '.join(urls)}]",
        textwrap.indent(group, "  "),
        "  tables:",
        textwrap.indent(textwrap.dedent(tables), "    "),
    ]
    path.write_text("\n".join(blocks))


MakeStreamer = Callable[..., contextlib.AbstractAsyncContextManager[Streamer]]


@pytest.fixture
def stream(tmp_path: Path, source: Database, target: Database) -> MakeStreamer:
    """Return a function that streams from *source* to *target*: ``async with stream("t: {…}") as
    s``.
    """

    @contextlib.asynccontextmanager
    async def make(tables: str, **options: Any) -> AsyncIterator[Streamer]:
        path = tmp_path / "config.yaml"
        write_config(path, source, target, tables, **options)
        streamer = Streamer(path)
        streamer.start()
        try:
            yield streamer
        finally:
            await streamer.stop()

    return make


async def copy_in_threads(self: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Do a job with the code that Spark's tasks run, in place of `SparkLauncher.submit`."""

    def copy() -> list[dict[str, Any]]:
        ends = CopyEnds.from_json(job["ends"])
        return [failure for task in job["tasks"] for failure in copy_parts(task, ends)]

    return await asyncio.to_thread(copy)


@pytest.fixture
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_with_threads(monkeypatch)


class ComparesInThreads:
    """Takes the place of `LocalProcess`: a process takes ten times the CPU."""

    async def submit(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        try:
            return await asyncio.to_thread(local_program.run, job)
        except TransientError as exc:
            raise ComparisonError(f"the comparison stopped: {exc}") from None


def copy_with_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads copy the parts, and compare at the points of copies."""
    monkeypatch.setattr(differences_at_point, "LocalProcess", ComparesInThreads)
    monkeypatch.setattr(SparkLauncher, "submit", copy_in_threads)
    monkeypatch.setattr(SparkLauncher, "prepare", lambda self: None)


@pytest.fixture
def deferred_indexes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let copies of small tables drop the indexes and make them again, as those of large ones do."""
    monkeypatch.setattr(plan_copies, "DEFER_BYTES_MIN", 0)


@pytest.fixture
def short_backoffs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attempts of the engine follow one another ten times as fast."""
    next_seconds = Backoff.next_seconds
    monkeypatch.setattr(Backoff, "next_seconds", lambda self: next_seconds(self) / 10)


__all__ = ["MakeStreamer", "Mapping", "Streamer", "write_config"]
