"""The steps of a cut-over: which are left, and with which options an interrupted one goes on."""

from pathlib import Path

import pytest

from streamer.commands.cutover.plan import (
    CutoverOptions,
    FinalComparison,
    Step,
    StopWrites,
    describe,
    steps,
)
from streamer.progress.cutovers import CutoverRecord
from streamer.source.stop_writes import WriteFacts, allow_sql

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
    facts = WriteFacts("d", "r", False, False, 2, None, ("app",))
    found = facts.obstacles(stops=True)
    assert len(found) == 4
    assert 'grant pg_signal_backend to "r"' in found[2]
    assert len(facts.obstacles(stops=False)) == 1
    assert WriteFacts("d", "r", True, True, 0, "off", ()).obstacles(stops=True) == []
