"""The command line itself, and the commands about what runs."""

import json
import signal
import sys
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from streamer import __version__
from streamer.cli import mapping as mapping_commands
from streamer.cli import users as user_commands
from streamer.cli.options import DatabaseOption, JsonOption, SidOption, TableArgument, UrlOption
from streamer.cli.terminal import (
    GLOBALS,
    fail,
    load,
    load_to_show,
    print_json,
    run_to_end,
    with_mapping_database,
)
from streamer.commands import indexes as indexes_command
from streamer.commands import quarantine as quarantine_command
from streamer.commands import requests as requests_command
from streamer.commands import status as status_command
from streamer.commands import status_view
from streamer.commands import teardown as teardown_command
from streamer.commands import wait as wait_command
from streamer.config import static
from streamer.errors import StreamerError
from streamer.lsn import Lsn
from streamer.mapping.resync import Mode, Resync
from streamer.observability import logs
from streamer.target.connection import TargetAddress

app = typer.Typer(
    name="streamer",
    help="Stream many PostgreSQL databases into one.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)


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
    GLOBALS.config = config
    GLOBALS.log_level = log_level
    GLOBALS.log_format = log_format
    logs.configure(log_level, log_format)


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
    take_over: Annotated[
        list[str] | None,
        typer.Option(
            help="Use slot and publications of these sources although another installation may.",
            metavar="DATABASE[:SID]",
        ),
    ] = None,
) -> None:
    """Copy and stream, until told to stop."""
    # Until the handlers are there a reload is not needed: the configuration is still to be read.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from streamer.cli import run as run_command
    from streamer.runtime.engine import StopCondition

    lsn = None
    if stop_at_lsn is not None:
        try:
            lsn = Lsn.parse(stop_at_lsn)
        except ValueError:
            fail(
                f"--stop-at-lsn {stop_at_lsn}: not an LSN; write it as PostgreSQL does: 0/16B3748",
                2,
            )
    condition = StopCondition(lsn, stop_when_caught_up)
    run_to_end(
        run_command.run(GLOBALS.config, GLOBALS.overrides, only or [], condition, take_over or [])
    )


@app.command()
def check(as_json: JsonOption = False) -> None:
    """Look for everything that would stop `run`; change nothing."""
    from streamer.commands.check import command as check_command

    settings, mapping = load()
    report = run_to_end(check_command.check(settings, mapping))
    if as_json:
        print_json(report.to_json())
    else:
        for finding in report.findings:
            typer.echo("\n".join(finding.lines()))
    if report.exit_code:
        fail(report.summary, report.exit_code)
    if not as_json:
        typer.echo(report.summary)


