"""Panels, options and arguments that several commands share, and shell completion."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Final

import typer

from streamer.cli.terminal import GLOBALS
from streamer.errors.error_classes import StreamerError

if TYPE_CHECKING:
    from streamer.mapping.rules import Mapping


def _completing(names: "Callable[[Mapping], Iterable[str]]") -> Callable[..., list[str]]:
    """Return a completion of names in the configuration, empty without a readable file."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        from streamer.config import static_mapping

        path = ctx.find_root().params.get("config") or GLOBALS.config
        try:
            _, mapping = static_mapping.load(path, {})
        except StreamerError:
            return []
        return sorted({name for name in names(mapping) if name.startswith(incomplete)})

    return complete


def _table_names(mapping: "Mapping") -> Iterable[str]:
    for source in mapping.sources:
        for rule in source.rules:
            if not rule.pattern.is_pattern:
                yield str(rule.pattern).removeprefix("public.")


STREAM: Final = "Stream"
MAPPING: Final = "Mapping"
TABLES: Final = "Tables"
INCIDENTS: Final = "Incidents"
ACCESS: Final = "Access"
PANELS: Final = (STREAM, MAPPING, TABLES, INCIDENTS, ACCESS)
"""Groups of commands, in the order of the help."""


def example(*commands: str) -> str:
    """Return the last line of a command's help."""
    return f"Example: {'; '.join(commands)}"


UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url", help="Address of the process to ask, such as http://127.0.0.1:8000.", metavar="URL"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NoWaitOption = Annotated[
    bool,
    typer.Option("--no-wait", help="Print the id of the request, and do not wait for its outcome."),
]
DatabaseOption = Annotated[
    str | None,
    typer.Option(
        help="Only this database.",
        autocompletion=_completing(lambda mapping: (s.database for s in mapping.sources)),
    ),
]
SidOption = Annotated[
    str | None,
    typer.Option(
        help="Only the source with this sid, or the tables whose rows have this sid.",
        autocompletion=_completing(lambda mapping: (s.sid for s in mapping.sources if s.sid)),
    ),
]
TableFilterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--table",
        help="Only this source table: a name or a pattern; repeatable.",
        metavar="TABLE",
        autocompletion=_completing(_table_names),
    ),
]
ProblemsOption = Annotated[
    bool, typer.Option("--problems", help="Only sources and tables that have a problem.")
]
TableArgument = Annotated[
    str,
    typer.Argument(
        help="Source table, or a pattern such as '*.*'.",
        metavar="TABLE",
        autocompletion=_completing(_table_names),
    ),
]
WhereOption = Annotated[
    str | None,
    typer.Option(help="Compare only rows for which this SQL condition is true.", metavar="EXPR"),
]
CompareTimeoutOption = Annotated[
    float,
    typer.Option(
        help="Seconds to keep reading a row that differs before leaving it undecided.",
        min=1,
    ),
]
