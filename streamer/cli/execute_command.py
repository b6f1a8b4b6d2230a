"""The command ``execute``: runs a script once, at a defined point of the stream."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from streamer.cli.shared_options import DatabaseOption, JsonOption, SidOption
from streamer.cli.terminal import fail, load_with_target, print_json, run_to_end, show
from streamer.errors.error_classes import StreamerError

if TYPE_CHECKING:
    from streamer.bookkeeping.scripts import ScriptSide
    from streamer.commands.execute_script import Script
    from streamer.mapping.rules import Mapping, SourceMapping
    from streamer.target.connection import TargetAddress


def execute(
    file: Annotated[
        Path | None,
        typer.Argument(help="File with SQL; - for standard input.", metavar="FILE"),
    ] = None,
    script_id: Annotated[
        str | None, typer.Option("--id", help="Name of the script; it runs once.", metavar="NAME")
    ] = None,
    on: Annotated[
        Literal["source", "target", "both"],
        typer.Option("--on", help="Where to run the script."),
    ] = "both",
    timeout: Annotated[
        float,
        typer.Option(help="Seconds to wait for the target; then the exit code is 1.", min=0),
    ] = 60,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Run FILE at the target in place of the script."),
    ] = False,
    skip: Annotated[
        bool,
        typer.Option("--skip", help="Skip the script at the target, and continue the stream."),
    ] = False,
    list_all: Annotated[
        bool, typer.Option("--list", help="List the scripts and their states.")
    ] = False,
    database: DatabaseOption = None,
    sid: SidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run an SQL script once, at the same point of the stream on both sides.

    Each side runs the script in a transaction. The target does so when the stream reaches the
    script: after all changes committed before, and before all later changes. A second call with the
    same id has no effect. A script that fails is rolled back.

    While a script fails at the target, the stream of its source stops; --replace or --skip lets it
    continue. A script in the state `missed`, which a new slot leaves out or a failover lost, needs
    --skip.
    """
    from streamer.bookkeeping.scripts import ScriptSide
    from streamer.commands import execute_script as execute_command

    settings, mapping, address = load_with_target(needs_sources=True)
    if list_all:
        _list(address, _choose(mapping, database, sid, ScriptSide.SOURCE), as_json)
        return
    if script_id is None or not script_id.strip():
        fail("give the script a name with --id", 2)
    if skip:
        sources = _choose(mapping, database, sid, ScriptSide.TARGET)
        run_to_end(execute_command.change(address, sources, script_id, None))
        _print_change("skipped", script_id, as_json)
        return
    text = _read(file)
    if replace:
        sources = _choose(mapping, database, sid, ScriptSide.TARGET)
        run_to_end(execute_command.change(address, sources, script_id, text))
        _print_change("replaced", script_id, as_json)
        return
    script = execute_command.Script(script_id, text, ScriptSide(on))
    sources = _choose(mapping, database, sid, script.side)
    _run(settings, address, sources, script, timeout, as_json)


def _choose(
    mapping: "Mapping", database: str | None, sid: str | None, side: "ScriptSide"
) -> "list[SourceMapping]":
    from streamer.commands import execute_script as execute_command

    try:
        return execute_command.choose(mapping, database, sid, side)
    except StreamerError as exc:
        fail(str(exc), exc.exit_code)


def _read(file: Path | None) -> str:
    if file is None:
        fail("give a FILE with the script, or - for standard input", 2)
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        text = data.decode()
    except OSError as exc:
        fail(f"{file}: {exc.strerror}", 2)
    except UnicodeDecodeError:
        fail(f"{file}: the script is not UTF-8", 2)
    if not text.strip() or "\0" in text:
        fail(f"{file}: the script contains no SQL", 2)
    return text


def _run(
    settings: Any,
    address: "TargetAddress",
    sources: "list[SourceMapping]",
    script: "Script",
    seconds: float,
    as_json: bool,
) -> None:
    from streamer.commands import execute_script as execute_command

    results = run_to_end(
        execute_command.execute(
            address, sources, script, seconds=seconds, target_namespace=settings.target.schema_
        )
    )
    if as_json:
        print_json({"scripts": [result.to_json() for result in results]})
    for result in results:
        if result.record.state in execute_command.STOPPED:
            fail(execute_command.describe(result), 4)
        if not result.record.has_ended:
            fail(f"after {seconds:g} s: {execute_command.describe(result)}", 1)
        if not as_json:
            typer.echo(execute_command.describe(result))


def _print_change(action: str, script_id: str, as_json: bool) -> None:
    if as_json:
        print_json({"id": script_id, "action": action})
    else:
        typer.echo(f'script "{script_id}" {action}; the stream continues within seconds')


def _list(address: "TargetAddress", sources: "list[SourceMapping]", as_json: bool) -> None:
    from streamer.commands import execute_script as execute_command

    results = run_to_end(execute_command.list_scripts(address, sources))
    show(execute_command.LISTING, results, as_json=as_json)
