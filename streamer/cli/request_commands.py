"""The commands that make requests: the table commands, and ``streamer requests``."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamer.cli.shared_options import (
    DatabaseOption,
    JsonOption,
    NoWaitOption,
    SidOption,
    TableArgument,
)
from streamer.cli.terminal import fail, load_with_target, print_json, run_to_end, show
from streamer.control.resync_options import SKIP_CHANGES, Mode
from streamer.errors.command_lines import command
from streamer.errors.error_classes import StreamerError
from streamer.errors.remedies import CONTINUES

if TYPE_CHECKING:
    from streamer.commands import request_outcomes
    from streamer.target.connection import TargetAddress


def requests(
    request_id: Annotated[
        int | None, typer.Argument(help="Only this request.", metavar="ID", max=2**63 - 1)
    ] = None,
    limit: Annotated[int, typer.Option(help="Maximum number of requests.", min=1)] = 100,
    as_json: JsonOption = False,
) -> None:
    """List requests of operators with state and outcome, oldest first.

    `queued`: no process has taken the request. `taken`: a process works on the request. `done`, or
    `failed` with the reason. The requests that streamer makes itself are in the list, too.
    """
    from streamer.commands import request_outcomes

    _, _, address = load_with_target()
    rows = run_to_end(request_outcomes.read(address, request_id, limit))
    show(request_outcomes.LISTING, rows, as_json=as_json)


def follow_requests(
    address: "TargetAddress",
    requested: Mapping[int, str],
    answer: dict[str, Any],
    *,
    waits: bool,
    as_json: bool,
    expects_process: bool = False,
) -> None:
    """Print requests, wait for the outcomes and print the outcomes.

    *requested*: labels by the ids of requests. *answer*: what JSON contains beside the outcomes.
    *expects_process*: without a process for the source, wait for its next start. The exit code is
    4 if a request has failed, and 1 if a process is late. Without a process the request waits for
    the next `run`, as after `--no-wait`.
    """
    import asyncio

    from streamer.bookkeeping.bookkeeping_schema import installed
    from streamer.bookkeeping.requests import read_requests
    from streamer.commands import request_outcomes
    from streamer.observability.logs import redact

    action = answer["action"]
    for number, label in {} if as_json else requested.items():
        typer.echo(f"{action} requested: {label}, request {number}")

    async def read() -> request_outcomes.Outcomes:
        async with installed(address, f"streamer {action}") as bookkeeping:
            if not waits:
                return request_outcomes.Outcomes(await read_requests(bookkeeping, list(requested)))
            try:
                return await request_outcomes.await_outcomes(
                    bookkeeping,
                    list(requested),
                    expects_process=expects_process,
                    report=lambda cause: typer.echo(f"streamer: waits: {redact(cause)}", err=True),
                )
            except asyncio.CancelledError:
                numbers = ", ".join(map(str, requested))
                typer.echo(f"streamer: requests that continue: {numbers}", err=True)
                raise

    ended = request_outcomes.Outcomes([])
    if requested and (waits or as_json):
        ended = run_to_end(read())
    if as_json:
        print_json(answer | {"requests": ended.requests})
    for request in ended.requests if waits else ():
        label, reason = requested[request.request_id], request.reason
        remedy = request.error and request.error.remedy
        if reason is not None and remedy is not None and remedy.sql and not remedy.commands:
            reason = f"{reason}; {CONTINUES}"
        words = label if reason is None else f"{label}: {redact(reason)}"
        if request.has_failed:
            typer.echo(f"streamer: {action} failed: {words}", err=True)
        elif not (request.is_open or as_json):
            typer.echo(f"{action} done: {words}")
    if waits and any(request.has_failed for request in ended.requests):
        raise typer.Exit(4)
    if ended.obstacle is None:
        return
    line = _describe_open(ended)
    if not ended.is_absent:
        fail(line, 1)
    typer.echo(f"streamer: {line}", err=True)


def _describe_open(ended: "request_outcomes.Outcomes") -> str:
    """Return the line about the requests that are still open."""
    from streamer.bookkeeping.requests import name_requests

    waiting = [request for request in ended.requests if request.is_open]
    is_one = len(waiting) == 1
    numbers, s = [request.request_id for request in waiting], "s" if is_one else ""
    words = "the request" if is_one else "the requests"
    act = f"continue{s}" if waiting[0].taken_at else f"take{s}"
    then = f"the next `streamer run` {act} {words}" if ended.is_absent else f"{words} stay{s}"
    shown = command("requests", *(map(str, numbers) if is_one else ()))
    wait = f"{name_requests(numbers)} wait{s}: {ended.obstacle}"
    return f"{wait}; {then}; read the outcome with: {shown}"


def _request(
    action: str,
    table: str,
    database: str | None,
    sid: str | None,
    options: dict[str, Any] | None = None,
    *,
    no_wait: bool,
    as_json: bool,
) -> None:
    from streamer.commands import table_requests as requests_command

    _, _, address = load_with_target()
    requested = run_to_end(
        requests_command.request(
            address, action, table, database=database, sid=sid, options=options
        )
    )
    for name in [] if as_json else requested.left_out:
        typer.echo(f"left out: {name}, paused before a mass delete; to resume the table, name it")
    answer = {"action": action, "tables": requested.names, "left_out": requested.left_out}
    follow_requests(address, requested.requests, answer, waits=not no_wait, as_json=as_json)


def resync(
    table: TableArgument,
    database: DatabaseOption = None,
    sid: SidOption = None,
    mode: Annotated[
        Mode, typer.Option(help="reload rewrites all rows, diff only those that differ.")
    ] = Mode.RELOAD,
    where: Annotated[
        str | None,
        typer.Option(
            help="Copy only rows for which this SQL condition on the source's columns is true.",
            metavar="EXPR",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            help="Copy only these columns of existing rows: the target's names, separated by "
            "commas.",
            metavar="COLUMNS",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Leave out columns that the target lacks.")
    ] = False,
    skip_changes: Annotated[
        bool,
        typer.Option(
            SKIP_CHANGES,
            help="Drop the waiting changes from before the copy. The history in a history or "
            "append table, or in a table that marks deleted rows, then has a gap.",
        ),
    ] = False,
    no_wait: NoWaitOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy a table again while the remaining tables keep streaming.

    The target stores the request: a running process acts at once, otherwise the next start does.
    Readers of the target see the old rows until a single transaction replaces them. The
    command waits for the end of the copy; Ctrl-C ends the command and leaves the copy running.
    """
    from streamer.copy.resync_scope import parse_resync, read_names

    try:
        names = None if columns is None else read_names(columns)
        scope = parse_resync(
            mode, force=force, where=where, columns=names, skips_changes=skip_changes
        )
    except StreamerError as exc:
        fail(str(exc), exc.exit_code)
    options = scope.to_json()
    _request("resync", table, database, sid, options, no_wait=no_wait, as_json=as_json)


