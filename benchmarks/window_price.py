"""The price of a small target transaction: processor time of streamer, and time to visibility.

A client commits transactions of a few changes, each after the former is visible at the target, so
that each makes a separate window. A second measurement has a steady load at a rate. Trees are
directories with the source code of streamer, which take turns:

    python -m benchmarks.window_price --trees main=/src/main,new=/src/new
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import psycopg

from benchmarks.cases import CASES, Case, Pgbench
from benchmarks.runner import delays
from benchmarks.servers import Database, Sampler, find_binaries, source_and_target, wait_until
from benchmarks.sides import START_SECONDS, Streamer

_CASE: Final = next(case for case in CASES if case.name == "latency")
_FIRST: Final = 1_000_000
"""The key of the first inserted row, and of the first deleted row."""
_WARM_UP: Final = 10
_STATEMENTS: Final = {
    "insert": "insert into items (id, name) select g, 'new' from generate_series({0}, {1}) g",
    "update": "update items set amount = coalesce(amount, 0) + 1 where id between -{2} and -1",
    "delete": "delete from items where id between {0} and {1}",
}


@dataclass(frozen=True, slots=True)
class Tree:
    """A version of streamer, with its target."""

    name: str
    directory: Path
    side: Streamer


def processor_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _launch(directory: Path, arguments: list[str], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "streamer", *arguments],
            cwd=directory,
            stdout=subprocess.DEVNULL,
            stderr=file,
        )


@contextmanager
def _streaming(tree: Tree, source: Database) -> Iterator[int]:
    """Let *tree* stream during a block; yield the process."""
    tree.side.start()
    try:
        mark = str(source.value("select pg_current_wal_insert_lsn()"))
        source.execute("insert into items (name) values ('first')")
        wait_until(tree.side.target.url, tree.side.reached_sql([mark]), START_SECONDS, tree.side)
        assert tree.side.pid is not None
        yield tree.side.pid
    finally:
        tree.side.stop()


def _one_by_one(
    tree: Tree, source: Database, kind: str, count: int, number: int
) -> tuple[float, float]:
    """Return the processor time of a window, and the median time to visibility, in ms."""
    windows = number + _WARM_UP
    source.execute(f"delete from items where id < 0 or id >= {_FIRST}")
    last = _FIRST + windows * count if kind == "delete" else 0
    source.execute(
        "insert into items (id, name) select g, 'old' from (select generate_series(-50, -1)"
        f" union all select generate_series({_FIRST}, {last})) g(g)"
    )
    waits = []
    with (
        _streaming(tree, source) as pid,
        psycopg.connect(source.url, autocommit=True) as client,
        psycopg.connect(tree.side.target.url, autocommit=True) as reader,
    ):
        time.sleep(0.5)
        began = 0.0
        for window in range(windows):
            if window == _WARM_UP:
                began = processor_seconds(pid)
            first = _FIRST + window * count
            statement = _STATEMENTS[kind].format(first, first + count - 1, count)
            row = client.execute("select pg_current_wal_insert_lsn()::text").fetchone()
            assert row is not None
            client.execute(statement.encode())
            committed = time.monotonic()
            reached = tree.side.reached_sql([str(row[0])]).encode()
            while (now := time.monotonic()) < committed + START_SECONDS:
                if reader.execute(reached).fetchone() == (True,):
                    break
                time.sleep(0.0003)
            waits.append(now - committed)
        used = processor_seconds(pid) - began
    return used / number * 1000, statistics.median(waits[_WARM_UP:]) * 1000


def _steadily(tree: Tree, source: Database, rate: int, seconds: int) -> tuple[float, float, float]:
    """Return the percentage of a core, and the 50th and 99th percentile of the delay in ms."""
    workload = _CASE.workload
    assert isinstance(workload, Pgbench)
    script = Path(source.server.directory) / "window.sql"
    script.write_text(f"{workload.script};\n")
    with _streaming(tree, source) as pid:
        flushed = Sampler(source, "pg_current_wal_flush_lsn()")
        visible = Sampler(tree.side.target, tree.side.position_sql)
        for sampler in (flushed, visible):
            sampler.start()
        time.sleep(1)
        began, used = time.monotonic(), processor_seconds(pid)
        source.run_program(
            "pgbench",
            "--no-vacuum",
            "--client",
            "4",
            "--time",
            str(seconds),
            "--rate",
            str(rate),
            "--file",
            str(script),
        )
        used = processor_seconds(pid) - used
        elapsed = time.monotonic() - began
        time.sleep(0.2)
        waits = delays(flushed.stop()[1:], visible.stop())
    cuts = statistics.quantiles(waits, n=100)
    return 100 * used / elapsed, cuts[49] * 1000, cuts[98] * 1000


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trees", default=f"here={Path.cwd()}")
    parser.add_argument("--kinds", default="insert,update,delete")
    parser.add_argument("--counts", default="1,5,20")
    parser.add_argument("--rates", default="200,500")
    parser.add_argument("--number", type=int, default=200, help="windows of a measurement")
    parser.add_argument("--seconds", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(arguments)
    figures: dict[tuple[str, str], list[tuple[float, ...]]] = defaultdict(list)
    with (
        tempfile.TemporaryDirectory(prefix="streamer-bench-") as directory,
        source_and_target(find_binaries("machine")) as (source_server, target_server),
    ):
        source = Database(source_server, "source")
        source.create()
        source.execute(_CASE.schema)
        trees = []
        for text in options.trees.split(","):
            name, _, path = text.partition("=")
            target = Database(target_server, f"target_{name}")
            target.create()
            target.execute(_CASE.schema)
            case = Case(f"window-{name}", "", schema=_CASE.schema)
            side = Streamer(
                case,
                "default",
                [source],
                target,
                Path(directory),
                launch=partial(_launch, Path(path)),
            )
            side.prepare()
            trees.append(Tree(name, Path(path), side))
        for round_number in range(options.rounds):
            ordered = trees[round_number % len(trees) :] + trees[: round_number % len(trees)]
            for tree in ordered:
                for kind in filter(None, options.kinds.split(",")):
                    for count in map(int, options.counts.split(",")):
                        figures[f"{kind} {count}", tree.name].append(
                            _one_by_one(tree, source, kind, count, options.number)
                        )
                for rate in filter(None, options.rates.split(",")):
                    figures[f"rate {rate}", tree.name].append(
                        _steadily(tree, source, int(rate), options.seconds)
                    )
    for (what, name), rounds in sorted(figures.items()):
        medians = [statistics.median(values) for values in zip(*rounds, strict=True)]
        print(f"{what:12} {name:8}", " ".join(f"{value:8.3f}" for value in medians), rounds)


if __name__ == "__main__":
    main()