@app.command()
def status(
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")
    ] = False,
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks of --watch.", min=0.2)
    ] = 2.0,
    wide: Annotated[
        bool, typer.Option("--wide", help="All columns, however narrow the terminal is.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what is where, from the databases alone."""
    settings, mapping, state = load_to_show()
    address = TargetAddress.parse(settings.target.url)
    read = partial(status_command.read_report, address, mapping, state)
    if watch:
        run_to_end(status_view.watch(read, interval, Console(), is_wide=wide, as_json=as_json))
        return
    report = run_to_end(read())
    if as_json:
        print_json(report.to_json())
    else:
        status_view.print_status(report, Console(), is_wide=wide)
    if report.exit_code:
        fail(report.failure, report.exit_code)


@app.command()
def doctor(
    bundle: Annotated[
        Path | None,
        typer.Option(help="Also write all about it, without secrets, to this new file (zip)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what is wrong, and what to do."""
    from streamer.commands.doctor import bundle as bundle_command
    from streamer.commands.doctor import diagnosis as doctor_command

    if bundle is not None:
        run_to_end(bundle_command.check_new(bundle))
    settings, mapping = load()
    diagnosis = run_to_end(doctor_command.diagnose(settings, mapping))
    if bundle is not None:
        run_to_end(bundle_command.write_bundle(bundle, settings, mapping, diagnosis))
    if as_json:
        print_json(diagnosis.to_json())
    else:
        for line in doctor_command.sentences(diagnosis):
            typer.echo(line)
        if bundle is not None:
            typer.echo(f"written: {bundle}; look at it before you pass it on")
    if not diagnosis.is_well:
        raise typer.Exit(1)


@app.command("events")
def show_events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also lag and rates, which change every second.")
    ] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the state of everything; with --follow, what happens from then on."""
    from streamer.admin import tail
    from streamer.commands.screen import until_interrupted

    async def show() -> None:
        _, settings = static.read(GLOBALS.config, GLOBALS.overrides)
        async for name, data in tail.tail(settings, url, follow=follow):
            if name in tail.CHATTY and not everything:
                continue
            now = datetime.now().astimezone()
            line = tail.as_line((name, data), now)
            if as_json:
                line = json.dumps({"at": now.isoformat(), "event": name, **data}, default=str)
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    run_to_end(until_interrupted(show()))


@app.command()
def wait(
    tables: Annotated[
        list[str] | None,
        typer.Argument(help="Wait for these tables only; names or patterns.", metavar="[TABLE…]"),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Give up after so many seconds.", min=0)] = 60,
    database: DatabaseOption = None,
    sid: SidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Wait until everything committed until now is visible and every table is ready."""
    settings, mapping = load(needs_sources=True)
    address = TargetAddress.parse(settings.target.url)
    scope = wait_command.Scope(tuple(tables or ()), database, sid)
    missing = run_to_end(wait_command.wait(address, mapping, timeout, scope))
    if as_json:
        print_json({"caught_up": missing is None, "missing": missing})
    if missing is not None:
        fail(missing, 1)


def _request(
    action: str,
    table: str,
    database: str | None,
    sid: str | None,
    as_json: bool,
    options: dict[str, Any] | None = None,
) -> None:
    settings, _ = load()
    address = TargetAddress.parse(settings.target.url)
    names = run_to_end(
        requests_command.request(
            address, action, table, database=database, sid=sid, options=options
        )
    )
    if as_json:
        print_json({"action": action, "tables": names})
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
    options = Resync(mode, force).to_json()
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
    settings, _ = load()
    choice = quarantine_command.Choice(table, database, sid)
    address = TargetAddress.parse(settings.target.url)
    rows = run_to_end(quarantine_command.read_rows(address, choice, limit))
    if as_json:
        print_json({"rows": [row.to_json() for row in rows]})
    elif rows:
        quarantine_command.render_rows(rows, Console())
    else:
        typer.echo("nothing is in quarantine")


def _ask_quarantine(action: str, choice: quarantine_command.Choice, as_json: bool) -> None:
    settings, _ = load()
    address = TargetAddress.parse(settings.target.url)
    asked = run_to_end(quarantine_command.ask(address, action, choice))
    if as_json:
        print_json({"action": action, "tables": [{"table": t, "rows": n} for t, n in asked]})
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
        fail("say of which TABLE, or which changes with --id", 2)
    if not yes:
        fail("what is dropped is lost to the target; say --yes to do it", 2)
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
        fail("say which indexes: --missing-fk", 2)
    settings, mapping = load()
    address = TargetAddress.parse(settings.target.url)
    found = run_to_end(
        indexes_command.missing_fk(address, mapping, settings.target.schema_, apply=apply)
    )
    if as_json:
        print_json({"indexes": [missing.to_json() for missing in found]})
    else:
        for missing in found:
            reason = f", {missing.reason}" if missing.reason else ""
            typer.echo(f"{missing.target}: {missing.state}{reason}: {missing.sql};")
    left = sum(missing.state != "built" for missing in found)
    if left:
        fail(f"indexes missing under foreign keys: {left}", 1)
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
    settings, mapping = load()
    try:
        sources = teardown_command.choose(mapping, database, sid)
    except StreamerError as exc:
        fail(str(exc), exc.exit_code)
    if not yes:
        names = ", ".join(source.label for source in sources)
        fail(f"this drops the replication slots of {names}; say --yes to do it", 2)
    address = TargetAddress.parse(settings.target.url)
    actor = requests_command.command_actor()
    has_database = settings.mapping_database is not None
    if has_database:
        labels = [source.label for source in sources]
        with_mapping_database(settings, lambda store: store.write_teardown(actor, labels))
    results = run_to_end(
        teardown_command.teardown(
            address, sources, settings.spool.path, actor=None if has_database else actor
        )
    )
    if as_json:
        print_json([{"source": r.label, "error": r.error, "left_sql": r.left_sql} for r in results])
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
    from streamer.commands.demo import show as demo_command

    code = run_to_end(demo_command.demo(seconds, keep=keep, as_json=as_json))
    if code:
        raise typer.Exit(code)


app.add_typer(mapping_commands.app)
app.add_typer(mapping_commands.sources, name="sources")
app.add_typer(mapping_commands.tables, name="tables")
app.add_typer(mapping_commands.admin, name="admin")
app.add_typer(user_commands.users, name="users")

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
