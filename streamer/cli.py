"""The command line: arguments in, exit code out.

Every command ends with 0 (done), 1 (what was asked about is not so), 2 (wrong usage or
configuration), 3 (a server cannot be reached or refuses) or 4 (an error that needs a person), and
says in one line on stderr what is wrong and what to do.
"""

import asyncio
import json
import sys
import traceback
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import typer
from rich.console import Console

from streamer import __version__
from streamer.apply.target import TargetAddress
from streamer.commands import indexes as indexes_command
from streamer.commands import quarantine as quarantine_command
from streamer.commands import requests as requests_command
from streamer.commands import run as run_command
from streamer.commands import status as status_command
from streamer.commands import teardown as teardown_command
from streamer.commands.check import command as check_command
from streamer.commands.demo import show as demo_command
from streamer.config import static
from streamer.errors import StreamerError
from streamer.lsn import Lsn
from streamer.observability import logs
from streamer.route.resync import Mode, Resync
from streamer.runtime.engine import StopCondition

T = TypeVar("T")

app = typer.Typer(
    name="streamer",
    help="Stream many PostgreSQL databases into one.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)


@dataclass(slots=True)
class Globals:
    """The options that stand before a command."""

    config: Path = Path("config.yaml")
    log_level: str = "info"
    log_format: logs.LogFormat = "text"
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def is_debugging(self) -> bool:
        return self.log_level == "debug"


_globals = Globals()


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"streamer {__version__}")
        raise typer.Exit


@app.callback()
def options(
    config: Annotated[Path, typer.Option("--config", "-c", help="The configuration file.")] = Path(
        "config.yaml"
    ),
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="What to log.")
    ] = "info",
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Lines for people or for machines.")
    ] = "text",
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Stream many PostgreSQL databases into one."""
    del version
    _globals.config = config
    _globals.log_level = log_level
    _globals.log_format = log_format
    logs.configure(log_level, log_format)


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"streamer: {logs.redact(message)}", err=True)
    raise typer.Exit(code)


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a command to its end; an error of ours becomes one line and an exit code."""
    try:
        return asyncio.run(coroutine)
    except StreamerError as exc:
        if _globals.is_debugging:
            traceback.print_exc()
        notes = "".join(f" ({note})" for note in getattr(exc, "__notes__", []))
        _fail(f"{exc}{notes}", exc.exit_code)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except Exception as exc:  # noqa: BLE001  # the last net: one line for people, the rest for debugging
        if _globals.is_debugging:
            traceback.print_exc()
        text = str(exc) or type(exc).__name__
        _fail(f"internal error: {type(exc).__name__}: {text}; --log-level debug shows where", 4)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def run(
    stop_at_lsn: Annotated[
        str | None, typer.Option(help="Apply everything up to this LSN, then exit.", metavar="LSN")
    ] = None,
    stop_when_caught_up: Annotated[
        bool, typer.Option(help="Apply everything committed until now, then exit.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Run these sources only.", metavar="DATABASE[:SID]"),
    ] = None,
) -> None:
    """Copy and stream, until told to stop."""
    lsn = None
    if stop_at_lsn is not None:
        try:
            lsn = Lsn.parse(stop_at_lsn)
        except ValueError:
            _fail(
                f"--stop-at-lsn {stop_at_lsn}: not an LSN; write it as PostgreSQL does: 0/16B3748",
                2,
            )
    condition = StopCondition(lsn, stop_when_caught_up)
    _run(run_command.run(_globals.config, _globals.overrides, only or [], condition))


@app.command()
def check(as_json: JsonOption = False) -> None:
    """Look for everything that would stop `run`; change nothing."""
    settings, mapping = _load()
    report = _run(check_command.check(settings, mapping))
    if as_json:
        _print_json(report.to_json())
    else:
        for finding in report.findings:
            typer.echo(str(finding))
    if report.exit_code:
        _fail(report.summary, report.exit_code)
    if not as_json:
        typer.echo(report.summary)


@app.command()
def status(as_json: JsonOption = False) -> None:
    """Show what is where, from the databases alone."""
    settings, mapping = _load()
    address = TargetAddress.parse(settings.target.url)
    statuses = _run(status_command.read_status(address, mapping))
    if as_json:
        _print_json({"sources": [status.to_json() for status in statuses]})
    else:
        status_command.render_status(statuses, Console())


