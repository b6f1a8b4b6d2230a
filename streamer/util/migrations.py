"""Reads the SQL files of `migrations/`, in a checkout or in a wheel."""

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

_NAME = re.compile(r"(\d{4})_(\w+)\.sql")
_NEEDS = re.compile(r"-- needs: (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Migration:
    """A file of SQL, applied in a transaction together with the record of the migration."""

    number: int
    name: str
    sql: str

    @property
    def needs(self) -> int:
        """The newest migration that a program must know to run on the migrated schema.

        The first line of the file names that migration, as in ``-- needs: 3``. Without this line,
        only programs that know the migration itself run on the schema.
        """
        line = _NEEDS.match(self.sql)
        return self.number if line is None else int(line[1])


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