def pause(
    table: TableArgument,
    database: DatabaseOption = None,
    sid: SidOption = None,
    no_wait: NoWaitOption = False,
    as_json: JsonOption = False,
) -> None:
    """Hold a table's changes until `resume`. The source retains their WAL.

    The target stores the request: a running process acts at once, otherwise the next start does.
    """
    _request("pause", table, database, sid, no_wait=no_wait, as_json=as_json)


def resume(
    table: TableArgument,
    database: DatabaseOption = None,
    sid: SidOption = None,
    skip_deletes: Annotated[
        bool,
        typer.Option(
            "--skip-deletes",
            help="Skip the deletes of the transaction before which `max_deleted_rows` paused "
            "the table.",
        ),
    ] = False,
    no_wait: NoWaitOption = False,
    as_json: JsonOption = False,
) -> None:
    """Continue a table that is paused or in error.

    If `max_deleted_rows` paused the table, the command applies the transaction only if it names the
    table. A pattern does not resume the table.
    The target stores the request: a running process acts at once, otherwise the next start does.
    """
    options = {"skip_deletes": True} if skip_deletes else None
    _request("resume", table, database, sid, options, no_wait=no_wait, as_json=as_json)


def restart(
    source: Annotated[
        str, typer.Argument(help="The source: DATABASE or DATABASE:SID.", metavar="SOURCE")
    ],
    no_wait: NoWaitOption = False,
    as_json: JsonOption = False,
) -> None:
    """Restart the work on a running source; other sources continue.

    The process writes the changes that it has read, closes the sessions of the source, connects
    again, and reads the definitions of all tables again. A copy that runs begins again, or
    continues after its last finished chunk. The command waits until the source streams; the exit
    code is 4 if the start fails or no process runs the source.
    """
    from streamer.commands import source_requests
    from streamer.commands.table_requests import command_actor

    _, _, address = load_with_target()
    requested = run_to_end(source_requests.restart(address, source, command_actor()))
    follow_requests(
        address,
        {requested.request_id: requested.label},
        {"action": "restart", "source": requested.label},
        waits=not no_wait,
        as_json=as_json,
        expects_process=requested.expects_process,
    )
