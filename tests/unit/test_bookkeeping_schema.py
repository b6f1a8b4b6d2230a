"""The objects of the bookkeeping, which `teardown` drops."""

import re
from pathlib import Path

from streamer.bookkeeping.bookkeeping_schema import read_objects

MIGRATIONS = Path(__file__).parents[2] / "migrations"


def test_teardown_knows_every_object_of_the_migrations() -> None:
    sql = "\n".join(path.read_text(encoding="utf-8") for path in MIGRATIONS.glob("target/*.sql"))
    made = re.findall(r"\bcreate (?:[a-z ]+ )?(\w+) (streamer\.\w+)", sql)
    known = {(kind, name) for kind, names in read_objects().items() for name in names}
    assert known == set(made) | {("table", "streamer.migration")}


def test_migrations_are_ascii() -> None:
    """A database of any encoding accepts the migrations, comments included."""
    files = list(MIGRATIONS.glob("*/*.sql"))
    assert len(files) > 1
    assert [path.name for path in files if not path.read_bytes().isascii()] == []
