"""The command ``cutover`` moves programs from a source to the target."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from streamer.cli.shared_options import DatabaseOption, JsonOption, SidOption
from streamer.cli.terminal import fail, load, print_json, run_to_end
from streamer.errors.error_classes import CutoverError, StreamerError

if TYPE_CHECKING:
    from streamer.commands.cutover.cutover import CutoverState
    from streamer.commands.cutover.cutover_steps import StepObstacle


def cutover(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the steps and run the checks, without changes.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Carry out the steps.")] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Go back to the state before the cut-over.")
    ] = False,
    stop_writes: Annotated[
        Literal["read-only", "operator"],
        typer.Option(
            help="read-only: streamer makes the source read-only; operator: you stop the writes."
        ),
    ] = "read-only",
    compare: Annotated[
        Literal["changes", "full", "counts"],
        typer.Option(
            help="Comparison after the stop: tables changed since the check, all rows, or row "
            "counts only."
        ),
    ] = "changes",
    reverse: Annotated[
        Path | None,
        typer.Option(
            help="Prepare a reverse stream to the source, and write its configuration to this "
            "file.",
            metavar="FILE",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Limit of each step, in seconds.", min=1)] = 60,
    database: DatabaseOption = None,
    sid: SidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Switch programs over from a source to the target, step by step.

    The steps are: check, stop writes at the source, drain, compare, set sequences, prepare the
    reverse stream if requested, finish. Without --yes the command only shows the steps. If the
    command is killed, run it again: it continues with the interrupted step. If a step exceeds its
    time limit, the command restores the state before the cut-over. --undo restores that state at
    any step before the last.
    """
    from streamer.commands.cutover.cutover import Cutover
    from streamer.commands.cutover.cutover_steps import CutoverOptions, FinalComparison, StopWrites
    from streamer.mapping.scope import Scope

    settings, mapping = load(needs_sources=True)
    try:
        sources = Scope(database=database, sid=sid).sources(mapping)
    except StreamerError as exc:
        fail(str(exc), exc.exit_code)
    if len(sources) > 1:
        names = ", ".join(source.label for source in sources)
        fail(f"a cut-over moves a single source; choose it with --database and --sid: {names}", 2)
    done: list[dict[str, str]] = []

    def report(step: str, outcome: str) -> None:
        done.append({"step": step, "outcome": outcome})
        if not as_json:
            typer.echo(f"{step}: {outcome}")

    async def run() -> "tuple[CutoverState, list[StepObstacle]]":
        comparison = FinalComparison(compare)
        options = CutoverOptions(StopWrites(stop_writes), comparison, reverse, timeout)
        async with Cutover(settings, mapping, sources[0], options, report) as work:
            state = await work.state()
            if undo:
                await work.undo()
                return state, []
            if not (as_json or dry_run):
                typer.echo("\n".join(state.lines()))
            if dry_run:
                await work.check()
            elif yes:
                try:
                    await work.run()
                except CutoverError:
                    if not work.obstacles:
                        raise
            return state, work.obstacles

    state, obstacles = run_to_end(run())
    if as_json:
        shown: dict[str, Any] = {
            "source": state.label,
            "finished": state.record is not None and state.record.is_finished,
            "steps": [step.value for step in state.remaining],
            "problems": [obstacle.to_json() for obstacle in obstacles],
            "done": done,
        }
        print_json(shown)
    elif state.remaining and (dry_run or obstacles):
        typer.echo("\n".join(state.marked_lines(obstacles)))
    if obstacles:
        steps = ", ".join(dict.fromkeys(obstacle.step.value for obstacle in obstacles))
        fail(f"the cut-over has not begun, because these steps would fail: {steps}", 1)
    if not state.remaining and not undo and not as_json:
        typer.echo(f"the cut-over of {state.label} has finished")
    if state.remaining and not (undo or yes or dry_run):
        fail("add --yes to carry out these steps, or --dry-run to check them first", 2)
