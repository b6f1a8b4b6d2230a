"""Command lines for hints and messages. Pure.

Any word can be the name of a database, sid or table, so every word is quoted for a POSIX shell.
"""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

# A name or a literal may hold any text; outside of them these words end the SQL.
_SQL: Final = re.compile(
    r"\brun (there|at the target|at the source): "
    r"""((?:"(?:[^"]|"")*"|'(?:[^']|'')*'"""
    r"""|(?!; (?:or|and|then|while|no)\b|, (?:and|or) (?:then|restart|make)\b| \(before )[^"'])+)"""
)
_STATEMENT: Final = re.compile(r"""(?:"(?:[^"]|"")*"|'(?:[^']|'')*'|[^;"'])+""")


@dataclass(frozen=True, slots=True)
class SqlRemedy:
    """Statements of a hint. ``place``: the server to run them at."""

    place: str
    statements: tuple[str, ...]


def find_sql(message: str) -> SqlRemedy | None:
    """Return the SQL that the hint in the *message* of a table's error tells an operator to run."""
    found = _SQL.search(message)
    if found is None or "…" in found[2]:  # an operator has to fill that in
        return None
    is_source = found[1] == "at the source" or message.startswith("source ")
    place = "at the source" if is_source else "at the target"
    statements = (each.strip() for each in _STATEMENT.findall(found[2]))
    return SqlRemedy(place, tuple(f"{each};" for each in statements if each))


def command(
    action: str,
    table: str | None = None,
    *options: str,
    database: str | None = None,
    sid: str | None = None,
) -> str:
    """Return the command line for *action* on a table of a source, ready to paste."""
    words = ["streamer", *action.split()]
    if table is not None:
        words.append(table)
    if database is not None:
        words += ["--database", database]
    if sid is not None:
        words += ["--sid", sid]
    return shlex.join([*words, *options])


def need_resync(tables: Iterable[object]) -> str:
    """Say that *tables* need a copy because changes of them are lost."""
    return f"these tables need a resync: {', '.join(map(str, tables))}"


def resync_source(tables: Iterable[object], *, database: str, sid: str | None) -> str:
    """Return the hint of an error that costs *tables*, all of one source, their changes."""
    return f"{need_resync(tables)}; run: {command('resync', '*.*', database=database, sid=sid)}"
