"""``streamer ddl``: definitions that wait for a decision."""

from pathlib import Path
from typing import Annotated

import typer

from streamer.cli.request_commands import follow_requests
from streamer.cli.shared_options import (
    DatabaseOption,
    JsonOption,
    NoWaitOption,
    SidOption,
    TableArgument,
    example,
)
from streamer.cli.terminal import fail, load_with_target, run_to_end, show

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
    from streamer.commands import ddl_decisions as ddl_command

    _, _, address = load_with_target()
    records = run_to_end(ddl_command.read_records(address, database, sid, with_done=with_done))
    show(ddl_command.LISTING, records, as_json=as_json)


def _decide(
    action: str,
    table: str,
    database: str | None,
    sid: str | None,
    statements: list[str] | None = None,
    *,
    no_wait: bool,
    as_json: bool,
) -> None:
    from streamer.commands import ddl_decisions as ddl_command

    _, _, address = load_with_target()
    requested = run_to_end(
        ddl_command.store_decision(address, action, table, database, sid, statements)
    )
    answer = {"action": action, "tables": list(requested.values())}
    follow_requests(address, requested, answer, waits=not no_wait, as_json=as_json)


@ddl.command("apply", epilog=example("streamer ddl apply orders --database shop"))
def apply_ddl(
    table: TableArgument,
    database: DatabaseOption = None,
    sid: SidOption = None,
    no_wait: NoWaitOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make the change that a table waits for at the target, and continue the table."""
    _decide("apply", table, database, sid, no_wait=no_wait, as_json=as_json)


@ddl.command("skip", epilog=example("streamer ddl skip orders --database shop"))
def skip_ddl(
    table: TableArgument,
    database: DatabaseOption = None,
    sid: SidOption = None,
    no_wait: NoWaitOption = False,
    as_json: JsonOption = False,
) -> None:
    """Skip the change at the target, and continue the table.

    If the source dropped or renamed a column, streamer drops NOT NULL of the target's column.
    """
    _decide("skip", table, database, sid, no_wait=no_wait, as_json=as_json)


@ddl.command("edit", epilog=example("streamer ddl edit orders --file change.sql"))
def edit_ddl(
    table: TableArgument,
    file: Annotated[
        Path | None, typer.Option("--file", help="File with the statements; - for standard input.")
    ] = None,
    sql: Annotated[str | None, typer.Option("--sql", help="The statements.")] = None,
    database: DatabaseOption = None,
    sid: SidOption = None,
    no_wait: NoWaitOption = False,
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
    _decide("apply", table, database, sid, [sql], no_wait=no_wait, as_json=as_json)
