"""Tests of a module share an engine and two databases, whose start takes longer than such a test.

Each test gets a separate schema on both sides, and its sessions search this schema first. So a test
uses the names of its tables without a schema. The first test that runs starts an engine with the
tables of all tests. A test waits only for its own tables, so a table that an earlier test left in
error does not matter. A test may change the rules of its tables. Tests that stop the engine or
change its settings run first, without a shared engine. The event loop of a shared engine stands
still meanwhile. If the engine has a transaction open, every new slot of the server waits for it. So
no shared engine lives on beside a test that runs alone.
"""

import contextlib
import dataclasses
import itertools
import re
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pytest
import pytest_asyncio
import yaml

from streamer.commands.demo.embedded_servers import Server
from streamer.errors.error_classes import StreamerError
from streamer.mapping.scope import Scope
from tests.support.hostile_sessions import SESSIONS, give
from tests.support.postgres import (
    Connection,
    Database,
    database,
    since,
    target_database,
    version_of_targets,
    version_of_tests,
)
from tests.support.streamer import Streamer, copy_with_threads, write_config

T = TypeVar("T", bound=Callable[..., Any])
Options = tuple[tuple[str, str], ...]
EngineKey = tuple[str | None, str | None, Options, tuple[str, str]]


def streams(
    rules: str, *, both: str = "", source: str = "", target: str = "", **options: str | None
) -> Callable[[T], T]:
    """Let a test share an engine, which the fixture `shared` gives it.

    *rules*: YAML, one table a key. *both*, *source*, *target*: statements that run before the
    engine starts, those for both sides first. *options*: of `write_config`; tests with equal
    options share an engine. In all these arguments, ``<name>`` stands for the parameter of that
    name. An option that is None does not count. If a module runs with both implementations, each
    implementation gets separate engines.
    """

    def mark(test: T) -> T:
        marked = pytest.mark.asyncio(loop_scope="module")(test)
        sides = [";\n".join(filter(None, (both, side))) for side in (source, target)]
        return pytest.mark.streams(rules, *sides, options)(marked)  # type: ignore[no-any-return]

    return mark


@dataclasses.dataclass(frozen=True)
class Case:
    """The tables of a test, and the properties of the engine that the test needs.

    ``rules``: by the full names of its tables. ``implementation``, ``session``: None if the module
    does not choose an implementation, or hostile sessions. ``versions``: of the source's server,
    and of the target's.
    """

    schema: str
    rules: dict[str, Any]
    source: str
    target: str
    options: Options
    implementation: str | None
    session: str | None
    versions: tuple[str, str]

    @property
    def engine(self) -> "EngineKey":
        """Cases with equal keys share an engine."""
        return self.implementation, self.session, self.options, self.versions

    @classmethod
    def of(cls, item: pytest.Item) -> "Case | None":
        mark = item.get_closest_marker("streams")
        if mark is None:
            return None
        parameters = getattr(getattr(item, "callspec", None), "params", {})

        def filled(text: str | None) -> str:
            for name, value in parameters.items():
                text = str(text).replace(f"<{name}>", str(value))
            return str(text)

        schema = _schema(item.name)
        rules, source, target, options = mark.args
        values = ((name, filled(value)) for name, value in sorted(options.items()))
        return cls(
            schema,
            _in_schema(filled(rules), schema),
            filled(source),
            filled(target),
            tuple((name, value) for name, value in values if value != "None"),
            parameters.get("implementation"),
            parameters.get("hostile_session"),
            (since(item, version_of_tests()), since(item, version_of_targets())),
        )


def _schema(name: str) -> str:
    """Return a name that no other test of its module has, within the length of an identifier."""
    words = re.sub(r"\W+", "_", name.lower())
    return words if words == name and len(words) < 60 else f"{words[:40]}_{_hash(name)}"


def _hash(name: str) -> str:
    return f"{zlib.crc32(name.encode()):08x}"


