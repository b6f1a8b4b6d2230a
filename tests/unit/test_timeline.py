"""Where the branches of a source's history forked."""

import pytest

from streamer.source.timeline_branches import Branch, common_end
from streamer.util.lsn import LSN_MAX, Lsn

HISTORY = "1\t0/30001A0\tno recovery target specified\n\n2\t1/5000000\tbefore 2026-01-01\n"
ONE, OTHER = "1\t0/3000000\tx\n", "1\t0/4000000\tx\n"
FORK = Lsn.parse("0/3000000")


def test_where_a_timeline_ended() -> None:
    branch = Branch.parse(3, HISTORY)
    assert branch.end_of(1) == Lsn.parse("0/30001A0")
    assert branch.end_of(2) == Lsn.parse("1/5000000")
    assert branch.end_of(3) is None
    assert Branch.parse(2, "# 1 0/1\n").end_of(1) is None
    assert Branch.parse(3, branch.text) == branch


@pytest.mark.parametrize(
    ("known", "now", "expected"),
    [
        ((1, ""), (1, ""), LSN_MAX),
        ((1, ""), (2, ONE), FORK),
        ((2, ONE), (2, ONE), LSN_MAX),
        ((2, ONE), (3, ONE + "2\t0/5000000\tx\n"), Lsn.parse("0/5000000")),
        # Two standbys became timeline 2, and the second then timeline 3.
        ((2, ONE), (2, OTHER), FORK),
        ((2, OTHER), (2, ONE), FORK),
        ((2, ONE), (3, OTHER + "2\t0/5000000\tx\n"), FORK),
        # Both timelines began at the same position.
        ((2, ONE), (3, ONE), FORK),
        # The old primary lives on.
        ((2, ONE), (1, ""), FORK),
        ((5, "4\t0/1\n"), (2, ONE), None),
        # The server cannot send the file.
        ((2, ONE), (2, ""), LSN_MAX),
        ((2, ""), (2, ONE), LSN_MAX),
        ((2, ""), (3, ONE), None),
        ((1, ""), (3, ""), None),
    ],
)
def test_branches_are_distinguished_by_the_ends_of_their_ancestors(
    known: tuple[int, str], now: tuple[int, str], expected: Lsn | None
) -> None:
    assert common_end(Branch.parse(*known), Branch.parse(*now)) == expected
