"""The tree keeps its shape: imports go down, deciding modules stay pure, errors are not swallowed.

The tests read syntax trees, without imports and comments.
"""

import ast
import gc
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from tests.support import prose, remedies
from tests.support.runbooks import read_blocks, read_commands, read_run

ROOT = Path(__file__).parent.parent
LINES_MAX = 800


@pytest.fixture(autouse=True, scope="module")
def _no_collection() -> Iterator[None]:
    """Python 3.11 cannot parse while a collected object prints a traceback, because printing parses
    too. To collect a million nodes also takes a third of the time.
    """
    gc.collect()
    gc.disable()
    yield
    prose.nodes.cache_clear()
    gc.enable()


def last_name(node: ast.expr) -> str | None:
    """Return ``sleep`` of ``sleep`` and ``asyncio.sleep``; unparsing every node takes longer."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


@dataclass(frozen=True)
class Import:
    """An import of *module*, or of a name of that module. ``for_types``: only type checkers run it."""

    module: str
    for_types: bool


@dataclass(frozen=True)
class Module:
    """A file of ours. ``name``: the name for imports, without ``streamer.``."""

    path: Path
    name: str

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def tree(self) -> ast.Module:
        tree = self.nodes[0]
        assert isinstance(tree, ast.Module)
        return tree

    @property
    def nodes(self) -> list[ast.AST]:
        return prose.nodes(self.path)

    @property
    def docstring(self) -> str | None:
        return ast.get_docstring(self.tree)

    @property
    def part(self) -> str:
        """The folder of the module, or the module itself without a folder."""
        return self.name.split(".")[0]

    @cached_property
    def imports(self) -> list[Import]:
        return list(_imports(self.tree, for_types=False))


def _imports(node: ast.AST, *, for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, for_types) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            assert child.module is not None
            for alias in child.names:
                # `from streamer import session` names a module, `from streamer.postgres.quoting
                # import x` not.
                inner = f"{child.module}.{alias.name}"
                is_module = inner.removeprefix("streamer.") in NAMES
                yield Import(inner if is_module else child.module, for_types)
        elif isinstance(child, ast.If) and last_name(child.test) == "TYPE_CHECKING":
            yield from _imports(child, for_types=True)
        elif not isinstance(child, ast.expr):
            yield from _imports(child, for_types=for_types)


def _modules() -> Iterator[Module]:
    for path in sorted((ROOT / "streamer").rglob("*.py")):
        parts = path.relative_to(ROOT / "streamer").with_suffix("").parts
        yield Module(path, ".".join(parts).removesuffix("__init__").removesuffix("."))


PURE = {
    "decode.pgoutput",
    "decode.transactions",
    "decode.tuples",
    "schema.source_definition",
    "mapping.disjoint_keys",
    "mapping.expressions",
    "mapping.allowed_functions",
    "mapping.relation_names",
    "schema.indexes_constraints_types",
    "mapping.rule_options",
    "control.resync_options",
    "mapping.rules",
    "apply.rows.binary_transfer",
    "apply.rows.fold",
    "apply.lanes.lane_transaction",
    "apply.rows.make_plan",
    "apply.rows.apply_plan",
    "apply.rows.copydata",
    "schema_changes.translate.definition_translator",
    "apply.sql.computed_statements",
    "schema_changes.translate.object_translator",
    "apply.sql.set_statements",
    "schema_changes.translate.type_translator",
    "apply.sql.wide_rows",
    "compare.build_compared_table",
    "compare.row_hashes",
    "compare.judge_keys",
    "compare.cut_ranges",
    "compare.compared_table",
    "control.table_state",
    "control.progress_tracker",
    "runtime.session.dispatcher",
    "source.history_check",
    "copy.copy_query",
    "copy.copy_queue",
    "copy.swap_rows",
    "copy.parts.ctid_ranges",
    "copy.automatic_waits",
    "postgres.quoting",
    "postgres.row_values",
    "postgres.sqlstate",
    "errors.command_lines",
    "util.quantities",
}
"""Modules that decide, with all their imports. A module outside this list may call itself alone
pure.
"""

MODULES = list(_modules())
NAMES = {module.name: module for module in MODULES}


def own_imports(module: Module, *, with_types: bool = True) -> set[str]:
    """Return the modules of ours that *module* imports."""
    return {
        found.module.removeprefix("streamer").removeprefix(".")
        for found in module.imports
        if found.module.split(".")[0] == "streamer" and (with_types or not found.for_types)
    }


def outside_imports(module: Module) -> set[str]:
    """Return the foreign packages that *module* imports at run time."""
    return {found.module.split(".")[0] for found in module.imports if not found.for_types}


def says_pure(module: Module) -> bool:
    return re.search(r"\bpure\.$", module.docstring or "", re.IGNORECASE | re.MULTILINE) is not None


def test_the_tree_was_found() -> None:
    assert set(NAMES) >= PURE
    assert own_imports(NAMES["mapping.rules"]) == {
        "errors.error_classes",
        "mapping.expressions",
        "mapping.relation_names",
        "mapping.row_sid",
        "mapping.rule_options",
        "mapping.sid_and_history_columns",
        "mapping.time_partitions",
        "postgres.keyed_hash",
        "postgres.secret",
    }
    assert "asyncpg" in outside_imports(NAMES["target.connection"])


# ---- which way imports point -------------------------------------------------------------------

LAYERS = [
    {"", "errors"},
    {"util", "compiled"},
    {"postgres"},
    {"decode", "mapping"},
    {"control", "schema"},
    {"report"},
    {"source", "target", "config", "observability"},
    {"bookkeeping"},
    {"apply"},
    {"schema_changes"},
    {"drain", "copy", "indexes"},
    {"compare"},
    {"runtime"},
    {"commands"},
    {"admin"},
    {"cli"},
    {"__main__"},
]
"""From below; a module imports from its own folder and from lower layers."""


def layer(part: str) -> int:
    found = [number for number, parts in enumerate(LAYERS) if part in parts]
    assert len(found) == 1, f"{part!r} is in no layer"
    return found[0]


def test_imports_go_down() -> None:
    wrong = set()
    for module in MODULES:
        for name in own_imports(module):
            part = name.split(".")[0]
            if part != module.part and layer(part) >= layer(module.part):
                wrong.add((module.name, name))
    assert wrong == set()


def test_no_module_needs_itself() -> None:
    """Imports for types are allowed, because they do not run."""
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' → '.join((*path, name))}"
        assert name in NAMES, f"{path[-1]} imports {name}, which is not there"
        if name not in done:
            for imported in own_imports(NAMES[name], with_types=False):
                visit(imported, (*path, name))
            done.add(name)

    for module in MODULES:
        visit(module.name, ())


# ---- what is pure, and who speaks to servers ---------------------------------------------------

IMPURE = {
    *("asyncio", "threading", "subprocess", "socket", "time", "logging", "structlog"),
    *("psycopg", "asyncpg", "aiosqlite", "pyspark"),
}
DRIVERS = {
    "asyncpg": {"target.connection", "target.driver_errors"},
    "pyspark": {
        *("copy.spark.job", "copy.spark.start", "copy.spark.spark_worker"),
        *("compare.parquet_report", "compare.spark_program"),
    },
    # Beside source/ and copy/: libpq defines connection strings, so libpq reads connection strings.
    # psycopg knows the binary formats. Commands speak to servers for a person, not for the stream.
    "psycopg": {
        *("source", "copy", "compare", "commands"),
        *("postgres.conninfo", "postgres.binary_values"),
    },
    # An extra of the distribution, which a process imports only if a setting asks for it.
    "opentelemetry": {"observability.opentelemetry_export"},
    "aiosqlite": {"admin.mapping.mapping_rows", "admin.mapping.admin_store"},
}
PARSERS = {"postgres.conninfo": {"psycopg"}, "postgres.binary_values": {"psycopg"}}
"""Pure modules that use a driver to parse a string or a value."""


def reached(module: Module) -> Iterator[Module]:
    """Yield *module* and every module of ours that its import runs."""
    seen: set[str] = set()
    waiting = [module.name]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            yield NAMES[name]
            waiting += own_imports(NAMES[name], with_types=False)


@pytest.mark.parametrize("name", sorted(PURE))
def test_pure_modules_reach_no_server_no_loop_and_no_clock(name: str) -> None:
    for needed in reached(NAMES[name]):
        impure = outside_imports(needed) & IMPURE
        assert not impure, f"{needed.name} imports {', '.join(sorted(impure))}"


def test_a_module_that_calls_itself_pure_is() -> None:
    used = {m.name: outside_imports(m) & IMPURE for m in MODULES if says_pure(m)}
    assert {name: impure for name, impure in used.items() if impure} == PARSERS


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_driver_is_used_where_its_errors_are_translated(driver: str) -> None:
    users = {module.name for module in MODULES if driver in outside_imports(module)}
    allowed = DRIVERS[driver]
    assert {name if name in allowed else name.split(".")[0] for name in users} == allowed


# ---- errors ------------------------------------------------------------------------------------

CATCH_ALL = {"Exception", "BaseException", "ExceptionGroup", "BaseExceptionGroup"}
SWALLOWS = {
    # The last net of a command: one line for people, the rest for debugging.
    "cli.terminal": 1,
    # A separate process, which reports to its parent over a pipe.
    "copy.spark.job": 2,
    # The separate process of a comparison without Spark.
    "compare.local_program": 1,
    # Tasks and a thread report any failure of a relation in one form.
    "copy.parts.part_copier": 2,
    # A thread, whose caller gets the error.
    "util.waiting": 1,
    # The last spans, without which the process ends as well.
    "observability.opentelemetry_export": 1,
}


def catches_all(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    return any(isinstance(n, ast.Name) and n.id in CATCH_ALL for n in ast.walk(handler.type))


def test_whoever_catches_everything_raises_it_again() -> None:
    """Apart from the places above; cleanup handlers may catch any exception and raise it again."""
    swallowing: dict[str, int] = {}
    for module in MODULES:
        for node in module.nodes:
            if isinstance(node, ast.ExceptHandler) and catches_all(node):
                if not isinstance(node.body[-1], ast.Raise):
                    swallowing[module.name] = swallowing.get(module.name, 0) + 1
            elif isinstance(node, ast.Call) and last_name(node.func) == "suppress":
                assert not CATCH_ALL & {ast.unparse(argument) for argument in node.args}, (
                    f"{module.name}:{node.lineno} suppresses everything"
                )
    assert swallowing == SWALLOWS


# ---- each file ---------------------------------------------------------------------------------

NAMELESS = {"utils", "common", "helpers", "types", "base", "manager"}


def test_a_module_says_what_it_is_for() -> None:
    assert [module.name for module in MODULES if not module.docstring] == []


def test_a_module_can_be_read_at_one_sitting() -> None:
    sizes = {module.name: len(module.text.splitlines()) for module in MODULES}
    assert {name: size for name, size in sizes.items() if size > LINES_MAX} == {}


def test_nothing_is_printed_past_the_log() -> None:
    printed = [
        f"{module.name}:{node.lineno}"
        for module in MODULES
        for node in module.nodes
        if isinstance(node, ast.Name) and node.id in ("print", "pprint", "breakpoint")
    ]
    assert printed == []


def test_no_string_stands_alone() -> None:
    """A string that is a statement is a docstring, or the rest of one after a line break."""
    alone = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for top in ("streamer", "tests", "scripts", "benchmarks")
        for path in sorted((ROOT / top).rglob("*.py"))
        for lines in [path.read_bytes().splitlines()]
        for node in prose.nodes(path)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.JoinedStr | ast.Constant)
        and node.value.__dict__.get("value") is not ...
        and b'"""' not in lines[node.lineno - 1][node.col_offset : node.col_offset + 4]
    ]
    assert alone == []


