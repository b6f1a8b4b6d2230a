"""The commands about the mapping: that of a process, or that in the file."""

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.cells import cell_len, set_cell_size

from streamer.cli.options import DatabaseOption, JsonOption, TableArgument, UrlOption
from streamer.cli.terminal import GLOBALS, fail, print_json, run_to_end
from streamer.config import static
from streamer.config.yaml_file import read_text
from streamer.mapping.rules import Mapping

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from streamer.admin.client import Client

T = TypeVar("T")

app = typer.Typer()
sources = typer.Typer(help="Source databases of the mapping.", no_args_is_help=True)
tables = typer.Typer(help="Tables of the mapping.", no_args_is_help=True)
admin = typer.Typer(help="Credentials and keys of the admin.", no_args_is_help=True)


def _ask(url: str | None, work: "Callable[[Client], Coroutine[Any, Any, T]]") -> T:
    """Do *work* with the mapping: that of a process, or that in the file."""
    from streamer.admin.client import open_client

    async def ask() -> T:
        _, settings = static.read(GLOBALS.config, GLOBALS.overrides)
        mapping = Mapping((), settings.target.schema_)
        if settings.mapping_database is None:
            settings, mapping = static.load(GLOBALS.config, GLOBALS.overrides)
        async with open_client(settings, GLOBALS.config, mapping, url) as client:
            return await work(client)

    return run_to_end(ask())


def _print_rows(
    rows: list[dict[str, Any]], columns: list[str], *, as_json: bool, if_empty: str
) -> None:
    if as_json:
        print_json(rows)
        return
    if not rows:
        typer.echo(if_empty)
        return
    cells = [columns, *([str(row[c] or "") for c in columns] for row in rows)]
    widths = [max(cell_len(line[n]) for line in cells) for n in range(len(columns))]
    for line in cells:
        padded = (set_cell_size(cell, widths[n]) for n, cell in enumerate(line))
        typer.echo("  ".join(padded).rstrip())


def _from_stdin(text: str | None, what: str) -> str | None:
    """Return *text*; for ``-`` a line of stdin, asked for where that is a terminal."""
    if text != "-":
        return text
    if sys.stdin.isatty():
        answer: str = typer.prompt(what, hide_input=True)
        return answer
    return sys.stdin.readline().rstrip("\r\n")


def _check_password(password: str | None) -> None:
    if password is not None and password != "-" and not password.startswith("${"):
        fail("--password: everybody on this machine could read it; give ${NAME}, or - for stdin", 2)


def _said(what: str, *, as_json: bool, row: Any = None) -> None:
    if as_json:
        print_json(row)
    else:
        typer.echo(f"{what}; `streamer apply` applies the draft")


@sources.command("list")
def list_sources(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List the source databases of the draft."""
    rows = _ask(url, lambda client: client.rows("url", {}))
    _print_rows(
        rows,
        ["id", "database", "sid", "url"],
        as_json=as_json,
        if_empty="no source databases; add one: streamer sources add DATABASE URL, or all of a "
        "configuration file: streamer import FILE",
    )


@sources.command("add")
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

    given = (_from_stdin(source_url, "Url") or "").strip()
    row = _ask(url, lambda client: edit.add_source(client, database, given, sid))
    _said(f"added: {database if sid is None else f'{database}:{sid}'}", as_json=as_json, row=row)


@sources.command("set")
def set_source(
    database: Annotated[str, typer.Argument(help="The group of databases it belongs to.")],
    source_url: Annotated[
        str | None,
        typer.Argument(help="Its new libpq URL; - reads it from stdin.", metavar="[SOURCE_URL]"),
    ] = None,
    sid: Annotated[str | None, typer.Option(help="The sid of the url to change.")] = None,
    password: Annotated[
        str | None,
        typer.Option(help="Its new password: ${NAME}, or - to read it from stdin.", metavar="TEXT"),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="A setting of the url or its database, as YAML; null: its default.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change the url, the password or settings of a source database in the draft."""
    from streamer.admin import edit

    _check_password(password)
    if source_url is None and password is None and not setting:
        fail("say what to change: SOURCE_URL, --password or --setting", 2)
    new_url = _from_stdin(source_url, "Url")
    new_password = _from_stdin(password, "Password")
    row = _ask(
        url,
        lambda client: edit.set_source(
            client, database, sid, url=new_url, password=new_password, settings=setting or []
        ),
    )
    _said(f"changed: {database if sid is None else f'{database}:{sid}'}", as_json=as_json, row=row)


@sources.command("remove")
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


@tables.command("list")
def list_tables(
    database: DatabaseOption = None, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """List the tables of the draft."""
    filters = {} if database is None else {"database": database}
    rows = _ask(url, lambda client: client.rows("table", filters))
    _print_rows(
        rows,
        ["id", "database", "schema", "name", "target", "type"],
        as_json=as_json,
        if_empty="no tables; add one, or a pattern: streamer tables add DATABASE TABLE",
    )


@tables.command("add")
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


@tables.command("set")
def set_table(
    database: Annotated[str, typer.Argument(help="The group of databases.")],
    table: TableArgument,
    target: Annotated[str | None, typer.Option(help="The target table.")] = None,
    table_type: Annotated[
        str | None, typer.Option("--type", help="clone, append or history.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(help="Another setting, as YAML; null: its default.", metavar="NAME=VALUE"),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change settings of a table, or a pattern, in the draft."""
    from streamer.admin import edit

    given = {"target": target, "type": table_type}
    fields = {name: value for name, value in given.items() if value is not None}
    if not fields and not setting:
        fail("say what to change: --target, --type or --setting", 2)
    row = _ask(url, lambda client: edit.set_table(client, database, table, fields, setting or []))
    _said(f"changed: {database} {row['schema']}.{row['name']}", as_json=as_json, row=row)


@tables.command("remove")
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
        print_json(found)
    else:
        for line in edit.plan_lines(found):
            typer.echo(line)
    if not found["ready"]:
        fail("something would stop; each error above says what to do", 1)


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
        print_json(answer)
    else:
        typer.echo(f"applied: revision {answer['revision']}")
    if answer["warning"] is not None:
        fail(answer["warning"], 1)


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
        Path,
        typer.Argument(
            help="A configuration file, or the map.yaml or SQLite mapping of kuvasz-streamer."
        ),
    ],
    exclude_missing: Annotated[
        bool,
        typer.Option(
            "--exclude-missing",
            help="Of kuvasz-streamer: leave out columns that the target lacks, as that does.",
        ),
    ] = False,
    url: UrlOption = None,
) -> None:
    """Let the draft be what a file says; stored passwords stay where it has variables."""
    from streamer.admin import kuvasz

    read = kuvasz.read_database if kuvasz.is_database(file) else read_text
    text = run_to_end(asyncio.to_thread(read, file))
    for note in _ask(
        url, lambda client: client.import_text(file, text, excludes_missing=exclude_missing)
    ):
        typer.echo(f"streamer: {note}", err=True)
    typer.echo("imported; `streamer apply` applies the draft")


@admin.command("hash-password")
def hash_password() -> None:
    """Ask for a password, or read it from stdin, and print what admin.users takes."""
    from streamer.admin import access

    if sys.stdin.isatty():
        password = typer.prompt("Password", hide_input=True, confirmation_prompt=True)
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    if not password:
        fail("no password", 2)
    typer.echo(access.hash_password(password))


@admin.command("generate-key")
def generate_key() -> None:
    """Print a new key for stored passwords."""
    from streamer.admin import keyring

    typer.echo(keyring.generate_key())
