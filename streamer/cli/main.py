"""The command line, and the commands about the stream, its tables and incidents."""

import atexit
import gc
import json
import signal
import socket
import sys
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from typer.core import TyperGroup

from streamer.cli import cutover_command, mapping_commands, request_commands
from streamer.cli import execute_command as scripts_command
from streamer.cli import tenants_commands as tenant_commands
from streamer.cli import users_commands as user_commands
from streamer.cli.conflicts_command import conflicts
from streamer.cli.ddl_commands import ddl
from streamer.cli.quarantine_commands import quarantine
from streamer.cli.shared_options import (
    ACCESS,
    INCIDENTS,
    MAPPING,
    PANELS,
    STREAM,
    TABLES,
    CompareTimeoutOption,
    DatabaseOption,
    JsonOption,
    ProblemsOption,
    SidOption,
    TableArgument,
    TableFilterOption,
    UrlOption,
    WhereOption,
    example,
)
from streamer.cli.terminal import (
    GLOBALS,
    fail,
    load,
    load_to_show,
    load_with_target,
    print_json,
    print_remaining,
    run_to_end,
    target_of,
    with_mapping_database,
)
from streamer.compiled import choice
from streamer.errors.error_classes import StreamerError
from streamer.util.lsn import Lsn


def _join_lines(command: Any) -> None:
    """Join the lines of each paragraph in the help of *command* and of its subcommands."""
    paragraphs = (command.help or "").split("\n\n")
    command.help = "\n\n".join(" ".join(lines.split()) for lines in paragraphs)
    for inner in getattr(command, "commands", {}).values():
        _join_lines(inner)


