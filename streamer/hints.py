"""Command lines for hints: the one way a command of ours gets into a message. Pure.

A database, sid or table may have any name, so every word is quoted for a POSIX shell.
"""

import shlex


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
