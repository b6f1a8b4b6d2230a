"""``streamer ddl``: definitions that wait for a decision."""

from pathlib import Path
from typing import Annotated

import typer

from streamer.cli.options import DatabaseOption, JsonOption, SidOption, TableArgument, example
from streamer.cli.terminal import fail, load, print_json, run_to_end, show
from streamer.commands import ddl as ddl_command
from streamer.target.connection import TargetAddress

ddl = typer.Typer(
    name="ddl",
    help="List changes to table definitions, and decide on those that wait (`ddl: capture`).",
    no_args_is_help=True,
)


@ddl.command("list", epilog=example("streamer ddl list --all"))
def list_ddl(
    with_done: Annotated[
        bool, typer.Option("--all", help="Include changes already made or skipped.")
    ] = False,
    database: DatabaseOption = None,
    sid: SidOption = None,
    as_json: JsonOption = False,
) -> None:
    """List changes to definitions that wait for a decision, oldest first."""
    settings, _ = load()
    address = TargetAddress.parse(settings.target.url)
    records = run_to_end(ddl_command.read_records(address, database, sid, with_done=with_done))
    show(ddl_command.LISTING, records, as_json=as_json)


def _decide(
    action: str,
    table: str,
    database: str | None,
    sid: str | None,
    as_json: bool,
    statements: list[str] | None = None,
) -> None:
    settings, _ = load()
    address = TargetAddress.parse(settings.target.url)
    tables = run_to_end(
        ddl_command.store_decision(address, action, table, database, sid, statements)
    )
    if as_json:
        print_json({"action": action, "tables": tables})
    for name in [] if as_json else tables:
        typer.echo(f"{action} requested: {name}")


@ddl.command("apply", epilog=example("streamer ddl apply orders --database shop"))
def apply_ddl(
    table: TableArgument,
    database: DatabaseOption = None,
    sid: SidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make the change that a table waits for at the target, and continue the table."""
    _decide("apply", table, database, sid, as_json)


@ddl.command("skip", epilog=example("streamer ddl skip orders --database shop"))
def skip_ddl(
    table: TableArgument,
    database: DatabaseOption = None,
    sid: SidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Leave the target as it is, and continue the table.

    A column that the source no longer has can then be null at the target.
    """
    _decide("skip", table, database, sid, as_json)


@ddl.command("edit", epilog=example("streamer ddl edit orders --file change.sql"))
def edit_ddl(
    table: TableArgument,
    file: Annotated[
        Path | None, typer.Option("--file", help="File with the statements; - for standard input.")
    ] = None,
    sql: Annotated[str | None, typer.Option("--sql", help="The statements.")] = None,
    database: DatabaseOption = None,
    sid: SidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run other statements at the target in place of streamer's, and continue the table."""
    if (file is None) == (sql is None):
        fail("give the statements with either --file or --sql", 2)
    if sql is None:
        assert file is not None
        try:
            sql = typer.get_text_stream("stdin").read() if str(file) == "-" else file.read_text()
        except OSError as exc:
            fail(f"cannot read {file}: {exc.strerror}", 2)
    _decide("apply", table, database, sid, as_json, [sql])
