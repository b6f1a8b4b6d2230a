"""``streamer conflicts``: changes whose row the target lacked, or had already."""

from typing import Annotated

import typer

from streamer.cli.shared_options import DatabaseOption, JsonOption, SidOption
from streamer.cli.terminal import load_with_target, run_to_end, show


def conflicts(
    tables: Annotated[
        list[str] | None,
        typer.Argument(help="Source tables: names or patterns.", metavar="TABLE"),
    ] = None,
    limit: Annotated[int, typer.Option(help="Maximum number of conflicts.", min=1)] = 100,
    database: DatabaseOption = None,
    sid: SidOption = None,
    as_json: JsonOption = False,
) -> None:
    """List conflicts between changes and rows of the target, newest first.

    An update of a missing row inserts the row, and a delete of a missing row has no effect. A
    conflict of any other kind stops the table, or the change goes into quarantine. The target
    keeps the newest conflicts of each table (`conflicts_kept`).
    """
    from streamer.commands import conflict_log as conflicts_command
    from streamer.mapping.scope import Scope

    _, _, address = load_with_target()
    scope = Scope(tuple(tables or ()), database, sid)
    records = run_to_end(conflicts_command.read_conflicts(address, scope, limit))
    show(conflicts_command.LISTING, records, as_json=as_json)
