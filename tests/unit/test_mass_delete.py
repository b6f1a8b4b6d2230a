"""Counts the deletes of source transactions, and leaves deletes out."""

from dataclasses import replace

from streamer.apply.lanes.delete_limit import DeleteLimit
from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.lanes.lane_transaction import LaneBlock, LaneTransaction
from streamer.decode.transactions import Changes, Transaction, TransactionBlock
from streamer.mapping.rule_options import TableType
from streamer.util.lsn import Lsn
from tests.unit.build import mapped_relation, relation

RELATION = relation(["a"], ["a"])
TUPLE = bytes(4) + b"N"


def limited(limit: int | None, **rule: object) -> MappedRelation:
    mapped = mapped_relation()
    changed = replace(mapped.mapping.rule, max_deleted_rows=limit, **rule)  # type: ignore[arg-type]
    mapped.mapping = replace(mapped.mapping, rule=changed)
    mapped.skip_through_lsn = Lsn(0)
    return mapped


def payloads(kinds: str) -> list[bytes]:
    """``I``, ``U``, ``D`` or ``T`` for each change."""
    return [kind.encode() + TUPLE for kind in kinds]


def lane_transaction(
    mapped: MappedRelation, kinds: str, number: int = 1, *, ends: bool = True
) -> LaneTransaction:
    changes = [(mapped, Changes(RELATION, payloads(kinds)))]
    lsn = Lsn(number * 100)
    return LaneTransaction(Transaction(number, lsn, 0), changes, Lsn(lsn + 50) if ends else None, 1)


def test_only_more_deletes_than_allowed_or_a_truncate_make_a_transaction_wait() -> None:
    for kinds, limit, waits in (
        ("IDUDD", 3, False),
        ("DDDD", 3, True),
        ("D", 0, True),
        ("IU", 0, False),
        ("T", 1000, True),
        ("DDDD", None, False),
    ):
        delete_limit, mapped = DeleteLimit(), limited(limit)
        its = lane_transaction(mapped, kinds)
        assert delete_limit.add(its) is waits
        assert (delete_limit.waiting(its) is not None) is waits
    assert not DeleteLimit().add(lane_transaction(limited(0, type=TableType.APPEND), "DT"))
    assert not DeleteLimit().add(lane_transaction(limited(3, skip_truncate=True), "T"))


def test_each_transaction_of_a_block_and_all_pieces_of_one_are_counted() -> None:
    delete_limit, mapped = DeleteLimit(), limited(2)
    block = TransactionBlock([1, 2, 3], [100, 200, 300], [0, 0, 0], [150, 250, 350])
    its = Changes(RELATION, payloads("DDDDDID"), [0, 1, 2], [2, 5, 7])
    assert delete_limit.add(
        LaneBlock(block.transaction(2), [(mapped, its)], Lsn(350), 1, block=block)
    )
    assert delete_limit.waiting(lane_transaction(mapped, "DD", 1)) is None
    found = delete_limit.waiting(lane_transaction(mapped, "DDD", 2))
    assert found is not None
    assert (found[1].xid, found[1].lsn, found[1].deleted_rows) == (2, Lsn(200), 3)
    assert delete_limit.waiting(lane_transaction(mapped, "ID", 3)) is None

    assert not delete_limit.add(lane_transaction(mapped, "DD", 4, ends=False))
    assert delete_limit.add(lane_transaction(mapped, "D", 4))
    assert not delete_limit.add(lane_transaction(mapped, "DDD", 5, ends=False))
    delete_limit.discard_open()
    assert not delete_limit.add(lane_transaction(mapped, "I", 5))


def test_a_decision_counts_for_its_transaction_and_only_deletes_are_left_out() -> None:
    delete_limit, mapped = DeleteLimit(), limited(0)
    first, second = lane_transaction(mapped, "IDUT", 1), lane_transaction(mapped, "D", 2)
    delete_limit.add(first)
    delete_limit.add(second)
    waiting = delete_limit.waiting(first)
    assert waiting is not None
    mapped.decided = waiting[1].decide(skips=True)
    assert delete_limit.waiting(first) is None
    assert delete_limit.waiting(second) is not None
    (_, kept) = delete_limit.without_skipped(first).changes[0]
    assert [chr(payload[0]) for payload in kept.payloads] == ["I", "U"]
    assert delete_limit.without_skipped(second) is second
    assert delete_limit.release(first) == {mapped: waiting[1]}
    mapped.decided = waiting[1].decide(skips=False)
    assert delete_limit.without_skipped(first) is first
    # A copy that has the transaction needs no decision.
    mapped.skip_through_lsn = Lsn(1000)
    assert delete_limit.waiting(second) is None
