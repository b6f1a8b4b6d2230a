"""``streamer tenants``: the databases of a group, identified by sid."""

import sys
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from streamer.cli.shared_options import DatabaseOption, JsonOption, SidOption, UrlOption, example
from streamer.cli.terminal import (
    GLOBALS,
    fail,
    load_with_target,
    print_json,
    print_remaining,
    run_to_end,
    show,
)
from streamer.errors.command_lines import command

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from streamer.admin.service.mapping_client import MappingClient
    from streamer.bookkeeping.purges import PurgeRecord
    from streamer.commands.tenants.add_and_remove import TenantChange

T = TypeVar("T")

tenants = typer.Typer(
    help="Add, remove, purge and compare the databases of a group.", no_args_is_help=True
)

GroupArgument = Annotated[str, typer.Argument(help="Group of databases.", metavar="DATABASE")]
YesOption = Annotated[bool, typer.Option("--yes", help="Confirm.")]


@tenants.command("list", epilog=example("streamer tenants list --database shop"))
def list_tenants(database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """List mapped databases and schemas, and removed tenants with rows in the target."""
    from streamer.commands.tenants import tenant_list

    _, mapping, address = load_with_target()
    records = run_to_end(tenant_list.read_tenants(address, mapping, database))
    show(tenant_list.LISTING, records, as_json=as_json)


@tenants.command(
    "add",
    epilog=example("streamer tenants add shop 'postgresql://u:${PW}@{sid}-db/shop' --sid t7"),
)
def add_tenants(
    database: GroupArgument,
    source_url: Annotated[
        str,
        typer.Argument(
            help="libpq URL, preferably with ${NAME} as password; {sid} stands for the sid; - "
            "reads the URL from stdin.",
            metavar="SOURCE_URL",
        ),
    ],
    sid: Annotated[list[str], typer.Option(help="sid of the new tenant; repeatable.")],
    draft: Annotated[
        bool, typer.Option("--draft", help="With a mapping database: do not apply the draft.")
    ] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add databases to a group, with the tables and settings of the group.

    With a mapping database, the command applies the draft, unless the draft contains other changes.
    Without a mapping database, the command edits the configuration file. If the edit would lose
    comments or layout, the command prints the lines to add instead.
    """
    import asyncio

    from streamer.admin.service import edit_draft
    from streamer.commands.tenants import add_and_remove

    template = sys.stdin.readline().strip() if source_url == "-" else source_url
    settings, mapping, address = load_with_target()

    async def add() -> "TenantChange":
        urls = add_and_remove.urls_of(template, sid)
        await add_and_remove.check_new(address, mapping, database, sid)
        if settings.mapping_database is None:
            return await asyncio.to_thread(
                add_and_remove.add_to_file, GLOBALS.config, database, urls
            )
        return await _with_client(
            settings,
            mapping,
            url,
            lambda client: edit_draft.add_tenants(client, database, urls, applies=not draft),
        )

    _say(run_to_end(add()), "added", as_json=as_json)


@tenants.command("remove", epilog=example("streamer tenants remove shop --sid t7 --yes"))
def remove_tenant(
    database: GroupArgument,
    sid: Annotated[str, typer.Option(help="sid of the tenant.")],
    yes: YesOption = False,
    timeout: Annotated[
        float,
        typer.Option(help="Seconds to wait until the process has stopped the source.", min=0),
    ] = 60,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a tenant, and drop its slot and publications. Its rows in the target stay.

    `streamer tenants purge` then deletes the rows. Without a mapping database, send SIGHUP to the
    running process, so that the process reads the configuration file again; the command waits for
    that. The exit code is 1 if the process still runs the tenant after the timeout.
    """
    import asyncio

    from streamer.admin.service import edit_draft
    from streamer.commands.table_requests import command_actor
    from streamer.commands.tenants import add_and_remove
    from streamer.mapping.scope import Scope

    if not yes:
        fail("this drops the tenant's replication slot; add --yes to confirm", 2)
    settings, mapping, address = load_with_target()

    async def remove() -> "TenantChange":
        (source,) = Scope(database=database, sid=sid).sources(mapping)
        if settings.mapping_database is None:
            changed = await asyncio.to_thread(
                add_and_remove.remove_from_file, GLOBALS.config, database, sid
            )
        else:
            changed = await _with_client(
                settings,
                mapping,
                url,
                lambda client: edit_draft.remove_tenant(client, database, sid, applies=True),
            )
        if not changed.is_applied:
            fail(f'"{source.label}" is removed from the draft only: {changed.next_step}', 1)
        if changed.next_step is not None and not as_json:
            typer.echo(f"now {changed.next_step}", err=True)
        result = await add_and_remove.finish_removal(
            address, settings, source, command_actor(), timeout
        )
        if result is None:
            step = changed.next_step or "read the log of that process"
            fail(f'a process still runs "{source.label}"; {step}', 1)
        if result.is_elsewhere:
            fail(result.error or "", 3)
        print_remaining([result], on_stderr=True)
        step = f"delete its rows with: {command('tenants purge', database, '--yes', sid=sid)}"
        return add_and_remove.TenantChange([source.label], next_step=step, left_sql=result.left_sql)

    changed = run_to_end(remove())
    _say(changed, "removed", as_json=as_json)
    if changed.left_sql:
        raise typer.Exit(3)


def _say(changed: "TenantChange", outcome: str, *, as_json: bool) -> None:
    if as_json:
        print_json(changed.to_json())
        return
    if not changed.lines:
        typer.echo(f"{outcome}: {', '.join(changed.labels)}")
    for line in changed.lines:
        typer.echo(line)
    if changed.next_step is not None:
        typer.echo(f"now {changed.next_step}", err=bool(changed.lines))


async def _with_client(
    settings: Any,
    mapping: Any,
    url: str | None,
    work: "Callable[[MappingClient], Awaitable[T]]",
) -> T:
    from streamer.admin.service.mapping_client import open_client

    async with open_client(settings, GLOBALS.config, mapping, url) as client:
        return await work(client)


@tenants.command("purge", epilog=example("streamer tenants purge shop --sid t7 --yes"))
def purge_tenant(
    database: GroupArgument,
    sid: Annotated[str, typer.Option(help="sid of the tenant.")],
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete a removed tenant's rows in all target tables, in chunks.

    The command refuses a tenant that is in the mapping, or that a process streams. Rows in tables
    without a column sid remain, and the command names these tables. After an interruption, run it
    again: it continues where it stopped.
    """
    from streamer.commands.table_requests import command_actor
    from streamer.commands.tenants import purge_rows as purge_command

    if not yes:
        fail("this deletes all rows of the tenant in the target; add --yes to confirm", 2)
    _, mapping, address = load_with_target()
    shown: dict[str, str] = {}

    def report(records: "list[PurgeRecord]") -> None:
        for record in records:
            line = purge_line(record)
            if record.has_begun and shown.get(record.target) != line:
                shown[record.target] = line
                if not as_json:
                    typer.echo(line)

    outcome = run_to_end(
        purge_command.purge(address, mapping, database, sid, actor=command_actor(), report=report)
    )
    if as_json:
        print_json(outcome.to_json())
    else:
        typer.echo(f"purged: {outcome.rows_deleted:,} rows in {len(outcome.records)} tables")
        for table in outcome.remaining:
            typer.echo(str(table), err=True)
        if outcome.has_columns:
            drift_of = command("tenants drift", database=database)
            kept = "the target keeps columns that only removed tenants had"
            typer.echo(f"{kept}; `{drift_of}` names them", err=True)


def purge_line(record: "PurgeRecord") -> str:
    """Return the progress of a table's purge as one line."""
    if record.is_finished:
        return f"{record.target}: {record.rows_deleted:,} rows deleted, done"
    part = "" if record.progress is None else f", {record.progress:.0%} of the table"
    return f"{record.target}: {record.rows_deleted:,} rows deleted{part}"


@tenants.command("drift", epilog=example("streamer tenants drift --database shop"))
def drift(
    tables: Annotated[
        list[str] | None,
        typer.Argument(help="Source tables: names or patterns.", metavar="TABLE"),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also print items on which all tenants agree.")
    ] = False,
    database: DatabaseOption = None,
    sid: SidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare columns, types, keys and constraints between all tenants and the target.

    Each row of the matrix is a column, a key or a constraint. The row shows the definition of most
    tenants, the definition of the target, and the tenants that deviate. The exit code is 1 if a
    tenant or the target deviates, or if a tenant does not answer.
    """
    from streamer.commands.tenants import tenant_drift as drift_command
    from streamer.mapping.scope import Scope

    _, mapping, address = load_with_target(needs_sources=True)
    scope = Scope(tuple(tables or ()), database, sid)
    matrix = run_to_end(drift_command.read_drift(address, mapping, scope))
    if as_json:
        print_json(matrix.to_json())
    else:
        drift_command.render(matrix, everything=everything)
    if not matrix.is_equal:
        raise typer.Exit(1)
