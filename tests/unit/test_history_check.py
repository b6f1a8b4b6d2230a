from streamer.source.history_check import KEPT_MAX, CommittedTransaction, HistoryCheck
from streamer.util.lsn import Lsn


def at(lsn: int, xid: int = 0) -> CommittedTransaction:
    return CommittedTransaction(Lsn(lsn), xid or lsn, 1000 + lsn)


def test_a_transaction_that_comes_again_is_recognised() -> None:
    history = HistoryCheck(at(30), Lsn(10))
    assert history.saw_position(Lsn(29))
    assert history.saw_transaction(at(20))
    assert history.saw_transaction(at(30))
    assert history.saw_transaction(at(40))
    assert history.saw_position(Lsn(99))


def test_another_history_is_not() -> None:
    assert not HistoryCheck(at(30), Lsn(10)).saw_transaction(at(30, xid=7))
    assert not HistoryCheck(at(30), Lsn(10)).saw_transaction(at(31))
    assert not HistoryCheck(at(30), Lsn(10)).saw_position(Lsn(30))


def test_a_stream_that_begins_after_the_stored_transaction_passes() -> None:
    history = HistoryCheck(at(30), Lsn(30))
    assert history.saw_position(Lsn(35))
    assert history.saw_transaction(at(40))
    assert HistoryCheck(None, Lsn(10)).saw_transaction(at(11))


def test_only_newer_transactions_are_stored() -> None:
    history = HistoryCheck(at(30), Lsn(10))
    for lsn in (20, 30, 40, 50):
        assert history.saw_transaction(at(lsn))
    assert history.newest_through(Lsn(35)) is None
    assert history.newest_through(Lsn(45)) == at(40)
    assert history.newest_through(Lsn(45)) is None
    assert history.newest_through(Lsn(50)) == at(50)


def test_memory_is_bounded() -> None:
    history = HistoryCheck(None, Lsn(0))
    for lsn in range(1, 5 * KEPT_MAX):
        history.saw_transaction(at(lsn))
    assert len(history._kept) <= KEPT_MAX
    assert history.newest_through(Lsn(5 * KEPT_MAX)) == at(5 * KEPT_MAX - 1)


def test_a_position_is_never_ahead_of_its_landmark_by_a_transaction() -> None:
    """Also when so many are in flight that not all are kept."""
    history = HistoryCheck(None, Lsn(0))
    stored, positions = 0, set()
    last = 3 * KEPT_MAX + 7
    for lsn in range(1, last + 1):
        history.saw_transaction(at(2 * lsn))
    for flush in range(1, 2 * last + 2, 3):
        position = history.position_through(Lsn(flush))
        transaction = history.newest_through(position)
        stored = transaction.end_lsn if transaction is not None else stored
        assert position - stored in (0, 1), (flush, position, stored)
        positions.add(position)
    assert history.position_through(Lsn(2 * last + 9)) == 2 * last + 9
    assert len(positions) > KEPT_MAX / 4


def test_without_origins_one_that_may_carry_an_origin_is_not_expected() -> None:
    stored = CommittedTransaction.from_json(
        CommittedTransaction(Lsn(30), 30, 30, with_origins=True).to_json()
    )
    assert HistoryCheck(stored, Lsn(10), with_origins=False).saw_position(Lsn(40))
    assert not HistoryCheck(stored, Lsn(10), with_origins=True).saw_position(Lsn(40))
    assert not HistoryCheck(at(30), Lsn(10), with_origins=True).saw_position(Lsn(40))


def test_as_json() -> None:
    assert CommittedTransaction.from_json(at(30).to_json()) == at(30)


def test_of_many_transactions_at_once_a_position_waits_at_the_first_or_the_last() -> None:
    check = HistoryCheck(None, Lsn(0))
    first, last = CommittedTransaction(Lsn(100), 1, 5), CommittedTransaction(Lsn(900), 9, 5)
    check.saw_transactions(first, last)
    check.saw_transactions(one := CommittedTransaction(Lsn(950), 10, 5), one)
    assert check.position_through(Lsn(50)) == 50
    assert check.position_through(Lsn(500)) == 100
    assert check.newest_through(Lsn(500)) == first
    assert check.position_through(Lsn(899)) == 100
    assert check.position_through(Lsn(930)) == 930
    assert check.position_through(Lsn(990)) == 990
    assert check.newest_through(Lsn(990)) == one