def _in_schema(rules: str, schema: str) -> dict[str, Any]:
    """Return rules by the full names of their tables, which are in *schema* on both sides."""
    return {
        f"{schema}.{name}": {**(rule or {}), "target": f"{schema}.{_target_of(name, rule)}"}
        for name, rule in yaml.safe_load(rules).items()
    }


def _target_of(name: str, rule: dict[str, Any] | None) -> str:
    return str((rule or {}).get("target", name))


class OwnSchema(Database):
    """A database whose sessions search the schema of a test first."""

    def __init__(self, whole: Database, schema: str) -> None:
        super().__init__(whole.server, whole.name)
        self.keeps_connections = True
        self.schema = schema
        self.path = whole.path

    def connect(self) -> Connection:
        return psycopg.connect(
            self.server.url(self.name),
            autocommit=True,
            prepare_threshold=None,
            options=f"-c search_path={self.schema},{self.path}".replace(", ", ","),
        )


class Shared(Streamer):
    """The shared engine, limited to the tables of the running test."""

    source: Database
    target: Database

    def __init__(
        self, path: Path, databases: tuple[Database, Database], name: str, cases: list[Case]
    ) -> None:
        self.databases = databases
        self._name = name
        self._options = cases[0].options
        self._rules: dict[str, Any] = {}
        for case in cases:
            self._rules |= case.rules
        self._write(path)
        super().__init__(path)
        self._case: Case | None = None

    def _write(self, path: Path) -> None:
        tables = yaml.safe_dump(self._rules, width=10**6)
        options: dict[str, Any] = dict(self._options)
        write_config(path, *self.databases, tables, database=self._name, **options)

    async def change(self, rules: str) -> None:
        """Replace the rules of this test's tables, as an operator edits the configuration.

        Raises StreamerError for invalid rules, and keeps the former rules then.
        """
        assert self._case is not None
        case = dataclasses.replace(self._case, rules=_in_schema(rules, self._case.schema))
        other_rules = {name: rule for name, rule in self._rules.items() if name not in self.tables}
        former = self._rules, self.settings, self.mapping
        self._rules = other_rules | case.rules
        self._write(self.path)
        try:
            await self.apply()
        except StreamerError:
            self._rules, self.settings, self.mapping = former
            self._write(self.path)
            raise
        self._case = case

    @contextlib.contextmanager
    def show(self, case: Case) -> Iterator[None]:
        self._case = case
        self.source, self.target = (OwnSchema(whole, case.schema) for whole in self.databases)
        try:
            yield
        finally:
            self.source.close()
            self.target.close()

    def own(self, table: str) -> str:
        """Return the full name of a table of this test."""
        assert self._case is not None
        schema = f"{self._case.schema}."
        return schema + table.removeprefix(schema).removeprefix("public.")

    def captured(self, columns: str = "changes") -> list[tuple[object, ...]]:
        """Return *columns* of the captured commands of this test's tables, in order."""
        return self.target.execute(
            f"select {columns} from streamer.ddl where relation_id in (select id"
            f" from streamer.relation where starts_with(source, '{self.source.schema}.'))"
            " order by id"
        )

    @property
    def capture(self) -> str:
        """The schema of the capture at the source."""
        return f"streamer_{self._name}"

    @property
    def tables(self) -> tuple[str, ...]:
        """The full names of the tables of this test."""
        assert self._case is not None
        return tuple(self._case.rules)

    @property
    def scope(self) -> Scope:
        return Scope(self.tables)

    async def statuses(self) -> list[dict[str, Any]]:
        """Return the status of the only source, with the tables of this test."""
        assert self._case is not None
        (source,) = await super().statuses()
        prefix = f"{self._case.schema}."
        tables = [table for table in source["tables"] if table["source"].startswith(prefix)]
        return [{**source, "tables": tables}]

    async def table(self, name: str) -> dict[str, Any]:
        return await super().table(self.own(name))

    async def table_state(self, name: str, state: str, *arguments: Any) -> None:
        await super().table_state(self.own(name), state, *arguments)

    async def ask(self, action: str, table: str = "t", **options: Any) -> None:
        await super().ask(action, self.own(table), **options)

    async def decide(self, action: str, table: str = "t", *arguments: Any) -> None:
        await super().decide(action, self.own(table), *arguments)


