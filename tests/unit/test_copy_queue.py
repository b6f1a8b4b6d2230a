"""Which relations a round copies, and which relations need a lock."""

from types import SimpleNamespace
from typing import Any

import pytest

from streamer.control.resync_options import Resync
from streamer.control.table_state import Need, State, TableState
from streamer.copy import finish_copies
from streamer.copy.copy_queue import LOCK_AFTER_ROUNDS, CopyQueue
from streamer.copy.finish_copies import Finisher
from streamer.errors.error_reports import ErrorReport
from tests.unit.build import mapped_relation

SOME_COLUMNS = Resync(columns=("v",))


def test_a_round_takes_the_requested_relations_once() -> None:
    queue, one, two = CopyQueue(), mapped_relation(1), mapped_relation(2)
    queue.request(one)
    queue.request(two)
    queue.request(one)
    assert queue.next_batch() == [one, two]
    assert queue.next_batch() == []
    assert queue.has(one)
    assert not queue.is_empty


def test_relations_in_sync_have_a_round_of_their_own_after_the_others() -> None:
    queue, whole, part = CopyQueue(), mapped_relation(1), mapped_relation(2)
    part.become(part.state.part_requested(SOME_COLUMNS))
    queue.request(part)
    queue.request(whole)
    assert queue.next_batch() == [whole]
    assert queue.waiting == [part]
    assert queue.has(part)
    assert queue.next_batch() == [part]
    assert queue.waiting == []


def test_relations_to_declare_have_a_round_of_their_own_before_the_others() -> None:
    queue, copied, declared = CopyQueue(), mapped_relation(1), mapped_relation(2)
    declared.become(TableState.stored(State.INIT, is_to_mark_synced=True))
    queue.request(copied)
    queue.request(declared)
    assert queue.next_batch() == [declared]
    assert queue.can_begin
    assert queue.next_batch() == [copied]


def test_copies_that_are_done_or_given_up_are_not_requested_again() -> None:
    queue, relations = CopyQueue(), [mapped_relation(number) for number in range(3)]
    for mapped in relations:
        queue.request(mapped)
    batch = queue.next_batch()
    queue.copied(batch[0])
    queue.remove(batch[1])
    assert queue.unfinished(batch) == [batch[2]]


def test_a_copy_that_an_operator_asked_for_again_is_repeated_if_it_fails() -> None:
    queue, mapped = CopyQueue(), mapped_relation()
    queue.request(mapped)
    queue.request_again(mapped)
    batch = queue.next_batch()
    assert not queue.failed(mapped), "the round began after the operator asked"
    queue.end(batch)
    queue.request(mapped)
    batch = queue.next_batch()
    queue.request_again(mapped)
    assert queue.failed(mapped)
    queue.end(batch)
    assert queue.next_batch() == [mapped]
    queue.request_again(mapped)
    queue.cancel_request(mapped)
    assert not queue.failed(mapped)
    assert queue.is_empty


def test_a_relation_that_a_round_has_is_in_no_other_until_copied_or_the_round_ends() -> None:
    """Tasks of the first round may still fill the table."""
    queue, given_up, failed, done, later = CopyQueue(), *map(mapped_relation, range(4))
    for mapped in (given_up, failed, done):
        queue.request(mapped)
    batch = queue.next_batch()
    queue.give_up(given_up)
    queue.failed(failed)
    queue.copied(done)
    for mapped in (given_up, failed, done, later):
        queue.request(mapped)
    assert queue.next_batch() == [done, later], "the other round does not wait for the first"
    assert not queue.can_begin
    queue.end(batch)
    assert queue.can_begin
    assert queue.next_batch() == [given_up, failed]


def test_a_relation_that_was_set_aside_leaves_the_queue() -> None:
    queue, mapped = CopyQueue(), mapped_relation()
    queue.request(mapped)
    batch = queue.next_batch()
    mapped.become(mapped.state.lost(ErrorReport("changes are lost", "sync")))
    assert not queue.has(mapped)
    assert queue.unfinished(batch) == []
    assert queue.is_empty
    queue.request(mapped)
    assert queue.next_batch() == []


def test_rewrites_in_a_row_ask_for_a_lock_until_the_relation_is_copied() -> None:
    queue, mapped = CopyQueue(), mapped_relation()
    for _ in range(LOCK_AFTER_ROUNDS):
        assert not queue.needs_lock(mapped)
        queue.rewritten(mapped)
    assert queue.needs_lock(mapped)
    assert not queue.needs_lock(mapped_relation(2))
    queue.copied(mapped)
    assert not queue.needs_lock(mapped)


def test_a_chunk_that_is_copied_needed_no_lock_but_chunks_in_vain_do() -> None:
    queue, mapped = CopyQueue(), mapped_relation()
    for _ in range(LOCK_AFTER_ROUNDS):  # a partition came or went, now and then
        queue.rewritten(mapped)
        queue.copied(mapped, has_more=True)
    assert not queue.needs_lock(mapped)
    for _ in range(LOCK_AFTER_ROUNDS):  # the table was rewritten between two chunks
        queue.rewritten(mapped, in_vain=True)
        queue.copied(mapped, has_more=True)
    assert queue.needs_lock(mapped)
    queue.copied(mapped)
    assert not queue.needs_lock(mapped)