class _ByPanel(TyperGroup):
    """Lists commands in the order of the panels, and so the panels of the help in that order."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        _join_lines(self)

    def list_commands(self, ctx: Any) -> list[str]:
        def place(name: str) -> int:
            panel = getattr(self.commands[name], "rich_help_panel", None)
            return PANELS.index(panel) if panel in PANELS else len(PANELS)

        return sorted(super().list_commands(ctx), key=place)


app = typer.Typer(
    name="streamer",
    cls=_ByPanel,
    help="Replicate many PostgreSQL databases into one.",
    epilog="`streamer COMMAND --help` explains a command and shows an example.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)


def _require_choice() -> None:
    if choice.error is not None:
        fail(str(choice.error), choice.error.exit_code)


def _print_version(value: bool) -> None:
    if value:
        from streamer.observability import build_facts

        _require_choice()
        for name, version in build_facts.facts().items():
            typer.echo(f"{name} {version}")
        raise typer.Exit


@app.callback()
def options(
    config: Annotated[Path, typer.Option("--config", "-c", help="Configuration file.")] = Path(
        "config.yaml"
    ),
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(help="Least severe level to log."),
    ] = "info",
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Format of log lines.")
    ] = "text",
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the versions of streamer, Python, PostgreSQL and Spark, and exit.",
        ),
    ] = False,
) -> None:
    """Replicate many PostgreSQL databases into one."""
    from streamer.observability import logs

    del version
    _require_choice()
    GLOBALS.config = config
    GLOBALS.log_level = log_level
    GLOBALS.log_format = log_format
    logs.configure(log_level, log_format)


@app.command(rich_help_panel=STREAM, epilog=example("streamer run --only shop:eu"))
def run(
    stop_at_lsn: Annotated[
        str | None,
        typer.Option(
            help="Apply all changes up to this LSN of the source, then exit.", metavar="LSN"
        ),
    ] = None,
    stop_when_caught_up: Annotated[
        bool,
        typer.Option(
            "--stop-when-caught-up", help="Apply all changes committed so far, then exit."
        ),
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Run only this source; repeatable.", metavar="DATABASE[:SID]"),
    ] = None,
    take_over: Annotated[
        list[str] | None,
        typer.Option(
            help="Use the slot and publications of this source even if another installation owns "
            "them; repeatable.",
            metavar="DATABASE[:SID]",
        ),
    ] = None,
    max_sources: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Run at most this many sources, and leave the rest to other processes.",
            metavar="N",
        ),
    ] = None,
    watch_config: Annotated[
        bool,
        typer.Option(
            "--watch-config",
            help="Read the configuration again whenever the file changes, as at SIGHUP.",
        ),
    ] = False,
    process: Annotated[
        str | None, typer.Option(hidden=True, help="Set by the parent of several processes.")
    ] = None,
) -> None:
    """Copy the tables and stream their changes until a signal arrives.

    Several processes with the same configuration share the sources evenly. If a process ends,
    the remaining processes take over its sources within seconds. With `processes` in the
    configuration, this command starts that many of them.

    On SIGTERM or SIGINT, streamer stops reading, commits the changes it has, reports them to the
    sources and exits within 10 seconds. On a second signal it exits at once.

    On SIGHUP, streamer reads the configuration again and applies changes to `sources` and
    `notify`; unchanged tables and sources continue. If the file has an error, streamer rejects the
    whole file. A change of any further setting needs a restart.
    """
    # Ignore the signal until the handlers exist: streamer has not read the configuration yet.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from streamer.cli import run_command
    from streamer.runtime.child_processes.child_process import Membership

    lsn = None
    if stop_at_lsn is not None:
        try:
            lsn = Lsn.parse(stop_at_lsn)
        except ValueError:
            fail(
                f"--stop-at-lsn {stop_at_lsn}: not an LSN; write it as PostgreSQL does: 0/16B3748",
                2,
            )
    code = run_to_end(
        run_command.run(
            GLOBALS.config,
            GLOBALS.overrides,
            only or [],
            lsn,
            when_caught_up=stop_when_caught_up,
            take_over=take_over or [],
            max_sources=max_sources,
            membership=None if process is None else Membership.parse(process),
            watches_file=watch_config,
        )
    )
    if code:
        raise typer.Exit(code)


@app.command(rich_help_panel=STREAM, epilog=example("streamer -c config.yaml check"))
def check(
    sql: Annotated[
        Path | None,
        typer.Option(help="Write the statements of all findings to this file, as a psql script."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Report all problems that would stop `run`, with the SQL that fixes them.

    The command makes no changes at the servers. Its exit code is 1 if there is an error.
    """
    from streamer.commands.check import check as check_command
    from streamer.commands.check.planned_copies import copy_lines
    from streamer.commands.check.sql_file import sql_file

    settings, mapping = load()
    report = run_to_end(check_command.check(settings, mapping))
    if sql is not None:
        try:
            sql.write_text(sql_file(report), encoding="utf-8")
        except OSError as exc:
            fail(f"--sql {sql}: {exc.strerror}", 2)
    if as_json:
        print_json(report.to_json())
    else:
        for finding in report.findings:
            typer.echo("\n".join(finding.lines()))
        for line in copy_lines(
            [planned.to_json() for planned in report.copies], settings.sync.sources_at_once
        ):
            typer.echo(line)
    if report.exit_code:
        fail(report.summary, report.exit_code)
    if not as_json:
        typer.echo(report.summary)


