"""Remedies as data: text for an operator, with commands and SQL as parts. Pure.

The code that raises an error builds the remedy. Views render the steps as lines to paste, and never
parse a sentence.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, Literal, Self, final

from streamer.errors.command_lines import command, need_resync

Side = Literal["source", "target"]


@final
@dataclass(frozen=True, slots=True)
class Command:
    """A command line to run beside streamer.

    ``action``, ``table``, ``options``: the parts of a streamer command about a table; the page has
    buttons for some commands.
    """

    line: str
    action: str | None = None
    table: str | None = None
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.line

    def to_json(self) -> dict[str, Any]:
        return {
            "command": self.line,
            "action": self.action,
            "table": self.table,
            "options": list(self.options),
        }


@final
@dataclass(frozen=True, slots=True)
class BlockingSession:
    """A session that blocks streamer. ``transaction``: the ID of its virtual transaction, which
    no later session with this pid has; None if unknown.
    """

    pid: int
    transaction: str | None = None
    may_end: bool = True
    """Whether the role of streamer may end the session."""


@final
@dataclass(frozen=True, slots=True)
class Sql:
    """Statements to run at a side. ``is_choice``: the statements end or remove an object that may
    still be in use. ``ended``: the sessions that streamer may end; the page has a button for each.
    ``database``: the database to run the statements in; None for the database of the side.
    """

    side: Side
    statements: tuple[str, ...]
    is_choice: bool = False
    ended: tuple[BlockingSession, ...] = ()
    database: str | None = None

    def __str__(self) -> str:
        return "; ".join(self.statements)

    def to_json(self) -> dict[str, Any]:
        return {
            "at": self.side,
            "database": self.database,
            "sql": list(self.statements),
            "pids": [session.pid for session in self.ended],
            "transactions": [session.transaction for session in self.ended],
        }


Step = Command | Sql


@final
@dataclass(frozen=True, slots=True)
class Remedy:
    """Text and steps, in reading order."""

    parts: tuple[str | Step, ...]

    @classmethod
    def of(cls, *parts: "str | Step | Remedy | None") -> Self:
        """Join *parts*; a remedy among the parts contributes its parts, and texts become one."""
        flat: list[str | Step] = []
        for part in parts:
            for piece in part.parts if isinstance(part, Remedy) else (part,):
                last = flat[-1] if flat else None
                if isinstance(piece, str) and isinstance(last, str):
                    flat[-1] = last + piece
                elif piece is not None and piece != "":
                    flat.append(piece)
        return cls(tuple(flat))

    @classmethod
    def given(cls, hint: "str | Remedy | None") -> "Remedy | None":
        """Return the hint of an error as a remedy."""
        return hint if isinstance(hint, Remedy) else cls.of(hint) if hint else None

    def __str__(self) -> str:
        return "".join(map(str, self.parts))

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(part for part in self.parts if not isinstance(part, str))

    @property
    def commands(self) -> tuple[Command, ...]:
        return tuple(step for step in self.steps if isinstance(step, Command))

    @property
    def sql(self) -> tuple[Sql, ...]:
        return tuple(step for step in self.steps if isinstance(step, Sql))

    def has(self, action: str) -> bool:
        """Whether a command of the remedy is that *action* of streamer."""
        return any(step.action == action for step in self.commands)

    def to_json(self) -> list[Any]:
        return [part if isinstance(part, str) else part.to_json() for part in self.parts]

    @classmethod
    def from_json(cls, stored: Any) -> "Remedy | None":
        """Read a remedy from the JSON of the bookkeeping or the API, if any."""
        return None if not stored else cls(tuple(map(_part, stored)))


def _part(stored: Any) -> str | Step:
    if isinstance(stored, str):
        return stored
    if "sql" in stored:
        pairs = zip_longest(stored.get("pids", ()), stored.get("transactions", ()))
        ended = tuple(BlockingSession(pid, transaction) for pid, transaction in pairs)
        statements, database = tuple(stored["sql"]), stored.get("database")
        return Sql(stored["at"], statements, ended=ended, database=database)
    options = tuple(stored.get("options", ()))
    return Command(stored["command"], stored.get("action"), stored.get("table"), options)


def run(
    action: str,
    table: str | None = None,
    *options: str,
    database: str | None = None,
    sid: str | None = None,
) -> Command:
    """Return the command of streamer for *action*: see `streamer.errors.command_lines.command`."""
    line = command(action, table, *options, database=database, sid=sid)
    return Command(line, action, table, options)


def at_source(*statements: str, is_choice: bool = False, database: str | None = None) -> Sql:
    return Sql("source", statements, is_choice, database=database)


def at_target(*statements: str, database: str | None = None) -> Sql:
    return Sql("target", statements, database=database)


def join_remedies(remedies: Iterable[Remedy]) -> Remedy | None:
    """Return *remedies* as alternatives or steps of one remedy; None if there are none."""
    parts: list[str | Remedy] = []
    for remedy in remedies:
        parts += ["; ", remedy]
    return Remedy.of(*parts[1:]) if parts else None


def then_resync(remedy: Remedy | None, resync: Remedy) -> Remedy:
    """Return *remedy* and then *resync*; *remedy* alone without steps: no change is lost then."""
    if remedy is None:
        return resync
    return Remedy.of(remedy, "; then ", resync) if remedy.steps else remedy


def end_blocking_sessions(sessions: Collection[BlockingSession]) -> Sql:
    """Return the SQL that ends *sessions* at the target."""
    statements = tuple(f"select pg_terminate_backend({session.pid})" for session in sessions)
    ended = tuple(session for session in sessions if session.may_end)
    return Sql("target", statements, ended=ended)


CONTINUES: Final = "streamer then continues by itself within 15 seconds"
"""What follows once an operator has removed the cause of a problem, without a command."""

EVERY_TABLE: Final = "*.*"
"""The pattern of a command about all tables of a source."""


def resync_source(
    tables: Iterable[object], *options: str, database: str, sid: str | None
) -> Remedy:
    """Return the remedy of an error that loses changes of *tables*, all of one source.

    *options*: the option that accepts a gap in the past of tables, if any table keeps its past.
    """
    again = run("resync", EVERY_TABLE, *options, database=database, sid=sid)
    gap = "; the past of history and append tables gets a gap" if options else ""
    return Remedy.of(f"{need_resync(tables)}{gap}; run: ", again)
