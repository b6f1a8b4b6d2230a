"""Sessions of an application whose settings must not matter to captured definitions.

The functions of the capture run in such sessions. A module marked ``hostile_sessions`` runs each
test under a set of settings that the test's name chooses, or under all sets if TEST_COMBINATIONS is
``all``. The databases of source and target get the settings, so every session of a test begins with
them, streamer's sessions included. For tests that share an engine (`tests.support.shared`), the name
of the module chooses.
"""

import contextlib
import os
import zlib
from collections.abc import Iterator

import pytest

from streamer.postgres.quoting import quote_identifier, quote_literal
from tests.support.postgres import Database

SESSIONS: dict[str, dict[str, str]] = {
    "plain": {},
    "german": {"timezone": "Europe/Berlin", "datestyle": "German, DMY", "lc_monetary": "C"},
    "sql": {
        "intervalstyle": "sql_standard",
        "datestyle": "SQL, MDY",
        "timezone": "America/Chicago",
    },
    "verbose": {"intervalstyle": "postgres_verbose", "bytea_output": "escape"},
    "coarse": {"extra_float_digits": "-15", "timezone": "Asia/Kolkata"},
    "quoting": {"quote_all_identifiers": "on", "intervalstyle": "iso_8601"},
    "old_strings": {"standard_conforming_strings": "off", "array_nulls": "on"},
    "repeatable": {"default_transaction_isolation": "repeatable read"},
    "searching": {"search_path": "public, pg_temp, pg_catalog", "row_security": "off"},
    "compiling": {
        "jit": "on",
        "jit_above_cost": "0",
        "jit_inline_above_cost": "0",
        "jit_optimize_above_cost": "0",
        "plan_cache_mode": "force_custom_plan",
        "enable_indexscan": "off",
        "enable_nestloop": "off",
    },
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not metafunc.definition.get_closest_marker("hostile_sessions"):
        return
    is_shared = metafunc.definition.get_closest_marker("streams") is not None
    names = list(SESSIONS)
    if os.environ.get("TEST_COMBINATIONS") != "all":
        module = metafunc.module.__name__.rpartition(".")[2].encode()
        test = metafunc.definition.name.encode()
        chosen = zlib.adler32(module) if is_shared else zlib.crc32(test)
        names = [names[chosen % len(names)]]
    metafunc.fixturenames.append("hostile_session")
    metafunc.parametrize("hostile_session", names, indirect=not is_shared)


@pytest.fixture
def hostile_session(request: pytest.FixtureRequest, source: Database, target: Database) -> None:
    """Give the databases of a test the settings of a session."""
    give(SESSIONS[request.param], source, target)


def give(settings: dict[str, str], *databases: Database) -> None:
    """Let each new session in *databases* begin with *settings*."""
    for db in databases:
        for name, value in settings.items():
            literal = value if name == "search_path" else quote_literal(value)
            db.execute(f"alter database {quote_identifier(db.name)} set {name} = {literal}")
        db.path = settings.get("search_path", "public")
        db.forget_sessions()


@contextlib.contextmanager
def hostile(settings: dict[str, str], db: Database) -> Iterator[None]:
    """For the length of a block, let each new session in *db* begin with *settings*."""
    give(settings, db)
    try:
        yield
    finally:
        db.execute(f"alter database {quote_identifier(db.name)} reset all")
        db.path = "public"
        db.forget_sessions()