@app.command(rich_help_panel=STREAM, epilog=example("streamer status --watch --interval 5"))
def status(
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    interval: Annotated[
        float, typer.Option(help="Seconds between refreshes with --watch.", min=0.2)
    ] = 2.0,
    wide: Annotated[
        bool, typer.Option("--wide", help="Print all columns, even in a narrow terminal.")
    ] = False,
    tables: TableFilterOption = None,
    problems: ProblemsOption = False,
    database: DatabaseOption = None,
    sid: SidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the state of every source and table, read from the databases.

    The command works whether or not `run` is running. A line above the sources says how many are
    fine, and names those with problems. On a terminal, --watch shows a page at a time: space and b
    turn the pages. With --json, each refresh is a line.
    """
    from rich.console import Console

    from streamer.commands import status as status_command
    from streamer.commands import status_output
    from streamer.commands.status_problems import only_problems
    from streamer.mapping.scope import Scope

    settings, mapping, state = load_to_show()
    address = target_of(settings)
    scope = Scope(tuple(tables or ()), database, sid)

    async def read() -> status_command.StatusReport:
        report = await status_command.read_report(address, mapping, state, scope)
        return only_problems(report) if problems else report

    if watch:
        run_to_end(status_output.watch(read, interval, Console(), is_wide=wide, as_json=as_json))
        return
    report = run_to_end(read())
    if as_json:
        print_json(status_output.as_json_object(report))
    else:
        status_output.print_status(report, Console(), is_wide=wide)
    if report.exit_code:
        fail(report.failure, report.exit_code)


@app.command(rich_help_panel=INCIDENTS, epilog=example("streamer health --json"))
def health(as_json: JsonOption = False) -> None:
    """Ask the running process of this configuration whether it works.

    The exit code is 0 if the process answers, and 1 otherwise. With an empty `http.listen`, the
    process answers no client, and the exit code is 0. Tables in error do not change the exit code;
    see `status`.
    """
    from streamer.commands.health_check import ask_health
    from streamer.config import static_mapping

    try:
        _, settings = static_mapping.read(GLOBALS.config, GLOBALS.overrides)
    except StreamerError as exc:
        fail(str(exc), exc.exit_code)
    answer = ask_health(settings.http.listen)
    if as_json:
        print_json(answer)
    if answer.healthy is False:
        fail(str(answer), 1)
    if not as_json:
        typer.echo(str(answer))


@app.command(rich_help_panel=INCIDENTS, epilog=example("streamer notify"))
def notify(as_json: JsonOption = False) -> None:
    """Send a test message to the webhook of `notify`.

    The message contains the headers and the signature of a notification, and an empty list of
    problems. The exit code is 0 if the receiver accepts the message, and 1 otherwise. A running
    process is not necessary.
    """
    from streamer.commands.try_webhook import try_webhook
    from streamer.config import static_mapping

    try:
        _, settings = static_mapping.read(GLOBALS.config, GLOBALS.overrides)
    except StreamerError as exc:
        fail(str(exc), exc.exit_code)
    delivery = run_to_end(try_webhook(settings))
    if as_json:
        print_json(delivery)
    if delivery.problem is not None:
        fail(f"notification not sent: {delivery.problem}", 1)
    if not as_json:
        typer.echo(f"{delivery.receiver} has accepted a test message")


@app.command(rich_help_panel=INCIDENTS, epilog=example("streamer doctor --bundle report.zip"))
def doctor(
    bundle: Annotated[
        Path | None,
        typer.Option(help="Also write a zip file for a bug report, without secrets."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Diagnose problems, and name the next step for each.

    The diagnosis lists the problems of `status`, and the further findings of `check`. The exit code
    is 1 if a problem has the severity `error`; warnings do not change the exit code. Server
    messages in a bundle can contain values of rows, and secrets of fewer than four characters:
    review the bundle before you share it.
    """
    from streamer.admin.page.manual_page import reachable_address
    from streamer.commands.doctor import bug_report as bundle_command
    from streamer.commands.doctor import diagnosis as doctor_command
    from streamer.commands.health_check import find_page

    if bundle is not None:
        run_to_end(bundle_command.check_new(bundle))
    settings, mapping, state = load_to_show()
    diagnosis = run_to_end(doctor_command.diagnose(settings, mapping, state))
    if bundle is not None:
        run_to_end(bundle_command.write_bundle(bundle, settings, mapping, diagnosis))
    if as_json:
        print_json(diagnosis.to_json())
    else:
        replicas = diagnosis.status.fleet.replicas
        addresses = [r.address for r in replicas if r.address and r.is_near(socket.gethostname())]
        address_of = partial(reachable_address, listen=find_page(addresses, settings.http.listen))
        for line in doctor_command.sentences(diagnosis, address_of):
            typer.echo(line)
        if bundle is not None:
            typer.echo(f"wrote {bundle}; review it before you share it")
    if not diagnosis.is_well:
        raise typer.Exit(1)


@app.command("events", rich_help_panel=INCIDENTS, epilog=example("streamer events --follow --json"))
def show_events(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with new events until Ctrl-C.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Include lag and rates, which change every second.")
    ] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the state of every source and table; with --follow, also new events.

    The events come from the running process of this configuration, or from the process at --url,
    with the token in STREAMER_ADMIN__TOKEN. Without such a process, the command reads the
    bookkeeping tables.
    """
    from streamer.admin.live import event_tail
    from streamer.commands.terminal_screen import show_until_interrupted
    from streamer.config import static_mapping

    async def show() -> None:
        _, settings = static_mapping.read(GLOBALS.config, GLOBALS.overrides)
        async for name, data in event_tail.tail(settings, url, follow=follow):
            if name in event_tail.FREQUENT and not everything:
                continue
            now = datetime.now().astimezone()
            line = event_tail.as_line((name, data), now)
            if as_json:
                line = json.dumps({"at": now.isoformat(), "event": name, **data}, default=str)
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    run_to_end(show_until_interrupted(show()))


@app.command(rich_help_panel=STREAM, epilog=example("streamer wait orders --timeout 300"))
def wait(
    tables: Annotated[
        list[str] | None,
        typer.Argument(help="Wait for these tables only: names or patterns.", metavar="TABLE"),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds until the command gives up with exit code 1.", min=0)
    ] = 60,
    named: TableFilterOption = None,
    problems: ProblemsOption = False,
    database: DatabaseOption = None,
    sid: SidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Wait until the target shows all changes committed so far and every table is ready.

    The exit code is 1 after the timeout, and 2 if the mapping has no sources. A source that does
    not answer counts as behind, and the message names the source. The filters work as in `status`.
    With --problems, the command waits for the sources that have a problem when the command starts.
    """
    from streamer.commands import wait as wait_command
    from streamer.commands.status_problems import sources_with_problems
    from streamer.mapping.scope import Scope

    _, mapping, address = load_with_target(needs_sources=True)
    scope = Scope((*(tables or ()), *(named or ())), database, sid)

    async def wait_for_scope() -> str | None:
        meant = await sources_with_problems(address, mapping, scope) if problems else scope
        return await wait_command.wait(address, mapping, timeout, meant)

    missing = run_to_end(wait_for_scope())
    if as_json:
        print_json({"caught_up": missing is None, "missing": missing})
    if missing is not None:
        fail(missing, 1)


TablesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Source tables: names or patterns.", metavar="TABLE"),
]


