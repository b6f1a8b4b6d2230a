"""Where the time of the suite goes: ``make test ARGS='-p tests.support.profile'``.

The plugin adds up the time and the CPU of each test, fixtures included, and prints a table by kind
and a table by file. CPU counts all processes that descend from a process of pytest: servers, Spark
and the program. On Linux only.
"""

import ctypes
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil
import pytest

_PR_SET_CHILD_SUBREAPER: Final = 36
_SHOWN: Final = 60
_COLUMNS: Final = ("tests' process", "programs", "PostgreSQL", "Spark", "browser")


def pytest_configure(config: pytest.Config) -> None:
    # A process whose parent ends becomes a child of pytest, and stays visible as a zombie.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kind(name: str) -> str:
    if name.startswith("postgres"):
        return "PostgreSQL"
    if name == "java":
        return "Spark"
    return "browser" if name.startswith("chrom") else "programs"


def _cpu_seconds() -> dict[str, float]:
    """Return the CPU time of this process and its descendants so far.

    The time of a process that has ended is part of its parent's time.
    """
    process = psutil.Process()
    times = process.cpu_times()
    spent = defaultdict(float)
    spent["tests' process"] = times.user + times.system
    spent["programs"] = times.children_user + times.children_system
    for child in process.children(recursive=True):
        try:
            times = child.cpu_times()
            spent[_kind(child.name())] += (
                times.user + times.system + times.children_user + times.children_system
            )
        except psutil.NoSuchProcess:
            continue
    return spent


_before: dict[str, float] = {}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    _before.clear()
    _before.update(_cpu_seconds())
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    finally:
        after = _cpu_seconds()
        spent = {name: after[name] - _before.get(name, 0.0) for name in after}
        item.user_properties.append(("cpu", spent))


class _Sum:
    """The tests of a kind, file or name."""

    def __init__(self) -> None:
        self.tests = 0
        self.seconds = 0.0
        self.cpu = dict.fromkeys(_COLUMNS, 0.0)

    def add(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration
        if report.when == "teardown":
            self.tests += 1
            for key, spent in report.user_properties:
                if key == "cpu":
                    assert isinstance(spent, dict)
                    for name, seconds in spent.items():
                        self.cpu[name] += seconds

    def row(self, name: str) -> str:
        figures = (self.seconds, sum(self.cpu.values()), *self.cpu.values())
        cells = " | ".join(f"{seconds:.1f}" for seconds in figures)
        return f"| {name} | {self.tests} | {cells} |"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tables: tuple[defaultdict[str, _Sum], ...] = tuple(defaultdict(_Sum) for _ in range(3))
    kinds, files, tests = tables
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                file, _, _ = report.nodeid.partition("::")
                parts = Path(file).parts
                kind = parts[1] if len(parts) > 2 else "docs, tidy, deploy"
                for table, name in ((kinds, kind), (files, file), (tests, report.nodeid)):
                    table[name].add(report)
    head = ("tests", "seconds", "CPU", *_COLUMNS)
    for title, table, most in (
        ("kind", kinds, None),
        ("file", files, _SHOWN),
        ("test", tests, _SHOWN),
    ):
        terminalreporter.section(f"time by {title}")
        terminalreporter.line(f"| {title} | {' | '.join(head)} |")
        terminalreporter.line("| --- |" + " --- |" * len(head))
        order = sorted(table, key=lambda name: -table[name].seconds)
        for name in order[:most]:
            terminalreporter.line(table[name].row(name))