@app.command()
def wait(
    timeout: Annotated[float, typer.Option(help="Give up after so many seconds.", min=0)] = 60,
    as_json: JsonOption = False,
) -> None:
    """Wait until everything committed until now is visible and every table is ready."""
    settings, mapping = _load()
    address = TargetAddress.parse(settings.target.url)
    missing = _run(status_command.wait(address, mapping, timeout))
    if as_json:
        _print_json({"caught_up": missing is None, "missing": missing})
    if missing is not None:
        _fail(missing, 1)


DatabaseOption = Annotated[str | None, typer.Option(help="Only of this database.")]
SidOption = Annotated[str | None, typer.Option(help="Only of this sid.")]
TableArgument = Annotated[
    str, typer.Argument(help="The source's table, or a pattern such as '*.*'.", metavar="TABLE")
]


def _request(
    action: str,
    table: str,
    database: str | None,
    sid: str | None,
    as_json: bool,
    options: dict[str, Any] | None = None,
) -> None:
    settings, _ = _load()
    address = TargetAddress.parse(settings.target.url)
    names = _run(
        requests_command.request(
            address, action, table, database=database, sid=sid, options=options
        )
    )
    if as_json:
        _print_json({"action": action, "tables": names})
    else:
        for name in names:
            typer.echo(f"{action} asked for: {name}")