@app.command(
    rich_help_panel=TABLES, epilog=example("streamer compare 'sales.*' --report rows.parquet")
)
def compare(
    tables: TablesArgument = None,
    where: WhereOption = None,
    values: Annotated[
        bool, typer.Option("--values", help="Show the values of rows that differ.")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Write all rows that differ to this file: Parquet (.parquet) or JSON Lines "
            "(.jsonl)."
        ),
    ] = None,
    sql: Annotated[
        Path | None,
        typer.Option(
            help="Write to this file the SQL that would correct the target. It contains values "
            "of rows."
        ),
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Then repair, as `streamer repair` does.")
    ] = False,
    definitions: Annotated[
        bool,
        typer.Option("--definitions", help="Also exit with code 1 if definitions differ."),
    ] = False,
    timeout: CompareTimeoutOption = 120,
    continues: Annotated[
        bool,
        typer.Option(
            "--continue",
            help="Continue an interrupted comparison that began within the last day, without the "
            "ranges of rows that it found equal.",
        ),
    ] = False,
    database: DatabaseOption = None,
    sid: SidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the rows and definitions of sources and target while both keep changing.

    The exit code is 0 if all rows are equal, and 1 if rows differ or the command cannot tell. The
    comparison holds no locks and stops no stream. If a row differs, the command reads the row on
    both sides again until the target has the source's changes. The command compares only the
    definitions that `create` asks for.
    """
    if repair and sql is not None:
        fail("--repair and --sql cannot be used together", 2)
    if repair and continues:
        fail("--repair and --continue cannot be used together: a repair reads all rows again", 2)
    options: dict[str, Any] = {
        "with_values": values,
        "report": report,
        "sql": sql,
        "continues": continues,
        "strict": definitions,
    }
    _compare(tables, where, database, sid, timeout, as_json, repairs=repair, **options)


@app.command(rich_help_panel=TABLES, epilog=example("streamer repair orders --sid eu"))
def repair(
    table: TableArgument,
    sql: Annotated[
        Path | None,
        typer.Option(
            help="Write the SQL that would correct the target to this file, and change no rows. "
            "The file contains values of rows."
        ),
    ] = None,
    timeout: CompareTimeoutOption = 120,
    database: DatabaseOption = None,
    sid: SidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Correct the rows of the target that differ from the source.

    The command compares the table, lets the running process copy the rows that differ, as `resync
    --where` does, and compares the table again. The exit code is 0 if the table is equal at the
    end.
    """
    _compare([table], None, database, sid, timeout, as_json, repairs=sql is None, sql=sql)


