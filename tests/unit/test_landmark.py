from streamer.lsn import Lsn
from streamer.progress.landmark import KEPT_MAX, Landmark, Landmarks


def at(lsn: int, xid: int = 0) -> Landmark:
    return Landmark(Lsn(lsn), xid or lsn, 1000 + lsn)


def test_a_transaction_that_comes_again_is_recognised() -> None:
    landmarks = Landmarks(at(30), Lsn(10))
    assert landmarks.passed(Lsn(29))
    assert landmarks.came(at(20))
    assert landmarks.came(at(30))
    assert landmarks.came(at(40))
    assert landmarks.passed(Lsn(99))


def test_another_history_is_not() -> None:
    assert not Landmarks(at(30), Lsn(10)).came(at(30, xid=7))
    assert not Landmarks(at(30), Lsn(10)).came(at(31))
    assert not Landmarks(at(30), Lsn(10)).passed(Lsn(30))


def test_nothing_is_expected_of_a_stream_that_begins_behind_it() -> None:
    landmarks = Landmarks(at(30), Lsn(30))
    assert landmarks.passed(Lsn(35))
    assert landmarks.came(at(40))
    assert Landmarks(None, Lsn(10)).came(at(11))


def test_only_what_is_newer_than_what_is_stored_is_stored() -> None:
    landmarks = Landmarks(at(30), Lsn(10))
    for lsn in (20, 30, 40, 50):
        assert landmarks.came(at(lsn))
    assert landmarks.newest_through(Lsn(35)) is None
    assert landmarks.newest_through(Lsn(45)) == at(40)
    assert landmarks.newest_through(Lsn(45)) is None
    assert landmarks.newest_through(Lsn(50)) == at(50)


def test_memory_is_bounded() -> None:
    landmarks = Landmarks(None, Lsn(0))
    for lsn in range(1, KEPT_MAX + 100):
        landmarks.came(at(lsn))
    assert landmarks.newest_through(Lsn(KEPT_MAX + 50)) == at(KEPT_MAX)


def test_as_json() -> None:
    assert Landmark.from_json(at(30).to_json()) == at(30)