@app.command()
def resync(
    table: TableArgument,
    database: DatabaseOption = None,
    sid: SidOption = None,
    mode: Annotated[
        Mode, typer.Option(help="Write all rows anew, or only those that differ.")
    ] = Mode.RELOAD,
    force: Annotated[
        bool, typer.Option("--force", help="Leave out columns that the target lacks.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Copy a table again while the others keep streaming."""
    options = Resync(mode, None, force).to_json()
    _request("resync", table, database, sid, as_json, options)


@app.command()
def pause(
    table: TableArgument,
    database: DatabaseOption = None,
    sid: SidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hold a table's changes until it is resumed."""
    _request("pause", table, database, sid, as_json)


@app.command()
def resume(
    table: TableArgument,
    database: DatabaseOption = None,
    sid: SidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go on with a table that is paused or in error."""
    _request("resume", table, database, sid, as_json)


quarantine = typer.Typer(
    name="quarantine",
    help="Changes that the target refused, where `on_error: quarantine` is set.",
    no_args_is_help=True,
)
app.add_typer(quarantine)

IdOption = Annotated[
    list[int] | None, typer.Option("--id", help="Only this change; can be repeated.", metavar="N")
]
OptionalTable = Annotated[
    str | None,
    typer.Argument(help="The source's table, or a pattern such as '*.*'.", metavar="[TABLE]"),
]


@quarantine.command("list")
def list_quarantine(
    table: Annotated[str | None, typer.Option(help="Only of this table, or pattern.")] = None,
    database: DatabaseOption = None,
    sid: SidOption = None,
    limit: Annotated[int, typer.Option(help="At most so many, the oldest first.", min=1)] = 100,
    as_json: JsonOption = False,
) -> None:
    """Show what is in quarantine, oldest first."""
    settings, _ = _load()
    choice = quarantine_command.Choice(table, database, sid)
    address = TargetAddress.parse(settings.target.url)
    rows = _run(quarantine_command.read_rows(address, choice, limit))
    if as_json:
        _print_json({"rows": [row.to_json() for row in rows]})
    elif rows:
        quarantine_command.render_rows(rows, Console())
    else:
        typer.echo("nothing is in quarantine")


def _ask_quarantine(action: str, choice: quarantine_command.Choice, as_json: bool) -> None:
    settings, _ = _load()
    address = TargetAddress.parse(settings.target.url)
    asked = _run(quarantine_command.ask(address, action, choice))
    if as_json:
        _print_json({"action": action, "tables": [{"table": t, "rows": n} for t, n in asked]})
    elif not asked:
        typer.echo("nothing is in quarantine")
    for name, count in [] if as_json else asked:
        typer.echo(f"{action} asked for: {name}, {count} changes")


@quarantine.command("retry")
def retry_quarantine(
    table: OptionalTable = None,
    number: IdOption = None,
    database: DatabaseOption = None,
    sid: SidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Apply changes again, with all others of the same rows; what is refused again stays."""
    choice = quarantine_command.Choice(table, database, sid, tuple(number or ()))
    _ask_quarantine("retry", choice, as_json)


@quarantine.command("drop")
def drop_quarantine(
    table: OptionalTable = None,
    number: IdOption = None,
    database: DatabaseOption = None,
    sid: SidOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Give changes up; later ones of the same rows are applied again."""
    if table is None and not number:
        _fail("say of which TABLE, or which changes with --id", 2)
    if not yes:
        _fail("what is dropped is lost to the target; say --yes to do it", 2)
    choice = quarantine_command.Choice(table, database, sid, tuple(number or ()))
    _ask_quarantine("drop", choice, as_json)


@app.command()
def indexes(
    missing_fk: Annotated[
        bool, typer.Option("--missing-fk", help="Those that foreign keys lack at the target.")
    ] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="Build them where tables are in step.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show indexes that the target should have; with --apply, build them."""
    if not missing_fk:
        _fail("say which indexes: --missing-fk", 2)
    settings, mapping = _load()
    address = TargetAddress.parse(settings.target.url)
    found = _run(indexes_command.missing_fk(address, mapping, settings.target.schema_, apply=apply))
    if as_json:
        _print_json({"indexes": [missing.to_json() for missing in found]})
    else:
        for missing in found:
            reason = f", {missing.reason}" if missing.reason else ""
            typer.echo(f"{missing.target}: {missing.state}{reason}: {missing.sql};")
    left = sum(missing.state != "built" for missing in found)
    if left:
        _fail(f"indexes missing under foreign keys: {left}", 1)
    if not as_json and not found:
        typer.echo("no index is missing under a foreign key")


@app.command()
def teardown(
    database: DatabaseOption = None,
    sid: SidOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Drop slots, publications and bookkeeping; rows in the target stay."""
    settings, mapping = _load()
    try:
        sources = teardown_command.choose(mapping, database, sid)
    except StreamerError as exc:
        _fail(str(exc), exc.exit_code)
    if not yes:
        names = ", ".join(source.label for source in sources)
        _fail(f"this drops the replication slots of {names}; say --yes to do it", 2)
    address = TargetAddress.parse(settings.target.url)
    results = _run(teardown_command.teardown(address, sources))
    if as_json:
        _print_json(
            [{"source": r.label, "error": r.error, "left_sql": r.left_sql} for r in results]
        )
    for result in results:
        if result.error is not None:
            typer.echo(f"streamer: {logs.redact(result.error)}; run there:", err=True)
            for statement in result.left_sql:
                typer.echo(f"{statement};", err=as_json)
    if any(result.error is not None for result in results):
        raise typer.Exit(3)


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(help="How long the shops are busy.", min=0)] = 20,
    keep: Annotated[bool, typer.Option("--keep", help="Leave everything running.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show it all on this machine: servers, copy, stream and a comparison."""
    code = _run(demo_command.demo(seconds, keep=keep, as_json=as_json))
    if code:
        raise typer.Exit(code)


def _load() -> Any:
    try:
        return static.load(_globals.config, _globals.overrides)
    except StreamerError as exc:
        _fail(str(exc), exc.exit_code)


_GLOBAL_OPTIONS = ("-c", "--config", "--log-level", "--log-format")


def _globals_first(arguments: list[str]) -> list[str]:
    """Move options that stand before a command to there, wherever they were written."""
    first: list[str] = []
    rest: list[str] = []
    items = iter(arguments)
    for item in items:
        name, equals, _ = item.partition("=")
        if item == "--":
            rest += [item, *items]
        elif name in _GLOBAL_OPTIONS:
            first.append(item)
            if not equals and (value := next(items, None)) is not None:
                first.append(value)
        else:
            rest.append(item)
    return first + rest


def main() -> None:
    """Run the command line."""
    app(args=_globals_first(sys.argv[1:]))
