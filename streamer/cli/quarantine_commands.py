"""``streamer quarantine``: changes that the target rejected."""

from typing import Annotated

import typer

from streamer.cli.request_commands import follow_requests
from streamer.cli.shared_options import DatabaseOption, JsonOption, NoWaitOption, SidOption, example
from streamer.cli.terminal import fail, load_with_target, run_to_end, show

quarantine = typer.Typer(
    name="quarantine",
    help="List, retry or drop changes that the target rejected (`on_error: quarantine`).",
    no_args_is_help=True,
)
IdOption = Annotated[
    list[int] | None, typer.Option("--id", help="Only this change; repeatable.", metavar="N")
]
OptionalTable = Annotated[
    str | None,
    typer.Argument(help="Source table, or a pattern such as '*.*'.", metavar="TABLE"),
]


@quarantine.command("list", epilog=example("streamer quarantine list --table orders"))
def list_quarantine(
    table: Annotated[
        str | None,
        typer.Option(help="Only tables with this name, or those that match this pattern."),
    ] = None,
    database: DatabaseOption = None,
    sid: SidOption = None,
    limit: Annotated[int, typer.Option(help="Maximum number of changes.", min=1)] = 100,
    as_json: JsonOption = False,
) -> None:
    """List quarantined changes, oldest first."""
    from streamer.commands import quarantined_rows as quarantine_command

    _, _, address = load_with_target()
    choice = quarantine_command.Choice(table, database, sid)
    rows = run_to_end(quarantine_command.read_rows(address, choice, limit))
    show(quarantine_command.LISTING, rows, as_json=as_json)


def _request_action(
    action: str,
    table: str | None,
    database: str | None,
    sid: str | None,
    numbers: list[int] | None,
    *,
    no_wait: bool,
    as_json: bool,
) -> None:
    from streamer.commands import quarantined_rows as quarantine_command

    _, _, address = load_with_target()
    choice = quarantine_command.Choice(table, database, sid, tuple(numbers or ()))
    requested = run_to_end(quarantine_command.request_action(address, action, choice))
    if not requested and not as_json:
        typer.echo("no changes are in quarantine")
    tables = [{"table": name, "rows": count} for name, count in requested.values()]
    names = {number: f"{name}, {count} changes" for number, (name, count) in requested.items()}
    answer = {"action": action, "tables": tables}
    follow_requests(address, names, answer, waits=not no_wait, as_json=as_json)


@quarantine.command("retry", epilog=example("streamer quarantine retry orders"))
def retry_quarantine(
    table: OptionalTable = None,
    number: IdOption = None,
    database: DatabaseOption = None,
    sid: SidOption = None,
    no_wait: NoWaitOption = False,
    as_json: JsonOption = False,
) -> None:
    """Apply changes again, in source order, with all quarantined changes to the same rows.

    Changes that the target rejects again stay in quarantine.
    """
    _request_action("retry", table, database, sid, number, no_wait=no_wait, as_json=as_json)


@quarantine.command("drop", epilog=example("streamer quarantine drop --id 17 --yes"))
def drop_quarantine(
    table: OptionalTable = None,
    number: IdOption = None,
    database: DatabaseOption = None,
    sid: SidOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Confirm.")] = False,
    no_wait: NoWaitOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete changes from quarantine. The target never receives dropped changes.

    streamer then applies later changes of these rows as usual, instead of moving them into
    quarantine.
    """
    if table is None and not number:
        fail("give a TABLE, or changes with --id", 2)
    if not yes:
        fail("the target never receives dropped changes; add --yes to confirm", 2)
    _request_action("drop", table, database, sid, number, no_wait=no_wait, as_json=as_json)
