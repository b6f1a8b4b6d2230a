"""The modules that commands import: an answer at once needs few."""

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.unit.test_help import COMMANDS

SERVERS = {"asyncpg", "psycopg", "pydantic_settings", "structlog", "yaml"}
"""Libraries of commands that read the configuration, and connect to servers."""
PAGE = {"aiosqlite", "argon2", "cryptography", "fastapi", "jinja2", "prometheus_client", "uvicorn"}
"""Libraries of the process that streams, with page and API."""
COPIES = {"pyspark", "py4j"}
RARE = {"httpx", "sqlglot"}
"""Libraries of some requests to the API, and of some mappings."""
LISTING = """
import atexit, sys
atexit.register(lambda: print("imported:", *sys.modules))
{statement}
"""
RUN = "from streamer.cli.main import main; sys.argv[1:] = {arguments!r}; main()"


def imports(statement: str) -> set[str]:
    """Return the modules of a process that runs *statement*."""
    ended = subprocess.run(
        [sys.executable, "-c", LISTING.format(statement=statement)],
        capture_output=True,
        text=True,
        check=False,
    )
    label, *names = ended.stdout.splitlines()[-1].split()
    assert label == "imported:", ended.stderr
    return set(names)


def own(names: set[str]) -> set[str]:
    return {name for name in names if name.partition(".")[0] == "streamer"}


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_the_program_describes_itself_without_its_libraries(option: str) -> None:
    names = imports(RUN.format(arguments=[option]))
    assert not names & (SERVERS | PAGE | COPIES | RARE | {"asyncio", "pydantic"})
    assert len(own(names)) <= 32


@pytest.mark.parametrize(("command", "most"), [("status", 162), ("wait", 162), ("check", 239)])
def test_a_command_about_sources_imports_neither_the_stream_nor_the_page(
    command: str, most: int, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    url = "url: postgresql://nobody@127.0.0.1:1/none"
    source = f"[{{database: shop, urls: [{{{url}}}], tables: {{orders: {{}}}}}}]"
    config.write_text(f"target: {{{url}}}\nsources: {source}\n")
    names = imports(RUN.format(arguments=["-c", str(config), command]))
    assert names >= SERVERS
    assert not names & (PAGE | COPIES | RARE)
    assert len(own(names)) <= most


def test_run_starts_spark_before_it_imports_the_stream_and_the_page() -> None:
    names = imports("import streamer.cli.run_command")
    assert "streamer.copy.spark.launcher" in names
    assert not names & (PAGE | COPIES | RARE)
    assert len(own(names)) <= 95


def test_run_imports_neither_spark_nor_the_libraries_of_some_requests() -> None:
    statement = "import streamer.admin.admin_server, streamer.runtime.process.engine"
    assert not imports(statement) & (COPIES | RARE)


def test_the_choices_of_an_option_are_those_of_the_command_class() -> None:
    from streamer.bookkeeping.scripts import ScriptSide
    from streamer.commands.cutover.cutover_steps import FinalComparison, StopWrites
    from streamer.config.settings import Role

    def choices(command: str, name: str) -> list[Any]:
        (option,) = [option for option in COMMANDS[command].params if option.name == name]
        return list(get_args(option.type_descriptor.annotation))

    assert choices("execute", "on") == list(ScriptSide)
    assert choices("cutover", "stop_writes") == list(StopWrites)
    assert choices("cutover", "compare") == list(FinalComparison)
    assert choices("users add", "role") == list(Role)
