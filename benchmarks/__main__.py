"""``make bench``: every profile against PostgreSQL's own subscription, in a single table.

Both sides stream the same changes between the same two servers, one after the other. The time runs
from the start of the walsender until all changes are visible; the start of either program does not
count. After each round, the rows of all sides must equal the source's rows. The extension pglogical
is a third side if installed.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from benchmarks import report
from benchmarks.cases import CASES, Case
from benchmarks.runner import Options, Runner
from benchmarks.servers import find_binaries, has_pglogical, source_and_target, version_of
from benchmarks.usage import busy_share

IDLE_SHARE = 0.1
"""A machine that uses more than this fraction of its cores before the first round is not idle."""


def main() -> None:
    options = _parser().parse_args()
    # After a signal, stop the servers, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    if options.publish:
        for page in report.PAGES:
            report.check_marks(page.path)
    cases = _select(options.only)
    if options.list:
        for case in cases:
            print(f"{case.name:16} {case.title}")
        return
    binaries = find_binaries(options.postgres)
    size = Options(
        changes=options.changes,
        rounds=options.rounds,
        seconds=options.seconds,
        sides=tuple(options.sides.split(",")) if options.sides else (),
        with_pglogical=has_pglogical(binaries),
        settings=tuple(text.replace("=", ": ", 1) for text in options.setting),
    )
    facts = report.describe(version_of(binaries), size)
    console = Console(stderr=True)
    if (share := busy_share()) > IDLE_SHARE:
        console.print(
            f"[yellow]The machine is {share:.0%} busy before the first round; only ratios of this"
            " run mean anything.[/yellow]"
        )
    facts["busy_share_before"] = round(share, 2)
    began = time.monotonic()
    measured: list[report.Figure] = []
    with (
        tempfile.TemporaryDirectory(prefix="streamer-bench-") as directory,
        source_and_target(binaries) as (source, target),
        console.status("servers start") as status,
    ):
        runner = Runner(source, target, Path(directory), size, status.update)
        for case in cases:
            status.update(case.name)
            figures = report.figures(case, runner.run(case))
            measured += figures
            for figure in figures:
                console.print(_line(figure), highlight=False)
    facts["duration_seconds"] = round(time.monotonic() - began)
    _write(options, facts, measured, is_full=not options.only and not options.sides)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bench ARGS=…", description=__doc__)
    parser.add_argument("--list", action="store_true", help="list the profiles")
    parser.add_argument("--only", default="", help="profiles to run, by name: insert,mix")
    parser.add_argument("--changes", type=int, default=400_000, help="changes in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a steady load")
    parser.add_argument(
        "--sides", default="", help="of native, pglogical, binary, text, default; all by default"
    )
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of streamer's configuration, as in commit_interval=0.05; repeatable",
    )
    parser.add_argument(
        "--postgres",
        default="machine",
        help="16 or 18, or the directory of PostgreSQL's programs; that of pg_config by default",
    )
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    parser.add_argument(
        "--output", type=Path, help="write JSON to a file; a full run has one in benchmarks/results"
    )
    parser.add_argument(
        "--publish",
        action="store_true",
        help="write the table to docs/internals/speed.md, and a summary to README.md",
    )
    return parser


def _select(names: str) -> list[Case]:
    if not names:
        return list(CASES)
    by_name = {case.name: case for case in CASES}
    if unknown := [name for name in names.split(",") if name not in by_name]:
        sys.exit(f"no profile {', '.join(unknown)}; there are: {', '.join(by_name)}")
    return [by_name[name] for name in names.split(",")]


def _line(figure: report.Figure) -> str:
    values = ", ".join(f"{side} {value.median:,.5g}" for side, value in figure.values.items())
    ratios = ", ".join(f"{side}/native {ratio.median:.2f}" for side, ratio in figure.ratios.items())
    return f"{figure.case.name} ({figure.unit}): {values}" + (f"; {ratios}" if ratios else "")


def _write(
    options: argparse.Namespace,
    facts: dict[str, object],
    figures: list[report.Figure],
    *,
    is_full: bool,
) -> None:
    title = report.title_of(facts)
    text = json.dumps(report.to_json(facts, figures), indent=1) + "\n"
    path = options.output or (report.result_path(facts) if is_full else None)
    if path is not None:
        path.write_text(text, encoding="utf-8")
    if options.publish:
        for page in report.PAGES:
            page.write(figures, title)
    if options.json:
        sys.stdout.write(text)
        return
    console = Console()
    Console(width=max(console.width, 200)).print(report.table(figures, title))


if __name__ == "__main__":
    main()
