from streamer.lsn import Lsn
from streamer.source.timeline import parse_fork

HISTORY = "1\t0/30001A0\tno recovery target specified\n\n2\t1/5000000\tbefore 2026-01-01\n"


def test_where_a_timeline_ended() -> None:
    assert parse_fork(HISTORY, 1) == Lsn.parse("0/30001A0")
    assert parse_fork(HISTORY, 2) == Lsn.parse("1/5000000")


def test_a_timeline_that_is_no_ancestor_has_no_fork() -> None:
    assert parse_fork(HISTORY, 3) is None
    assert parse_fork("", 1) is None
    assert parse_fork("# 1 0/1\n", 1) is None