def test_nothing_is_left_for_later_in_a_comment() -> None:
    later = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")
    assert [module.name for module in MODULES if later.search(module.text)] == []


def test_a_package_re_exports_nothing() -> None:
    packages = [module for module in MODULES if module.path.name == "__init__.py"]
    assert [module.name for module in packages if module.imports] == []


EVERYDAY = {"settle", "look", "know", "bring", "brake", "trouble", "declare", "landmark", "survey"}


def test_functions_and_classes_are_named_for_their_acts() -> None:
    named = [
        f"{module.name}.{node.name}"
        for module in MODULES
        for node in module.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and EVERYDAY & {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", node.name)}
    ]
    assert named == []


def test_a_module_is_named_for_what_it_holds() -> None:
    nameless = {module.name for module in MODULES if module.name.split(".")[-1] in NAMELESS}
    assert nameless == set()


# ---- bookkeeping -------------------------------------------------------------------------------

TABLES = {
    "compared_range": {"bookkeeping.comparisons", "bookkeeping.task_statements"},
    "comparison": {"bookkeeping.comparisons"},
    "conflict": {"bookkeeping.stored_conflicts"},
    "cutover": {"bookkeeping.cutovers"},
    "ddl": {"bookkeeping.ddl_records"},
    "deferred_index": {"bookkeeping.deferred_indexes"},
    "definition": {"bookkeeping.planned_definitions"},
    "former_relation": {"bookkeeping.unmapped_relations"},
    "held": {"bookkeeping.held_changes"},
    "installation": {"bookkeeping.bookkeeping_schema"},
    "mapping": {"bookkeeping.replicas"},
    "migration": {"bookkeeping.bookkeeping_schema", "bookkeeping.schema_version"},
    "minute": {"bookkeeping.minutes"},
    "notification": {"bookkeeping.notified_problems"},
    "purge": {"bookkeeping.purges"},
    "quarantine": {"bookkeeping.quarantined_changes"},
    "relation": {
        "bookkeeping.copies",
        "bookkeeping.positions",
        "bookkeeping.registered_relations",
        "bookkeeping.relation_columns",
        "bookkeeping.relation_definitions",
        "bookkeeping.relation_states",
        "bookkeeping.relation_records",
        "bookkeeping.taken_requests",
        "bookkeeping.unmapped_relations",
    },
    "replica": {"bookkeeping.replicas"},
    "request": {"bookkeeping.requests"},
    "script": {"bookkeeping.scripts"},
    "sequence": {"bookkeeping.followed_sequences"},
    # The proof that a connection is on the server of a claim is part of the connection.
    "source": {"bookkeeping.positions", "bookkeeping.sources", "target.fencing_token"},
    "sync_partition": {"bookkeeping.copied_parts", "bookkeeping.task_statements"},
    "verification": {"bookkeeping.verifications"},
}
"""The modules of a bookkeeping table, whose SQL alone writes to the table. A query that joins
tables stands in a module of one of these tables.
"""
MENTION = re.compile(
    r"\b(from|join|using|into|update|table)\s+streamer\.(\w+)|[,:]\s*streamer\.(\w+)", re.IGNORECASE
)


def statements(module: Module) -> Iterator[str]:
    """Yield the strings of *module* that may be SQL."""
    prose_of = {id(node.value) for node in module.nodes if isinstance(node, ast.Expr)}
    for node in module.nodes:
        if isinstance(node, ast.JoinedStr):
            prose_of.update(map(id, node.values))
            yield "".join(str(v.value) for v in node.values if isinstance(v, ast.Constant))
    for node in module.nodes:
        if isinstance(node, ast.Constant) and id(node) not in prose_of:
            yield str(node.value)


def test_only_the_modules_of_the_bookkeeping_have_sql_on_it() -> None:
    homes = set().union(*TABLES.values())
    foreign = set()
    for module in MODULES:
        for statement in statements(module):
            for match in MENTION.finditer(statement):
                verb, table = (match[1] or "").lower(), match[2] or match[3]
                is_deleted = statement[: match.start()].rstrip().endswith("delete")
                is_written = is_deleted or verb in ("into", "update")
                if module.name not in (TABLES[table] if is_written else homes):
                    foreign.add((module.name, table))
    assert foreign == set()


def test_one_module_asks_which_session_blocks_another() -> None:
    asking = {m.name for m in MODULES for sql in statements(m) if "pg_blocking_pids" in sql}
    assert asking == {"postgres.blocking_sessions"}


def test_every_bookkeeping_table_has_a_module() -> None:
    sql = "".join(path.read_text() for path in (ROOT / "migrations/target").glob("*.sql"))
    made = set(re.findall(r"create table streamer\.(\w+)", sql))
    assert made | {"migration"} == set(TABLES)
    named = set().union(*TABLES.values())
    assert named <= set(NAMES)


# ---- remedies ----------------------------------------------------------------------------------


def test_every_remedy_has_a_test_that_follows_it() -> None:
    places = {*remedies.read_places(), *read_blocks()}
    followed = set(remedies.read_followed())
    assert followed <= places, "a test follows the remedy of a place that is gone"
    assert places <= followed, "mark the test that runs it: @pytest.mark.follows(PLACE)"


def test_a_test_runs_every_block_of_commands_of_a_page() -> None:
    """A block that no test runs has the language ``shell`` in place of ``sh``."""
    assert read_run() == set(read_commands())


def test_the_catalogue_finds_the_places_of_all_kinds_of_steps() -> None:
    makers = {maker for calls in remedies.read_places().values() for maker in calls}
    assert makers == remedies.MAKERS


# ---- prose -------------------------------------------------------------------------------------

HIDDEN_ACTORS_MAX = 1.0
PASSIVES_MAX = 8.0
PASSIVES_OF_TESTS_MAX = 20.0
"""Per thousand words of a room. psycopg's own prose has 14 passives without an actor by the same
measure. A test describes the fate of an object, so its docstring may have more passives.
"""
ROOMS = sorted(prose.rooms())
LIST_THEM = "to list them: .venv/bin/python -m tests.support.prose FOLDER; CONTRIBUTING.md, Prose"


@pytest.mark.parametrize("room", ROOMS)
def test_sentences_are_short(room: str) -> None:
    long = [str(sentence) for sentence in prose.prose_of_room(room) if sentence.is_long]
    assert not long, "\n".join([LIST_THEM, *long])


@pytest.mark.parametrize("room", ROOMS)
def test_sentences_name_their_actors(room: str) -> None:
    found = prose.prose_of_room(room)
    hidden = sum(sentence.hidden_actors for sentence in found)
    passives = sum(sentence.passives for sentence in found)
    passives_max = PASSIVES_OF_TESTS_MAX if room.startswith("tests") else PASSIVES_MAX

    assert prose.per_thousand_words(hidden, found) <= HIDDEN_ACTORS_MAX, LIST_THEM
    assert prose.per_thousand_words(passives, found) <= passives_max, LIST_THEM


RATES = {"pronouns": 26.8, "one": 6.4, "other": 2.8, "nothing": 1.0}
"""Words that stand for a noun, and their greatest number per thousand words of a room.

These are twice the rates of psycopg, procrastinate, patroni and dlt.
"""


@pytest.mark.parametrize("kind", RATES)
@pytest.mark.parametrize("room", ROOMS)
def test_sentences_name_their_objects(room: str, kind: str) -> None:
    words, sentences = prose.STANDING_FOR_NOUNS[kind], prose.prose_of_room(room)
    count = sum(sentence.count(words) for sentence in sentences)
    rate = prose.per_thousand_words(count, sentences)
    assert rate <= RATES[kind], LIST_THEM


# ---- tests -------------------------------------------------------------------------------------

SLEEPS = {"time.sleep", "asyncio.sleep"}
# The module that waits for conditions, and the module that imitates a slow network.
MAY_SLEEP = {"support/waiting.py", "support/proxy.py"}


def _lets_time_pass(node: ast.AST) -> bool:
    """Whether *node* sleeps. ``asyncio.sleep(0)`` only lets tasks run."""
    if isinstance(node, ast.ImportFrom):
        imported = {f"{node.module}.{alias.name}" for alias in node.names}
        return bool(imported & SLEEPS)
    return (
        isinstance(node, ast.Call)
        and last_name(node.func) == "sleep"
        and ast.unparse(node.func) in SLEEPS
        and ast.unparse(node.args[0]) != "0"
    )


def test_a_test_waits_for_a_condition_and_never_sleeps() -> None:
    tests = ROOT / "tests"
    found = {
        str(path.relative_to(tests))
        for path in tests.rglob("*.py")
        if "torture" not in path.parts and any(map(_lets_time_pass, prose.nodes(path)))
    }
    assert found == MAY_SLEEP


def test_a_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for module in MODULES:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module.name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


SAY_LITTLE = {"found", "there", "here", "its", "own", "each", "given", "known", "wanted"}


def test_a_local_name_says_what_its_value_is() -> None:
    wrong = [
        f"{module.name}:{node.lineno}: {node.id}"
        for module in MODULES
        for function in module.nodes
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in SAY_LITTLE
    ]
    assert not wrong, "\n".join(["a local name is a noun", *wrong])


# ---- commands in messages ----------------------------------------------------------------------

COMMAND_BEFORE = re.compile(
    r"\b(streamer (run|check|status|wait|doctor|import|export|apply|plan|resync|pause|resume|teardown"
    r"|quarantine \w+|sources \w+|tables \w+|users \w+)|chmod \d+|rm|mv)( --?[\w-]+)* $"
)


def test_a_name_in_a_command_for_the_shell_is_quoted() -> None:
    """`hints.command` and shlex quote names; an f-string with a command does not."""
    wrong = [
        f"{module.name}: {ast.unparse(node)}"
        for module in MODULES
        for node in module.nodes
        if isinstance(node, ast.JoinedStr)
        for before, value in zip(node.values, node.values[1:], strict=False)
        if isinstance(before, ast.Constant)
        and isinstance(value, ast.FormattedValue)
        and COMMAND_BEFORE.search(str(before.value))
        and "quote" not in ast.unparse(value)
    ]
    assert wrong == []
