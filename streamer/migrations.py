"""Where the SQL files of `migrations/` are, in a checkout or in a wheel, and their names."""

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

_NAME = re.compile(r"(\d{4})_(\w+)\.sql")


@dataclass(frozen=True, slots=True)
class Migration:
    """One file of SQL, applied in one transaction together with the record that it was."""

    number: int
    name: str
    sql: str


@cache
def read_migrations(kind: str) -> list[Migration]:
    """Return the migrations of *kind*, ``target`` or ``admin``, in order. Reads files once."""
    return [
        Migration(int(match[1]), match[2], path.read_text(encoding="utf-8"))
        for path in sorted(_directory(kind).iterdir())
        if (match := _NAME.fullmatch(path.name))
    ]


def _directory(kind: str) -> Path:
    package = Path(str(files("streamer")))
    shipped = package / "migrations"
    return (shipped if shipped.is_dir() else package.parent / "migrations") / kind
