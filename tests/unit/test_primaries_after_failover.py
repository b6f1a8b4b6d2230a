"""The primary that the connections of a source try first, and the server that streamer refuses."""

from dataclasses import replace

import pytest

from streamer.errors.error_classes import Retry, SourceOldPrimaryError
from streamer.mapping.rules import SourceMapping
from streamer.postgres.secret import Secret
from streamer.source.server.primaries_after_failover import Primary, choose, require_successor
from streamer.source.timeline_branches import Branch, KnownServer
from tests.unit.test_capacity_findings import SERVER

ONE, OTHER = "1\t0/3000000\tx\n", "1\t0/4000000\tx\n"
FIRST, SECOND = Branch(1), Branch.parse(2, ONE)
SIBLING, THIRD = Branch.parse(2, OTHER), Branch.parse(3, ONE + "2\t0/5000000\tx\n")
SOURCE = SourceMapping("shop", None, Secret(""), ())


def primary(name: str, branch: Branch, system_identifier: str = "1") -> Primary:
    server = replace(SERVER, timeline=branch.timeline, system_identifier=system_identifier)
    return Primary((name, ""), server, branch)


@pytest.mark.parametrize(
    ("known", "branches", "chosen"),
    [
        (FIRST, [FIRST, SECOND], 1),
        (SECOND, [FIRST, SECOND], 1),
        (SECOND, [SECOND, FIRST], 0),
        (SECOND, [FIRST, SECOND, THIRD], 2),
        # Two standbys were promoted, and the target follows the first.
        (SECOND, [SIBLING, SECOND], 1),
        (SIBLING, [SECOND, THIRD, SIBLING], 2),
        (None, [FIRST, SECOND], 1),
        (SECOND, [FIRST], 0),
        (SECOND, [], None),
    ],
)
def test_the_newest_branch_that_goes_on_with_the_known_one_wins(
    known: Branch | None, branches: list[Branch], chosen: int | None
) -> None:
    primaries = [primary(str(number), branch) for number, branch in enumerate(branches)]
    expected = None if chosen is None else primaries[chosen]
    assert choose(primaries, KnownServer("1", known)) is expected


def test_a_stranger_among_the_hosts_is_no_primary_of_the_source() -> None:
    stranger, own = primary("a", THIRD, "2"), primary("b", FIRST)
    assert choose([stranger, own], KnownServer("1", FIRST)) is own


def test_only_the_old_primary_of_this_source_is_refused() -> None:
    server = replace(SERVER, timeline=1, system_identifier="1")
    for known in (KnownServer(), KnownServer("1", FIRST), KnownServer("2", SECOND)):
        require_successor(SOURCE, server, known)
    with pytest.raises(
        SourceOldPrimaryError, match=r"on timeline 1.* follows timeline 2"
    ) as refused:
        require_successor(SOURCE, server, KnownServer("1", SECOND))
    assert refused.value.retry is Retry.TIMED
    assert "resync" not in str(refused.value)
    assert "streamer run --take-over shop" in str(refused.value)