def _compare(
    tables: list[str] | None,
    where: str | None,
    database: str | None,
    sid: str | None,
    seconds: float,
    as_json: bool,
    *,
    repairs: bool,
    strict: bool = False,
    **given: Any,
) -> None:
    """Compare, and print the results. *strict*: different definitions change the exit code."""
    from rich.console import Console

    from streamer.commands import compare_command
    from streamer.commands import repair as repair_command
    from streamer.compare.comparison import ComparisonScope, Options

    settings, mapping = load(needs_sources=True)
    jobs, rate = settings.sync.jobs, settings.sync.rows_per_second
    options = Options(jobs=jobs, rows_per_second=rate, seconds=seconds, definitions=True, **given)
    try:
        condition = compare_command.parse_where(where)
    except StreamerError as exc:
        fail(str(exc), exc.exit_code)
    scope = ComparisonScope(tuple(tables or ()), database, sid, where=condition)
    run = repair_command.repair if repairs else compare_command.compare
    results = run_to_end(run(settings, mapping, scope, options))
    if as_json:
        print_json({"tables": [result.to_json() for result in results]})
    else:
        compare_command.print_results(results, Console())
    if (summary := compare_command.summarize(results, strict=strict)) is not None:
        fail(summary, 1)


app.command(
    rich_help_panel=TABLES,
    epilog=example("streamer resync orders --database shop --sid eu --mode diff"),
)(request_commands.resync)
app.command(rich_help_panel=TABLES, epilog=example("streamer pause orders"))(request_commands.pause)
app.command(rich_help_panel=TABLES, epilog=example("streamer resume '*.*' --database shop"))(
    request_commands.resume
)
app.command(rich_help_panel=INCIDENTS, epilog=example("streamer requests 17 --json"))(
    request_commands.requests
)
app.add_typer(ddl, rich_help_panel=INCIDENTS)

app.add_typer(quarantine, rich_help_panel=INCIDENTS)
app.command("conflicts", rich_help_panel=INCIDENTS, epilog=example("streamer conflicts orders"))(
    conflicts
)


