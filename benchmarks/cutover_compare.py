"""The time for which the second comparison of a cut-over blocks writers, beside the time of the
first, complete comparison.

Two tables with the same rows stream; programs change rows of one of them after the check. The steps
are those of `streamer cutover`, and their outcomes have the seconds. Spark runs since the check.

    scripts/with_java.sh .venv/bin/python -m benchmarks.cutover_compare --rows 500000
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

from benchmarks.compare import SETTINGS
from benchmarks.servers import Run, source_and_target, wait_until, write_config
from streamer.commands.cutover.cutover import Cutover
from streamer.commands.cutover.cutover_steps import CutoverOptions, FinalComparison, Step
from streamer.commands.demo.embedded_servers import Server
from streamer.config import static_mapping

TABLES = ("quiet", "busy")
NOTE_BYTES = 640


def fill(server: Server, rows: int) -> None:
    """Write the same rows of both tables to every server."""
    server.execute("create database bench")
    for name in TABLES:
        server.execute(
            f"create table {name} (id int8 primary key, customer int, at timestamptz,"
            " amount numeric(12,2), note text);"
            f"insert into {name} select g, g % 10000,"
            " '2026-01-01'::timestamptz + g * interval '1 second',"
            f" g * 0.25, repeat(md5(g::text), {NOTE_BYTES // 32})"
            f" from generate_series(1, {rows}) g",
            "bench",
        )
        server.execute(f"vacuum (freeze, analyze) {name}", "bench")


async def measure(config: Path, source: Server, changed: int) -> None:
    """Run the steps up to the comparison, and print its outcome beside the outcome for all rows."""
    settings, mapping = static_mapping.load(config)
    (only,) = mapping.sources

    def report(step: str, outcome: str) -> None:
        print(f"{step}: {outcome}", flush=True)

    options = CutoverOptions(seconds=600)
    async with Cutover(settings, mapping, only, options, report) as work:
        await work.state()
        await work._do(Step.CHECK)
        source.execute(
            f"update busy set amount = 0 where id % 100 = 7 and id <= {changed * 100}", "bench"
        )
        for step in (Step.STOP_WRITES, Step.DRAIN, Step.COMPARE):
            await work._do(step)
        work._options = CutoverOptions(comparison=FinalComparison.FULL, seconds=600)
        await work._do(Step.COMPARE)
        await work.undo()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--changed", type=int, default=1_000)
    options = parser.parse_args()
    with (
        source_and_target(settings=SETTINGS) as (source, target),
        tempfile.TemporaryDirectory() as directory,
    ):
        for server in (source, target):
            fill(server, options.rows)
        config = Path(directory) / "config.yaml"
        tables = "{" + ", ".join(f"{name}: {{initial: none}}" for name in TABLES) + "}"
        write_config(config, source.url("bench"), target.url("bench"), tables)
        run = Run(config)
        made = "select to_regclass('streamer.relation') is not null"
        wait_until(target.url("bench"), made, 120, run)
        ready = "select bool_and(state = 'ready') from streamer.relation"
        wait_until(target.url("bench"), ready, 120, run)
        asyncio.run(measure(config, source, options.changed))
        run.stop()


if __name__ == "__main__":
    main()