def test_a_copy_that_is_given_up_is_neither_waited_for_nor_finished_until_requested_again() -> None:
    queue, mapped = CopyQueue(), mapped_relation()
    queue.request(mapped)
    batch = queue.next_batch()
    assert queue.is_copying(mapped)
    queue.give_up(mapped)
    assert not queue.is_copying(mapped)
    assert queue.unfinished(batch) == []
    assert queue.is_empty
    queue.request(mapped)
    assert not queue.is_copying(mapped), "the round under way does not get it back"
    queue.end(batch)
    assert queue.next_batch() == [mapped]


def test_the_next_chunk_of_a_relation_does_not_wait_for_the_round_of_the_one_before() -> None:
    queue, mapped, other = CopyQueue(), mapped_relation(1), mapped_relation(2)
    queue.request(mapped)
    queue.request(other)
    first = queue.next_batch()
    queue.copied(mapped, has_more=True)
    queue.request(mapped)
    second = queue.next_batch()
    assert second == [mapped]
    assert queue.unfinished(first) == [other], "the round of its first chunk is done with it"
    queue.end(first)
    queue.request(mapped)
    assert not queue.can_begin, "the round of its next chunk is not"
    queue.end(second)
    assert queue.can_begin


def test_a_relation_that_leaves_its_round_is_free_for_another_before_the_end() -> None:
    queue, fails, again, long = CopyQueue(), *map(mapped_relation, range(3))
    for mapped in (fails, again, long):
        queue.request(mapped)
    batch = queue.next_batch()
    assert queue.begin_removal(again) is batch
    assert queue.begin_removal(again) is None, "it is leaving already"
    assert queue.begin_removal(fails) is batch
    queue.failed(fails)
    assert queue.unfinished(batch) == [long], "the end of the round requests no leaving relation"
    queue.request(fails)
    assert not queue.can_begin, "tasks may write them"
    queue.removed(again, batch, again=True)
    assert queue.next_batch() == [again]
    queue.removed(fails, batch, again=False)
    assert queue.next_batch() == [fails]
    queue.end(batch)
    assert queue.is_copying(again)


def test_a_relation_that_is_given_up_while_it_leaves_is_not_requested() -> None:
    queue, mapped = CopyQueue(), mapped_relation()
    queue.request(mapped)
    batch = queue.next_batch()
    assert queue.begin_removal(mapped) is batch
    queue.end(batch)
    queue.give_up(mapped)
    queue.removed(mapped, batch, again=True)
    assert queue.is_empty
    assert queue.begin_removal(mapped) is None, "it has no round"


@pytest.mark.parametrize("comes_first", [True, False])
@pytest.mark.parametrize("is_stored", [True, False])
async def test_a_request_that_arrives_while_a_failure_is_stored_keeps_the_table_at_its_point(
    monkeypatch: pytest.MonkeyPatch, is_stored: bool, comes_first: bool
) -> None:
    """The copy that failed would otherwise release the point of the copy that was requested.

    If the request is stored before the failure, the failure is that of an older attempt. streamer
    stores no failure of a copy with a known request: the failure would end the request.
    """
    queue, part = CopyQueue(), mapped_relation(1)
    stored: list[str] = []
    failed: list[object] = []

    async def fail_copy(*arguments: object) -> bool:
        assert arguments[-2:] == (Need.PART, 7)
        stored.append("failure")
        queue.give_up(part)  # as a request does
        queue.request(part)
        return is_stored

    async def demand_again(*_: object) -> None:
        stored.append("request")

    async def is_copy_due(*_: object) -> bool:
        return False

    monkeypatch.setattr(finish_copies, "fail_copy", fail_copy)
    monkeypatch.setattr(finish_copies, "demand_again", demand_again)
    monkeypatch.setattr(finish_copies, "is_copy_due", is_copy_due)
    events = SimpleNamespace(copy_failed=lambda mapped, _: failed.append(mapped))
    source = SimpleNamespace(label="shop")
    context: Any = SimpleNamespace(bookkeeping=None, events=events, target=None, source=source)
    leaving: Any = None
    finisher = Finisher(context, queue, queue.request, leaving)
    part.become(part.state.part_requested(SOME_COLUMNS))
    queue.request(part)
    batch = queue.next_batch()
    queue.began(part, 7)
    if comes_first:
        queue.request_again(part)
    await finisher._store_failure(part, ErrorReport("the target refuses a change", "sync"))
    queue.end(batch)
    meanwhile = ["failure", "request"] if is_stored else ["failure"]
    assert (stored, failed) == ([] if comes_first else meanwhile, [])
    assert queue.next_batch() == [part]
    assert queue.attempt(part) is None
