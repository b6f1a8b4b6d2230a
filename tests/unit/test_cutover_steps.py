"""The remaining steps of a cut-over, and the options of an interrupted cut-over."""

from pathlib import Path

import pytest

from streamer.bookkeeping.cutovers import CutoverRecord
from streamer.commands.cutover.cutover import CutoverState
from streamer.commands.cutover.cutover_steps import (
    CutoverOptions,
    FinalComparison,
    Step,
    StepObstacle,
    StopWrites,
    describe,
    steps,
)
from streamer.errors.remedies import Remedy, at_target
from streamer.source.stop_writes import ProgramSession, WriteFacts, allow_sql

BACK = CutoverOptions(reverse=Path("/back.yaml"))


def record(step: Step, options: CutoverOptions, *, is_finished: bool = False) -> CutoverRecord:
    return CutoverRecord(1, step.value, options.to_json(), None, is_finished)


def test_the_stream_back_is_a_step_only_if_it_is_asked_for() -> None:
    assert steps(BACK, None) == list(Step)
    assert steps(CutoverOptions(), None) == [step for step in Step if step is not Step.REVERSE]


@pytest.mark.parametrize("begun", list(Step)[1:])
def test_the_step_that_began_last_is_done_again(begun: Step) -> None:
    left = steps(BACK, record(begun, BACK))
    assert left[0] is begun
    assert left == list(Step)[list(Step).index(begun) :]


def test_a_finished_one_has_no_step_left() -> None:
    assert steps(BACK, record(Step.FINISH, BACK, is_finished=True)) == []


def test_an_interrupted_one_goes_on_with_the_options_of_its_beginning() -> None:
    begun = CutoverOptions(StopWrites.OPERATOR, FinalComparison.COUNTS, Path("/back.yaml"), 5)
    given = CutoverOptions(seconds=9)
    assert given.begun_with(None) == given
    later = given.begun_with(record(Step.DRAIN, begun))
    assert later == CutoverOptions(
        StopWrites.OPERATOR, FinalComparison.COUNTS, Path("/back.yaml"), 9
    )


def test_every_step_is_described_and_the_stop_shows_its_sql() -> None:
    for step in Step:
        assert describe(step, BACK, "shop", "shop db")
    shown = describe(Step.STOP_WRITES, BACK, "shop", 'a "b"')
    assert 'alter database "a ""b""" set default_transaction_read_only = on' in shown


def test_undoing_restores_the_setting_of_before() -> None:
    assert allow_sql("d", None) == 'alter database "d" reset default_transaction_read_only'
    assert allow_sql("d", "off").endswith("set default_transaction_read_only = 'off'")


def test_each_obstacle_to_stopping_writes_is_named() -> None:
    reset = "alter role app reset default_transaction_read_only"
    hidden = ProgramSession("app", 4, is_hidden=True, writes=False, is_superuser=False, stays=False)
    admin = ProgramSession(
        "postgres", 5, is_hidden=True, writes=False, is_superuser=True, stays=True
    )
    lowly = WriteFacts("d", "r", False, False, False, "o", 2, None, (reset,), (hidden, admin))
    found = [f"{problem}; {remedy}" for problem, remedy in lowly.obstacles(stops=True)]
    assert [text.partition("run at the source: ")[2] for text in found[1:]] == [
        'grant pg_read_all_stats to "r"',
        'grant "o" to "r"; or stop the programs yourself and use --stop-writes operator',
        'grant pg_signal_backend to "r"',
        reset,
        "select pg_catalog.pg_terminate_backend(5)",
    ]
    assert '"app" (pid 4), "postgres" (pid 5)' in found[1]
    assert len(lowly.obstacles(stops=False)) == 2
    able = WriteFacts("d", "r", True, True, True, None, 0, "off", ())
    assert able.obstacles(stops=True) == []


def test_a_step_that_would_fail_is_marked_with_its_statement_below() -> None:
    state = CutoverState("shop", "d", None, BACK, tuple(Step))
    grant = Remedy.of("run at the target: ", at_target("alter role r replication"))
    lines = state.marked_lines([StepObstacle(Step.REVERSE, "may not replicate", grant)])
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [
        "ok" if step is not Step.REVERSE else "fails" for step in Step
    ]
    at = next(number for number, line in enumerate(lines) if line.startswith("fails"))
    assert [line.strip() for line in lines[at + 1 : at + 4]] == [
        "may not replicate",
        "run at the target:",
        "alter role r replication;",
    ]