@dataclasses.dataclass
class Engines:
    """The engines of one module."""

    stack: contextlib.AsyncExitStack
    started: dict[EngineKey, Shared] = dataclasses.field(default_factory=dict)
    _numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def start(self, servers: tuple[Server, Server], directory: Path, cases: list[Case]) -> Shared:
        """Start the engine of *cases*, whose keys are equal. *servers*: of the source, and of the
        target.
        """
        of_source, of_target = servers
        source = self.stack.enter_context(database(of_source, "source"))
        target = self.stack.enter_context(target_database(of_target))
        if (settings := cases[0].session) is not None:
            give(SESSIONS[settings], source, target)
        for case in cases:
            for db, sql in ((source, case.source), (target, case.target)):
                db.execute(f"create schema {case.schema}")
                session = OwnSchema(db, case.schema)
                if sql:
                    session.execute(sql)
                session.close()
        # Names of slots contain this name: the server also has slots of further tests.
        name = f"shared{next(self._numbers)}"
        engine = Shared(directory / "config.yaml", (source, target), name, cases)
        self.started[cases[0].engine] = engine
        engine.start()
        self.stack.push_async_callback(engine.stop)
        return engine

    async def stop(self, key: EngineKey) -> None:
        """Stop an engine, because an idle engine takes a hundredth of a processor."""
        if (engine := self.started.pop(key, None)) is not None:
            await engine.stop()

    async def stop_all(self) -> None:
        for key in list(self.started):
            await self.stop(key)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In a module with a shared engine, order the tests without the engine first. A process that
    steals tests from a second process can run the tests in a different order. The engine then
    stops, and starts again for the next test that needs the engine.
    """
    sharing = {item.path for item in items if _shares(item)}
    places: dict[Path, list[int]] = {path: [] for path in sharing}
    for place, item in enumerate(items):
        if item.path in sharing:
            places[item.path].append(place)
            names: list[str] = item.fixturenames  # type: ignore[attr-defined]
            # All parameter sets of a test function share this list.
            if not _shares(item) and "no_engine_runs" not in names:
                names.insert(0, "no_engine_runs")
    for of_module in places.values():
        in_order = sorted((items[place] for place in of_module), key=_shares)
        for place, item in zip(of_module, in_order, strict=True):
            items[place] = item


def _shares(item: pytest.Item) -> bool:
    return item.get_closest_marker("streams") is not None


@pytest_asyncio.fixture(loop_scope="module")
async def no_engine_runs(engines: "Engines") -> None:
    await engines.stop_all()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines() -> AsyncIterator[Engines]:
    async with contextlib.AsyncExitStack() as stack:
        copy_with_threads(stack.enter_context(pytest.MonkeyPatch.context()))
        yield Engines(stack)


@pytest_asyncio.fixture(loop_scope="module")
async def shared(
    request: pytest.FixtureRequest,
    engines: Engines,
    servers: Callable[[str], Server],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Shared]:
    """Return the engine that this test shares with the tests of an equal key."""
    case = Case.of(request.node)
    assert case is not None, "a test that shares an engine says its tables with `streams`"
    items = [item for item in request.session.items if item.path == request.node.path]
    engine = engines.started.get(case.engine)
    if engine is None:
        cases = [
            candidate
            for item in items
            if (candidate := Case.of(item)) and candidate.engine == case.engine
        ]
        directory = tmp_path_factory.mktemp("shared")
        of_source, of_target = map(servers, case.versions)
        engine = engines.start((of_source, of_target), directory, cases)
    with engine.show(case):
        yield engine
    later = map(Case.of, items[items.index(request.node) + 1 :])
    if not any(candidate.engine == case.engine for candidate in later if candidate):
        await engines.stop(case.engine)