@app.command(rich_help_panel=TABLES, epilog=example("streamer indexes --missing-fk --apply"))
def indexes(
    missing_fk: Annotated[
        bool, typer.Option("--missing-fk", help="Indexes on the columns of foreign keys.")
    ] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="Build the missing indexes on tables that are ready.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List indexes that the target lacks; with --apply, build them.

    The exit code is 1 if indexes are missing at the end.
    """
    if not missing_fk:
        fail("choose the indexes to list: --missing-fk", 2)
    from streamer.commands import missing_indexes as indexes_command

    settings, mapping, address = load_with_target()
    listed = run_to_end(
        indexes_command.missing_fk(address, mapping, settings.target.schema_, apply=apply)
    )
    if as_json:
        print_json({"indexes": [missing.to_json() for missing in listed]})
    else:
        for missing in listed:
            reason = f", {missing.reason}" if missing.reason else ""
            # The reason of a failure names the remaining statements.
            sql = "" if missing.state == "failed" else f": {missing.sql};"
            typer.echo(f"{missing.target}: {missing.state}{reason}{sql}")
    remaining = sum(missing.state != "built" for missing in listed)
    if remaining:
        fail(f"indexes missing on foreign keys: {remaining}", 1)
    if not as_json and not listed:
        typer.echo("every foreign key has an index")


@app.command(
    rich_help_panel=STREAM,
    epilog=example("streamer teardown --database shop --sid eu --yes"),
)
def teardown(
    database: DatabaseOption = None,
    sid: SidOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Confirm.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Drop slots, publications and bookkeeping. Rows in the target stay.

    If the role lacks a privilege or a source is unreachable, the command prints the remaining SQL
    and exits with 3. Objects in the schema `streamer` that streamer did not create stay.
    """
    from streamer.commands import teardown as teardown_command
    from streamer.commands.table_requests import command_actor
    from streamer.mapping.scope import Scope

    settings, mapping, address = load_with_target(needs_sources=True)
    try:
        sources = Scope(database=database, sid=sid).sources(mapping)
    except StreamerError as exc:
        fail(str(exc), exc.exit_code)
    if not yes:
        names = ", ".join(source.label for source in sources)
        fail(f"this drops the replication slots of {names}; add --yes to confirm", 2)
    actor = command_actor()
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
    print_remaining(results, on_stderr=as_json)
    if any(result.error is not None for result in results):
        raise typer.Exit(3)


@app.command(rich_help_panel=STREAM, epilog=example("streamer demo --seconds 60 --keep"))
def demo(
    seconds: Annotated[
        float, typer.Option(help="Duration of the workload, in seconds.", min=0)
    ] = 20,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave servers and streamer running at the end.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Demonstrate streamer on this machine: three servers, copy, stream and comparison.

    The exit code is 0 only if sources and target are equal at the end.
    """
    from streamer.commands.demo import demo as demo_command

    code = run_to_end(demo_command.demo(seconds, keep=keep, as_json=as_json))
    if code:
        raise typer.Exit(code)


app.command(
    "execute",
    rich_help_panel=STREAM,
    epilog=example("streamer execute 2026-11-add-note.sql --id 2026-11-add-note --on both"),
)(scripts_command.execute)
app.command(
    "cutover",
    rich_help_panel=STREAM,
    epilog=example("streamer cutover --reverse back.yaml --dry-run"),
)(cutover_command.cutover)
app.add_typer(mapping_commands.app)
mapping_commands.sources.command("restart", epilog=example("streamer sources restart shop:eu"))(
    request_commands.restart
)
app.add_typer(mapping_commands.sources, name="sources", rich_help_panel=MAPPING)
app.add_typer(mapping_commands.tables, name="tables", rich_help_panel=MAPPING)
app.add_typer(tenant_commands.tenants, name="tenants", rich_help_panel=MAPPING)
app.add_typer(user_commands.users, name="users", rich_help_panel=ACCESS)
app.add_typer(mapping_commands.config, name="config", rich_help_panel=MAPPING)
app.add_typer(mapping_commands.admin, name="admin", rich_help_panel=ACCESS)

COLLECT_AFTER: Final = (100_000, 20, 100)
"""Windows and imports make hundreds of thousands of objects, none of them in a cycle. By default,
Python searches for cycles at every 700th new object, which costs a fifth of the throughput.
"""
_GLOBAL_OPTIONS = ("-c", "--config", "--log-level", "--log-format")


def _globals_first(arguments: list[str]) -> list[str]:
    """Move global options before the command, from any place on the command line."""
    first: list[str] = []
    others_last: list[str] = []
    items = iter(arguments)
    for item in items:
        name, equals, _ = item.partition("=")
        if item == "--":
            others_last += [item, *items]
        elif name in _GLOBAL_OPTIONS:
            first.append(item)
            if not equals and (value := next(items, None)) is not None:
                first.append(value)
        else:
            others_last.append(item)
    return first + others_last


def main() -> None:
    """Run the command line."""
    gc.set_threshold(*COLLECT_AFTER)
    atexit.register(gc.freeze)  # so that the process ends without a traversal of all objects
    app(args=_globals_first(sys.argv[1:]))
