"""Why a copy waits: a session that holds a lock, or its turn."""

import pytest

from streamer.apply.lanes.lane import MappedRelation
from streamer.copy.copy_waits import WaitFacts, find_reasons
from streamer.copy.parts.ctid_ranges import CopyPart, CopySource, Heap, cut
from streamer.copy.prepare_copy import CopyMethod, TableCopy
from streamer.errors.remedies import BlockingSession
from streamer.postgres.blocking_sessions import Blockers
from tests.unit.build import mapped_relation, source_relation, target_relation


def copy_of(number: int) -> TableCopy:
    name = f"public.t{number}"
    mapped = mapped_relation(number, source=name)
    target = target_relation(["id"], name=name)
    copy = TableCopy(mapped, source_relation(name), target, False, mapped.state.scope)
    copy.method, copy.parts = CopyMethod(1), parts_of(number)
    return copy


def parts_of(number: int) -> list[CopyPart]:
    heap = Heap(f"t{number}", 0, 1)
    return cut(CopySource(number, 1, '"id"', None, ("t", '"id"'), False, (heap,), True))


def shown(facts: WaitFacts) -> dict[MappedRelation, str]:
    return {mapped: str(wait) for mapped, wait in find_reasons(facts).items()}


def test_a_copy_whose_part_no_task_has_taken_waits_for_the_others() -> None:
    one, two, three = copy_of(1), copy_of(2), copy_of(3)
    two.has_copied_parts = True
    facts = WaitFacts(copies=[one, two, three], task_name="streamer copy 1", jobs=4)
    facts.copying = {("streamer copy 1", *three.fills), ("streamer copy 2", "public", "t1")}
    reason = "its turn: 2 copies of other tables use Spark (sync.jobs: 4)"
    assert shown(facts) == {one.mapped: reason}


def test_a_relation_that_is_requested_meanwhile_waits_for_the_round() -> None:
    late = mapped_relation(9)
    facts = WaitFacts(waiting=[late], copies=[copy_of(1), copy_of(2)])
    assert shown(facts)[late] == "its turn: 2 copies of this source end first"
    facts.copies = [copy_of(1)]
    assert shown(facts)[late] == "its turn: 1 copy of this source ends first"
    facts.copies = []
    assert find_reasons(facts) == {}


@pytest.mark.parametrize(
    ("is_starting", "is_starving", "reason", "is_automatic"),
    [
        (True, False, "its turn: Spark starts", True),
        (False, True, "a free worker of Spark", False),
        (False, False, None, False),
    ],
)
def test_a_copy_that_waits_for_spark_itself_says_so(
    is_starting: bool, is_starving: bool, reason: str | None, is_automatic: bool
) -> None:
    copy = copy_of(1)
    facts = WaitFacts(copies=[copy], is_starting=is_starting, is_starving=is_starving)
    wait = find_reasons(facts).get(copy.mapped)
    assert (None if wait is None else str(wait)) == reason
    assert wait is None or wait.is_automatic is is_automatic


def test_a_lock_at_the_target_comes_before_one_at_the_source_and_before_its_turn() -> None:
    copy = copy_of(1)
    facts = WaitFacts(copies=[copy], is_starting=True, source_locks={copy: "pid 7 (…)"})
    assert shown(facts) == {copy.mapped: "pid 7 (…)"}
    facts.target_locks = {copy.mapped: Blockers("pid 8 (…)", (BlockingSession(8),))}
    assert shown(facts) == {
        copy.mapped: 'a lock on target table "public.t1": pid 8 (…); run at the target: '
        "select pg_terminate_backend(8); or wait until it ends"
    }
