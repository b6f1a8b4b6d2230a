"""The list of the bookkeeping's tables, by which `teardown` drops them."""

import re
from pathlib import Path

from streamer.progress.schema import FUNCTIONS, TABLES

MIGRATIONS = Path(__file__).parents[2] / "migrations"


def test_every_table_and_function_of_the_migrations_is_listed() -> None:
    sql = "\n".join(path.read_text(encoding="utf-8") for path in MIGRATIONS.glob("target/*.sql"))
    tables = set(re.findall(r"^create table streamer\.(\w+)", sql, re.MULTILINE))
    functions = set(re.findall(r"^create function streamer\.(\w+)", sql, re.MULTILINE))

    assert tables | {"migration"} == set(TABLES)
    assert functions == set(FUNCTIONS)


def test_migrations_are_ascii() -> None:
    """A database of any encoding takes them, and their comments."""
    files = list(MIGRATIONS.glob("*/*.sql"))
    assert len(files) > 1
    assert [path.name for path in files if not path.read_bytes().isascii()] == []
