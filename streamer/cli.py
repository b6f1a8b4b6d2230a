"""The command line: arguments in, exit code out.

Every command ends with 0 (done), 1 (what was asked about is not so), 2 (wrong usage or
configuration), 3 (a server cannot be reached or refuses) or 4 (an error that needs a person), and
says in one line on stderr what is wrong and what to do.
"""

import asyncio
import json
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from streamer import __version__
from streamer.apply.target import TargetAddress
from streamer.commands import indexes as indexes_command
from streamer.commands import quarantine as quarantine_command
from streamer.commands import requests as requests_command
from streamer.commands import status as status_command
from streamer.commands import status_view
from streamer.commands import teardown as teardown_command
from streamer.config import static
from streamer.config.source import read_text
from streamer.errors import StreamerError
from streamer.lsn import Lsn
from streamer.observability import logs
from streamer.route.mapping import Mapping
from streamer.route.resync import Mode, Resync

if TYPE_CHECKING:
    from streamer.admin.client import Client

# What only some commands need, and takes long to import, is imported by them: the others are what
# scripts call often.

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


UrlOption = Annotated[
    str | None,
    typer.Option("--url", help="The process to ask, as http://127.0.0.1:8000.", metavar="URL"),
]
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
    from streamer.commands import run as run_command
    from streamer.runtime.engine import StopCondition

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
    from streamer.commands.check import command as check_command

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
def status(
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")
    ] = False,
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks of --watch.", min=0.2)
    ] = 2.0,
    as_json: JsonOption = False,
) -> None:
    """Show what is where, from the databases alone."""
    settings, mapping = _load()
    address = TargetAddress.parse(settings.target.url)
    if watch:
        _run(status_view.watch(address, mapping, interval, Console(), as_json=as_json))
        return
    statuses = _run(status_command.read_status(address, mapping))
    if as_json:
        _print_json({"sources": [status.to_json() for status in statuses]})
    else:
        Console().print(status_view.render_status(statuses))


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
        _run(bundle_command.check_new(bundle))
    settings, mapping = _load()
    diagnosis = _run(doctor_command.diagnose(settings, mapping))
    if bundle is not None:
        _run(bundle_command.write_bundle(bundle, settings, mapping, diagnosis))
    if as_json:
        _print_json(diagnosis.to_json())
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
        _, settings = static.read(_globals.config, _globals.overrides)
        async for name, data in tail.tail(settings, url, follow=follow):
            if name in tail.CHATTY and not everything:
                continue
            now = datetime.now().astimezone()
            line = tail.as_line((name, data), now)
            if as_json:
                line = json.dumps({"at": now.isoformat(), "event": name, **data}, default=str)
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    _run(until_interrupted(show()))


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


def _completing(names: Callable[[Mapping], Iterable[str]]) -> Callable[..., list[str]]:
    """Return what completes words from the configuration, if that can be read; it says nothing."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        path = ctx.find_root().params.get("config") or _globals.config
        try:
            _, mapping = static.load(path, {})
        except StreamerError:
            return []
        return sorted({name for name in names(mapping) if name.startswith(incomplete)})

    return complete


def _table_names(mapping: Mapping) -> Iterable[str]:
    for source in mapping.sources:
        for rule in source.rules:
            if not rule.pattern.is_pattern:
                yield str(rule.pattern).removeprefix("public.")


DatabaseOption = Annotated[
    str | None,
    typer.Option(
        help="Only of this database.",
        autocompletion=_completing(lambda mapping: (s.database for s in mapping.sources)),
    ),
]
SidOption = Annotated[
    str | None,
    typer.Option(
        help="Only of this sid.",
        autocompletion=_completing(lambda mapping: (s.sid for s in mapping.sources if s.sid)),
    ),
]
TableArgument = Annotated[
    str,
    typer.Argument(
        help="The source's table, or a pattern such as '*.*'.",
        metavar="TABLE",
        autocompletion=_completing(_table_names),
    ),
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
    results = _run(teardown_command.teardown(address, sources, settings.spool.path))
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
    from streamer.commands.demo import show as demo_command

    code = _run(demo_command.demo(seconds, keep=keep, as_json=as_json))
    if code:
        raise typer.Exit(code)


# ---- the mapping -------------------------------------------------------------------------------

sources_app = typer.Typer(help="Source databases of the mapping.", no_args_is_help=True)
tables_app = typer.Typer(help="Tables of the mapping.", no_args_is_help=True)
admin_app = typer.Typer(help="Credentials and keys of the admin.", no_args_is_help=True)
app.add_typer(sources_app, name="sources")
app.add_typer(tables_app, name="tables")
app.add_typer(admin_app, name="admin")


def _ask(url: str | None, work: "Callable[[Client], Coroutine[Any, Any, T]]") -> T:
    """Do *work* with the mapping: that of a process, or that in the file."""
    from streamer.admin.client import open_client

    async def ask() -> T:
        _, settings = static.read(_globals.config, _globals.overrides)
        mapping = Mapping((), settings.target.schema_)
        if settings.mapping_database is None:
            settings, mapping = static.load(_globals.config, _globals.overrides)
        async with open_client(settings, _globals.config, mapping, url) as client:
            return await work(client)

    return _run(ask())


def _print_rows(rows: list[dict[str, Any]], columns: list[str], *, as_json: bool) -> None:
    if as_json:
        _print_json(rows)
        return
    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("" if row[column] is None else str(row[column]) for column in columns))
    Console().print(table)


def _said(what: str, *, as_json: bool, row: Any = None) -> None:
    if as_json:
        _print_json(row)
    else:
        typer.echo(f"{what}; `streamer apply` applies the draft")


@sources_app.command("list")
def list_sources(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List the source databases of the draft."""
    rows = _ask(url, lambda client: client.rows("url", {}))
    _print_rows(rows, ["id", "database", "sid", "url"], as_json=as_json)


