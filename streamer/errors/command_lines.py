"""Command lines and lists of names for hints and messages. Pure.

The name of a database, sid or table can be any text, so the functions quote each word for a POSIX
shell.
"""

import shlex
from collections.abc import Iterable


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
    """Return the hint that *tables* need a copy because changes are lost."""
    return f"these tables need a resync: {some_of(tables)}"


def some_of(names: Iterable[object], shown_max: int = 5) -> str:
    """List the first *names*, and the number of the rest."""
    texts = [str(name) for name in names]
    more = f" and {len(texts) - shown_max} more" if len(texts) > shown_max else ""
    return ", ".join(texts[:shown_max]) + more
