"""Profiles of `make bench`, at a tiny size: speed belongs into the real run."""

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.cases import CASES, Case, Kind, copy_of_tables
from benchmarks.runner import Options, Runner, changes_of, delays
from benchmarks.servers import settings_for
from benchmarks.synchronous_mode import latency_of
from benchmarks.usage import Cpu
from streamer.commands.demo.embedded_servers import Server
from tests.support.forks import ForkedProcess
from tests.support.postgres import SETTINGS, running, versions

CASES_AT_A_TIME = 4
# A profile takes three seconds of processor time: an apply, a delay and a copy. `make nightly` runs
# all.
NAMES = {"insert", "latency", "copy-tables"}
CHOSEN = [
    case for case in CASES if case.name in NAMES or os.environ.get("TEST_COMBINATIONS") == "all"
]


@pytest.fixture
def servers_to_measure() -> Iterator[tuple[Server, Server]]:
    binaries = versions()[os.environ.get("TEST_POSTGRES", "18")]
    settings = settings_for(binaries) | SETTINGS | {"shared_buffers": "64MB", "autovacuum": "off"}
    with tempfile.TemporaryDirectory(prefix="streamer-test-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        directory.chmod(0o755)
        with (
            running(directory / "source", binaries, settings) as source,
            running(directory / "target", binaries, settings) as target,
        ):
            yield source, target


def launch(arguments: list[str], log: Path) -> ForkedProcess:
    """Run streamer in a process that needs no imports, and whose copies need no Spark."""
    return ForkedProcess(
        "tests.support.plain_streamer",
        arguments,
        environment=dict(os.environ),
        stdout=Path(os.devnull),
        stderr=log,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_profile_runs_and_ends_equal(
    servers_to_measure: tuple[Server, Server], tmp_path: Path
) -> None:
    options = Options(
        changes=100, rounds=1, seconds=1, sides=("native", "binary", "default"), launch=launch
    )
    runner = Runner(*servers_to_measure, tmp_path, options, lambda text: None)

    def measure(case: Case) -> list[report.Figure]:
        if case.name == "copy-tables":
            case = replace(case, **copy_of_tables(5))
        return report.figures(case, runner.run(case))

    with ThreadPoolExecutor(CASES_AT_A_TIME) as threads:
        figures = [figure for found in threads.map(measure, CHOSEN) for figure in found]
    assert {figure.case.name for figure in figures} == {case.name for case in CHOSEN}
    for figure in figures:
        assert len(figure.values) == 2, figure.case.name
        assert all(value.median >= 0 for value in figure.values.values()), figure.case.name
    text = report.markdown(figures, "title")
    assert all(case.title in text for case in CHOSEN)
    brief = report.markdown(figures, "title", ("profile", "native"))
    assert "| profile | native, binary |" in brief


def test_a_delay_runs_from_the_flush_of_a_position_to_its_visibility() -> None:
    flushed = [(1.0, 100), (2.0, 200), (3.0, 300)]
    visible = [(0.5, 50), (1.5, 120), (2.5, 290)]
    assert delays(flushed, visible) == [0.5, 0.5]  # the last position is never visible


def test_the_log_of_pgbench_becomes_a_distribution_in_milliseconds() -> None:
    found = latency_of([1000 * n for n in range(1, 201)], seconds=10)
    assert (found.p50, found.rate) == (100.5, 20.0)
    assert 190 < found.p95 < 192
    assert 198 < found.p99 < 200


def test_a_rate_has_the_limit_of_the_cores_and_of_the_busiest_process() -> None:
    def figure(native: Cpu, binary: Cpu) -> report.Figure:
        values = {side: report.Spread.of([1.0]) for side in ("native", "binary")}
        cpu, memory = {"native": native, "binary": binary}, {"native": 0, "binary": 0}
        return report.Figure(CASES[0], "rate", values, {}, cpu, memory, frozenset({"binary"}))

    even = figure(Cpu(0.0, 8.0, 4.0), Cpu(2.0, 2.0, 4.0))
    assert even.limit("binary", cores=2) == 250_000
    assert even.limit("binary", cores=8) == 250_000  # the walsender is busy all the time
    assert even.ratio_of_machines("binary") == 2.0
    many = figure(Cpu(0.0, 8.0, 4.0), Cpu(4.0, 4.0, 4.0))
    assert many.limit("binary", cores=2) == pytest.approx(1e6 / 6)


def test_a_round_has_whole_transactions() -> None:
    for case in CASES:
        if case.kind is Kind.DRAIN:
            changes = changes_of(case, Options(changes=1234))
            assert changes % case.per_transaction == 0
            assert changes > 0


def test_a_table_in_a_page_is_replaced_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    start, end = report.MARKS
    page.write_text(f"before\n{start}\nold\n{end}\nafter\n")
    report.insert_markdown(page, "new\n")
    assert page.read_text() == f"before\n{start}\n\nnew\n\n{end}\nafter\n"


def test_a_page_without_marks_is_not_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a page\n")
    with pytest.raises(SystemExit, match="lacks the marks"):
        report.insert_markdown(page, "new\n")
    assert page.read_text() == "a page\n"


def test_the_pages_have_the_marks_of_the_table() -> None:
    for page in report.PAGES:
        report.check_marks(page.path)