@sources_app.command("add")
def add_source(
    database: Annotated[str, typer.Argument(help="The group of databases it belongs to.")],
    source_url: Annotated[
        str,
        typer.Argument(
            help="A libpq URL, best with ${NAME} for the password; - reads it from stdin.",
            metavar="SOURCE_URL",
        ),
    ],
    sid: Annotated[str | None, typer.Option(help="Its sid.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a source database to the draft."""
    from streamer.admin import edit

    given = sys.stdin.readline().strip() if source_url == "-" else source_url
    row = _ask(url, lambda client: edit.add_source(client, database, given, sid))
    _said(f"added: {database if sid is None else f'{database}:{sid}'}", as_json=as_json, row=row)


@sources_app.command("remove")
def remove_source(
    database: Annotated[str, typer.Argument(help="The group of databases.")],
    sid: Annotated[
        str | None, typer.Option(help="Only the url of this sid; else all, with the tables.")
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a source database from the draft."""
    from streamer.admin import edit

    _ask(url, lambda client: edit.remove_source(client, database, sid))
    _said(f"removed: {database if sid is None else f'{database}:{sid}'}", as_json=as_json)


@tables_app.command("list")
def list_tables(
    database: DatabaseOption = None, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """List the tables of the draft."""
    filters = {} if database is None else {"database": database}
    rows = _ask(url, lambda client: client.rows("table", filters))
    _print_rows(rows, ["id", "database", "schema", "name", "target", "type"], as_json=as_json)


@tables_app.command("add")
def add_table(
    database: Annotated[str, typer.Argument(help="The group of databases.")],
    table: TableArgument,
    target: Annotated[str | None, typer.Option(help="The target table.")] = None,
    table_type: Annotated[str, typer.Option("--type", help="clone, append or history.")] = "clone",
    setting: Annotated[
        list[str] | None,
        typer.Option(help="Another setting of a table, as YAML.", metavar="NAME=VALUE"),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a table, or a pattern, to the draft."""
    from streamer.admin import edit

    fields = {"name": table, "target": target, "type": table_type}
    row = _ask(url, lambda client: edit.add_table(client, database, fields, setting or []))
    _said(f"added: {database} {row['schema']}.{row['name']}", as_json=as_json, row=row)


@tables_app.command("remove")
def remove_table(
    database: Annotated[str, typer.Argument(help="The group of databases.")],
    table: TableArgument,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a table, or a pattern, from the draft; rows in the target stay."""
    from streamer.admin import edit

    _ask(url, lambda client: edit.remove_table(client, database, table))
    _said(f"removed: {database} {table}", as_json=as_json)


@app.command()
def plan(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show what applying the draft, or the configuration file, would do."""
    from streamer.admin import edit

    found = _ask(url, lambda client: client.plan())
    if as_json:
        _print_json(found)
    else:
        for line in edit.plan_lines(found):
            typer.echo(line)
    if not found["ready"]:
        _fail("something would stop; each error above says what to do", 1)


@app.command()
def apply(
    force: Annotated[
        bool, typer.Option("--force", help="Also where the plan found what would stop.")
    ] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let the draft be what runs, all of it or nothing."""
    answer = _ask(url, lambda client: client.apply(force=force))
    if as_json:
        _print_json(answer)
    else:
        typer.echo(f"applied: revision {answer['revision']}")
    if answer["warning"] is not None:
        _fail(answer["warning"], 1)


@app.command("export")
def export_yaml(url: UrlOption = None) -> None:
    """Print the draft as a configuration file, with a variable for each password."""
    text, variables = _ask(url, lambda client: client.export())
    typer.echo(text, nl=False)
    if variables:
        names = ", ".join(variables)
        typer.echo(f"streamer: set these to the passwords, as in the urls: {names}", err=True)


@app.command("import")
def import_yaml(
    file: Annotated[
        Path, typer.Argument(help="A configuration file, or a map.yaml of kuvasz-streamer.")
    ],
    url: UrlOption = None,
) -> None:
    """Let the draft be what a YAML file says; stored passwords stay where it has variables."""
    text = _run(asyncio.to_thread(read_text, file))
    for note in _ask(url, lambda client: client.import_text(file, text)):
        typer.echo(f"streamer: {note}", err=True)
    typer.echo("imported; `streamer apply` applies the draft")


@admin_app.command("hash-password")
def hash_password() -> None:
    """Ask for a password, or read it from stdin, and print what admin.users takes."""
    from streamer.admin import access

    if sys.stdin.isatty():
        password = typer.prompt("Password", hide_input=True, confirmation_prompt=True)
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    if not password:
        _fail("no password", 2)
    typer.echo(access.hash_password(password))


@admin_app.command("generate-key")
def generate_key() -> None:
    """Print a new key for stored passwords."""
    from streamer.admin import keyring

    typer.echo(keyring.generate_key())


def _load() -> Any:
    try:
        settings, mapping = static.load(_globals.config, _globals.overrides)
    except StreamerError as exc:
        _fail(str(exc), exc.exit_code)
    if settings.mapping_database is not None:
        from streamer.admin.service import load_applied

        mapping = _run(load_applied(settings))
    return settings, mapping


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
