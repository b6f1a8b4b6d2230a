"""Command lines for hints and messages. Pure.

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
    return f"these tables need a resync: {', '.join(map(str, tables))}"
