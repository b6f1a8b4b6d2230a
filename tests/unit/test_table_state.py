"""Every event from every reachable state of a table, with a crash around each store."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Final, TypeAlias

import pytest

from streamer.apply.lanes.lane import BLOCKING, Hold, holds
from streamer.control.chunked_copy import ChunkedCopy
from streamer.control.resync_options import Mode, Resync
from streamer.control.table_state import ALL_ROWS, TO_POINT, Need, State, TableState
from streamer.errors.error_reports import ErrorReport
from streamer.util.lsn import LSN_MAX, Lsn

START, POINT, LATER = Lsn(8), Lsn(16), Lsn(24)
ERROR: Final = ErrorReport("the target refuses a change", "target_schema")
COLUMNS, DIFFERENT = Resync(columns=("v",)), Resync(mode=Mode.DIFF)
CHUNKS: Final = ChunkedCopy(("id",), ("int8",), ("1",), "a definition", 1, 1000, 3000, 16400)

Event: TypeAlias = Callable[[TableState], TableState]
OPERATOR: Final[dict[str, Event]] = {
    "pause": lambda state: state.paused(),
    "resume": lambda state: state.resumed(),
    "resync": lambda state: state.rows_requested(ALL_ROWS),
}
PART: Final[dict[str, Event]] = {
    "ask for columns": lambda state: state.part_requested(COLUMNS),
    "ask for columns of a paused table": lambda state: state.part_requested(
        COLUMNS, stays_paused=state.is_paused
    ),
}
LOSS: Final[dict[str, Event]] = {
    "lose changes": lambda state: state.lost(ERROR),
    "copy again": lambda state: state.to_copy_again(),
    "be cut off": lambda state: state.cut_off(ERROR),
}
COPY: Final[dict[str, Event]] = {
    "begin a snapshot": lambda state: state.snapshot_begins(),
    "pass": lambda state: state.snapshot_passes(START),
    "begin the copy": lambda state: state.copy_began(POINT),
    "reach": lambda state: state.reached_for(LATER),
    "end the snapshot": lambda state: state.snapshot_ended(),
    "delay": lambda state: state.delayed(ERROR),
    "miss the table": lambda state: state.without_table(),
    "fail the copy": lambda state: state.copy_failed(ERROR),
}
STREAM: Final[dict[str, Event]] = {
    "refuse": lambda state: state.failing(ERROR),
    "limit deletes": lambda state: state.stopped_by_delete_limit(ERROR),
    "lack rows": lambda state: state.lacks_rows(ERROR),
    "recover": lambda state: state.recovered(),
    "drain": lambda state: state.drained(),
}


def events(state: TableState) -> Iterator[tuple[str, TableState]]:
    """Return the states after each event that can come in *state*."""
    possible = OPERATOR | LOSS | COPY | STREAM
    if state.skips_through != LSN_MAX and state.need in (Need.NOTHING, Need.PART):
        possible |= PART
    if state.need not in (Need.NOTHING, Need.REQUEST):
        possible["ask again"] = lambda before: before.copy_requested(DIFFERENT)
    if state.lacks(state.scope.need):
        possible["begin an attempt"] = lambda before: before.copy_begins()
    if state.need is Need.ROWS:
        possible["block"] = lambda before: before.blocked(ERROR)
        possible["unblock"] = lambda before: before.unblocked()
    if (state.point is not None and state.need is Need.ROWS) or state.need is Need.CHUNK:
        possible["copy a chunk"] = lambda before: before.switched_to_stream(CHUNKS, POINT)
    if state.need is Need.CHUNKS:
        possible["begin a chunk"] = lambda before: before.chunk_begins()
        possible["meet an unknown row"] = lambda before: before.unfit_for_chunks("a reason")
    if state.point is not None and state.need in (Need.ROWS, *TO_POINT):
        possible["finish the copy"] = lambda before: before.switched_to_stream(None, POINT)
    for name, event in possible.items():
        yield name, event(state)


def after_a_crash(state: TableState) -> TableState:
    """Return the state with which the next process begins, if *state* is stored."""
    return TableState.stored(
        state.shown,
        end_lsn=state.through_lsn,
        error=state.error,
        has_snapshot=state.need in (Need.NOTHING, Need.PART),
        needs_resync=state.is_lost,
        resync=state.resync,
        chunks=state.chunks,
        is_to_mark_synced=state.is_to_mark_synced,
    )


@cache
def reachable() -> frozenset[TableState]:
    """Return all states that events and crashes reach from those of a new table."""
    waiting = [TableState.stored(State.INIT, has_snapshot=False)]
    waiting.append(replace(waiting[0], is_to_mark_synced=True))
    reached = set(waiting)
    while waiting:
        state = waiting.pop()
        for after in (after_a_crash(state), *(after for _, after in events(state))):
            if after not in reached:
                reached.add(after)
                waiting.append(after)
    return frozenset(reached)


@pytest.fixture(scope="module")
def states() -> frozenset[TableState]:
    return reachable()


def test_a_table_is_called_in_sync_only_if_it_needs_nothing(states: frozenset[TableState]) -> None:
    for state in states:
        if state.shown in (State.READY, State.CATCHING_UP):
            assert state.need is Need.NOTHING, state
        if state.shown in (State.INIT, State.COPYING):
            assert state.need not in (Need.NOTHING, Need.REQUEST), state


def test_changes_are_dropped_only_if_the_target_has_them_or_a_copy_brings_them(
    states: frozenset[TableState],
) -> None:
    for state in states:
        if state.skips_through == LSN_MAX:
            assert state.need in (Need.ROWS, Need.REQUEST), state
        for name, after in events(state):
            if after.skips_through != state.skips_through and not state.is_lost:
                is_copied = name in {"copy a chunk", "finish the copy", "begin the copy"}
                assert is_copied or after.skips_through == LSN_MAX or (state.need is Need.ROWS), (
                    name,
                    state,
                )


def test_a_lane_that_a_copy_or_an_operator_holds_applies_nothing(
    states: frozenset[TableState],
) -> None:
    for state in states:
        if state.need is Need.ROWS:
            assert Hold.SYNC in holds(state), state
        if state.is_paused and not state.is_lost:
            assert holds(state) & BLOCKING, state
        if state.need in TO_POINT:
            assert Hold.POINT in holds(state), state
            if state.is_read:
                assert state.drains_to != LSN_MAX, state
        if state.need is Need.NOTHING and not state.is_paused:
            assert holds(state) is Hold.NONE, state


def test_only_a_copy_that_an_operator_or_streamer_demands_ends_a_loss(
    states: frozenset[TableState],
) -> None:
    for state in states:
        for name, after in events(state):
            if state.is_lost and not after.is_lost:
                assert name in {"resume", "resync", "copy again"}, (name, state)
                assert after.need is Need.ROWS, (name, state)


def test_a_table_in_sync_never_needs_all_rows_for_the_failure_of_a_part(
    states: frozenset[TableState],
) -> None:
    for state in states:
        if state.need in (Need.NOTHING, Need.PART):
            assert state.copy_failed(ERROR).need is Need.NOTHING, state


def test_a_paused_table_stays_paused_until_an_operator_says_more_or_its_copy_fails(
    states: frozenset[TableState],
) -> None:
    asked = {*OPERATOR, *PART, "ask again", "block", "unblock", "fail the copy"}
    for state in states:
        for name, after in events(state):
            if state.is_paused and not after.is_paused:
                assert name in asked, (name, state)


def test_a_crash_loses_neither_a_need_nor_a_pause(states: frozenset[TableState]) -> None:
    for state in states:
        after = after_a_crash(state)
        chunk = Need.CHUNKS if state.need is Need.CHUNK else state.need
        assert after.need is chunk, (state, after)
        assert after.shown is state.shown
        assert after_a_crash(after) == after


def test_from_each_state_an_operator_gets_a_table_in_sync(states: frozenset[TableState]) -> None:
    for state in states:
        after = state.snapshot_ended().paused().resumed()
        if after.need is Need.CHUNKS:
            after = after.chunk_begins()
        if after.need is not Need.NOTHING:
            after = after.snapshot_begins().copy_began(LATER).switched_to_stream(None, LATER)
            after = after.snapshot_ended().drained()
        assert (after.shown, after.need, after.error) == (State.READY, Need.NOTHING, None), state
        assert holds(after) is Hold.NONE


def test_a_second_equal_event_changes_nothing(states: frozenset[TableState]) -> None:
    once = {"begin the copy", "finish the copy", "copy a chunk", "drain", "recover", "refuse"}
    for state in states:
        for name, after in events(state):
            again = dict(events(after)).get(name)
            if name in once and name != "recover" and again is not None:
                assert again == after, (name, state)


def test_a_store_decided_by_a_process_that_knows_less_undoes_no_pause(
    states: frozenset[TableState],
) -> None:
    """The bookkeeping decides from the stored state, which may be later than that of the process."""
    for stored in filter(lambda state: state.is_paused, map(after_a_crash, states)):
        for after in (
            stored.with_shown(State.READY, None),
            stored.with_shown(State.ERROR, ERROR),
            stored.cut_off(ERROR),
            stored.lost(ERROR),
            stored.to_copy_again(),
            stored.copy_begins(),
            stored.switched_to_stream(None, POINT),
            stored.delayed(ERROR),
            stored.lacks_rows(ERROR),
        ):
            assert after.is_paused, stored


def test_a_copy_begins_only_in_a_scope_that_the_table_lacks(states: frozenset[TableState]) -> None:
    for state in states:
        assert state.lacks(Need.ROWS) is not state.is_lost
        assert state.lacks(Need.PART) is (state.need is Need.PART)
        assert state.lacks(Need.CHUNKS) is (state.need in (Need.CHUNK, Need.CHUNKS))
        assert not state.lacks(Need.NOTHING)
        assert not state.lacks(Need.REQUEST)
