"""Commands for the mapping: in the running process or, without a process, in the file."""

import operator
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from streamer.cli.shared_options import (
    MAPPING,
    DatabaseOption,
    JsonOption,
    TableArgument,
    UrlOption,
    example,
)
from streamer.cli.terminal import (
    GLOBALS,
    fail,
    load_with_target,
    print_json,
    run_to_end,
    show,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from streamer.admin.service.mapping_client import MappingClient

T = TypeVar("T")

app = typer.Typer()
sources = typer.Typer(
    help="List and edit the source databases of the draft, and restart a running source.",
    no_args_is_help=True,
)
tables = typer.Typer(help="List and edit the tables of the draft.", no_args_is_help=True)
config = typer.Typer(help="Describe the configuration file.", no_args_is_help=True)
admin = typer.Typer(help="Generate password hashes and encryption keys.", no_args_is_help=True)


def _call_api(url: str | None, work: "Callable[[MappingClient], Coroutine[Any, Any, T]]") -> T:
    """Run *work* on the mapping of the running process or, without a process, of the file."""
    from streamer.admin.service.mapping_client import open_client
    from streamer.config import static_mapping
    from streamer.mapping.rules import Mapping

    async def call() -> T:
        _, settings = static_mapping.read(GLOBALS.config, GLOBALS.overrides)
        mapping = Mapping((), settings.target.schema_)
        if settings.mapping_database is None:
            settings, mapping = static_mapping.load(GLOBALS.config, GLOBALS.overrides)
        async with open_client(settings, GLOBALS.config, mapping, url) as client:
            return await work(client)

    return run_to_end(call())


def _show(rows: list[dict[str, Any]], *names: str, empty_text: str, as_json: bool) -> None:
    """Print the fields *names* of *rows*."""
    from streamer.commands.terminal_table import Listing, ListingColumn

    columns = [ListingColumn(name, operator.itemgetter(name)) for name in names]
    show(Listing(None, columns, empty_text), rows, as_json=as_json)


def _from_stdin(text: str | None, label: str) -> str | None:
    """Return *text*; for ``-`` a line of stdin, with a prompt on a terminal."""
    if text != "-":
        return text
    if sys.stdin.isatty():
        answer: str = typer.prompt(label, hide_input=True)
        return answer
    return sys.stdin.readline().rstrip("\r\n")


def _check_password(password: str | None) -> None:
    if password is not None and password != "-" and not password.startswith("${"):
        fail(
            "--password: all users of this machine could read the password; pass ${NAME}, or - "
            "for stdin",
            2,
        )


def _label(database: str, sid: str | None) -> str:
    from streamer.mapping.rules import SourceLabel

    return str(SourceLabel(database, sid))


def _print_outcome(outcome: str, *, as_json: bool, row: Any = None) -> None:
    if as_json:
        print_json(row)
    else:
        typer.echo(f"{outcome}; `streamer apply` applies the draft")


@sources.command("list", epilog=example("streamer sources list"))
def list_sources(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List the source databases of the draft."""
    rows = _call_api(url, lambda client: client.rows("url", {}))
    empty_text = (
        "no source databases; add one with streamer sources add DATABASE URL, or import a "
        "configuration file with streamer import FILE"
    )
    _show(rows, "id", "database", "sid", "url", empty_text=empty_text, as_json=as_json)


@sources.command(
    "add",
    epilog=example("streamer sources add shop 'postgresql://u:${PW}@eu-db/shop' --sid eu"),
)
def add_source(
    database: Annotated[str, typer.Argument(help="Group of databases.")],
    source_url: Annotated[
        str,
        typer.Argument(
            help="libpq URL, preferably with ${NAME} as password; - reads the URL from stdin.",
            metavar="SOURCE_URL",
        ),
    ],
    sid: Annotated[str | None, typer.Option(help="sid of the new source.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a source database to the draft.

    With - as SOURCE_URL, a password in the URL does not appear in the process list.
    """
    from streamer.admin.service import edit_draft

    stripped_url = (_from_stdin(source_url, "URL") or "").strip()
    row = _call_api(url, lambda client: edit_draft.add_source(client, database, stripped_url, sid))
    _print_outcome(f"added: {_label(database, sid)}", as_json=as_json, row=row)


@sources.command(
    "set", epilog=example("streamer sources set shop --sid eu --setting transport=binary")
)
def set_source(
    database: Annotated[str, typer.Argument(help="Group of databases.")],
    source_url: Annotated[
        str | None,
        typer.Argument(help="New libpq URL; - reads the URL from stdin.", metavar="SOURCE_URL"),
    ] = None,
    sid: Annotated[str | None, typer.Option(help="sid of the source to change.")] = None,
    password: Annotated[
        str | None,
        typer.Option(
            help="New password: ${NAME}; - reads the password from stdin.", metavar="TEXT"
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="Setting of the URL or its group, as YAML; null restores the default; repeatable.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change the URL, the password or settings of a source database in the draft."""
    from streamer.admin.service import edit_draft

    _check_password(password)
    if source_url is None and password is None and not setting:
        fail("no change given; add SOURCE_URL, --password or --setting", 2)
    new_url = _from_stdin(source_url, "URL")
    new_password = _from_stdin(password, "Password")
    row = _call_api(
        url,
        lambda client: edit_draft.set_source(
            client, database, sid, url=new_url, password=new_password, settings=setting or []
        ),
    )
    _print_outcome(f"changed: {_label(database, sid)}", as_json=as_json, row=row)


@sources.command("remove", epilog=example("streamer sources remove shop --sid us"))
def remove_source(
    database: Annotated[str, typer.Argument(help="Group of databases.")],
    sid: Annotated[
        str | None, typer.Option(help="Remove only the URL with this sid, not the whole group.")
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a source database, or a group with its tables, from the draft."""
    from streamer.admin.service import edit_draft

    _call_api(url, lambda client: edit_draft.remove_source(client, database, sid))
    _print_outcome(f"removed: {_label(database, sid)}", as_json=as_json)


@tables.command("list", epilog=example("streamer tables list --database shop"))
def list_tables(
    database: DatabaseOption = None, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """List the tables of the draft."""
    filters = {} if database is None else {"database": database}
    rows = _call_api(url, lambda client: client.rows("table", filters))
    empty_text = "no tables; add one, or a pattern, with streamer tables add DATABASE TABLE"
    names = ("id", "database", "schema", "name", "target", "type")
    _show(rows, *names, empty_text=empty_text, as_json=as_json)


@tables.command("add", epilog=example("streamer tables add shop orders --type history"))
def add_table(
    database: Annotated[str, typer.Argument(help="Group of databases.")],
    table: TableArgument,
    target: Annotated[str | None, typer.Option(help="Target table.")] = None,
    table_type: Annotated[str, typer.Option("--type", help="clone, append or history.")] = "clone",
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="Another setting of the table, as YAML; repeatable.", metavar="NAME=VALUE"
        ),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a table, or a pattern, to the draft."""
    from streamer.admin.service import edit_draft

    fields = {"name": table, "target": target, "type": table_type}
    row = _call_api(
        url, lambda client: edit_draft.add_table(client, database, fields, setting or [])
    )
    _print_outcome(f"added: {database} {row['schema']}.{row['name']}", as_json=as_json, row=row)


@tables.command(
    "set", epilog=example("streamer tables set shop orders --setting on_error=quarantine")
)
def set_table(
    database: Annotated[str, typer.Argument(help="Group of databases.")],
    table: TableArgument,
    target: Annotated[str | None, typer.Option(help="Target table.")] = None,
    table_type: Annotated[
        str | None, typer.Option("--type", help="clone, append or history.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="Another setting, as YAML; null restores the default; repeatable.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change settings of a table, or of a pattern, in the draft."""
    from streamer.admin.service import edit_draft

    options = {"target": target, "type": table_type}
    fields = {name: value for name, value in options.items() if value is not None}
    if not fields and not setting:
        fail("no change given; add --target, --type or --setting", 2)
    row = _call_api(
        url, lambda client: edit_draft.set_table(client, database, table, fields, setting or [])
    )
    _print_outcome(f"changed: {database} {row['schema']}.{row['name']}", as_json=as_json, row=row)


@tables.command("remove", epilog=example("streamer tables remove shop orders"))
def remove_table(
    database: Annotated[str, typer.Argument(help="Group of databases.")],
    table: TableArgument,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a table, or a pattern, from the draft. Rows in the target stay."""
    from streamer.admin.service import edit_draft

    _call_api(url, lambda client: edit_draft.remove_table(client, database, table))
    _print_outcome(f"removed: {database} {table}", as_json=as_json)


@app.command(rich_help_panel=MAPPING, epilog=example("streamer plan"))
def plan(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show the effect of applying the draft, or of reading the configuration file.

    The plan names slots, publications, tables to copy with their size and duration, and problems.
    The exit code is 1 if the plan has errors.
    """
    from streamer.admin.service import edit_draft

    planned = _call_api(url, lambda client: client.plan())
    if as_json:
        print_json(planned)
    else:
        for line in edit_draft.plan_lines(planned):
            typer.echo(line)
    if not planned["ready"]:
        fail("the plan has errors; each error above names the next step", 1)


@app.command(rich_help_panel=MAPPING, epilog=example("streamer apply"))
def apply(
    force: Annotated[
        bool, typer.Option("--force", help="Apply even if the plan has errors.")
    ] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Apply the whole draft, or reject it.

    streamer refuses a draft whose plan has errors, unless --force is given.
    """
    answer = _call_api(url, lambda client: client.apply(force=force))
    if as_json:
        print_json(answer)
    else:
        typer.echo(f"applied: revision {answer['revision']}")
    if answer["warning"] is not None:
        fail(answer["warning"], 1)


@app.command("export", rich_help_panel=MAPPING, epilog=example("streamer export > backup.yaml"))
def export(
    dbt: Annotated[
        Path | None,
        typer.Option(
            help="Write a dbt package about the replicated tables to this directory instead.",
            metavar="DIRECTORY",
        ),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the draft as a configuration file, with a variable in place of each password.

    With --dbt, streamer reads the tables from the target instead. The package contains sources with
    freshness, a test of each key, and a view of the current rows of each history table. A later
    export replaces the files of an earlier export.
    """
    if dbt is not None:
        _export_dbt(dbt, as_json=as_json)
        return
    text, variables = _call_api(url, lambda client: client.export())
    if as_json:
        print_json({"configuration": text, "variables": variables})
        return
    typer.echo(text, nl=False)
    if variables:
        names = ", ".join(variables)
        typer.echo(f"streamer: set these variables to the passwords: {names}", err=True)


def _export_dbt(directory: Path, *, as_json: bool) -> None:
    from streamer.commands.export_dbt import export_dbt

    _, mapping, address = load_with_target()
    package = run_to_end(export_dbt(address, mapping, directory))
    if as_json:
        tables = {"tables": package.tables, "left_out": package.left_out}
        print_json({"directory": str(directory), "files": sorted(package.files)} | tables)
    for table in package.left_out:
        name = f"{table['target']}: dbt cannot quote the name {table['name']!r}"
        typer.echo(f"streamer: left out {name}", err=True)
    if not package.tables:
        fail("the target has no replicated tables; start `streamer run` first", 1)
    if not as_json:
        views = sum(table["current"] is not None for table in package.tables)
        count = f"tables: {len(package.tables)}, views of current rows: {views}"
        typer.echo(f"wrote {directory}; {count}")


@app.command("import", rich_help_panel=MAPPING, epilog=example("streamer import config.yaml"))
def import_yaml(
    file: Annotated[
        Path,
        typer.Argument(
            help="Configuration file, or map.yaml or SQLite mapping of kuvasz-streamer."
        ),
    ],
    exclude_missing: Annotated[
        bool,
        typer.Option(
            "--exclude-missing",
            help="For kuvasz-streamer files: leave out columns that the target lacks, as "
            "kuvasz-streamer does.",
        ),
    ] = False,
    url: UrlOption = None,
) -> None:
    """Replace the draft with a file. A URL exactly as exported keeps its stored password."""
    import asyncio

    from streamer.admin.mapping import kuvasz_import
    from streamer.config.yaml_file import read_text

    read = kuvasz_import.read_database if kuvasz_import.is_database(file) else read_text
    text = run_to_end(asyncio.to_thread(read, file))
    for note in _call_api(
        url, lambda client: client.import_text(file, text, excludes_missing=exclude_missing)
    ):
        typer.echo(f"streamer: {note}", err=True)
    typer.echo("imported; `streamer apply` applies the draft")


@config.command("schema", epilog=example("streamer config schema > config.schema.json"))
def schema() -> None:
    """Print the JSON schema of the configuration file, for an editor.

    The line `# yaml-language-server: $schema=config.schema.json` at the top of a file names the
    schema. Editors with the YAML language server then complete keys and mark faults.
    """
    from streamer.config.json_schema import schema_of_file

    print_json(schema_of_file())


@admin.command("hash-password", epilog=example("streamer admin hash-password"))
def hash_password() -> None:
    """Print the hash of a password for `admin.users`. Prompts, or reads stdin."""
    from streamer.admin.service import access

    if sys.stdin.isatty():
        password = typer.prompt("Password", hide_input=True, confirmation_prompt=True)
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    if not password:
        fail("no password given", 2)
    typer.echo(access.hash_password(password))


@admin.command("generate-key", epilog=example("streamer admin generate-key"))
def generate_key() -> None:
    """Print a new key that encrypts stored passwords (`admin.key`)."""
    from streamer.admin.mapping import keyring

    typer.echo(keyring.generate_key())
