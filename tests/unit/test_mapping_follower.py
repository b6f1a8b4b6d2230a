"""Replicas follow the mapping that changed last."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from streamer.bookkeeping.replicas import FleetRecord, ReplicaRecord, find_newest_mapping
from streamer.mapping.mapping_fingerprint import fingerprint
from streamer.mapping.relation_names import RelationPattern
from streamer.mapping.rules import Mapping, MappingFault, SourceMapping, TableRule
from streamer.postgres.secret import Secret
from streamer.runtime.replicas.mapping_follower import SECONDS_MAX, MappingFollower

URL = "postgresql://streamer:{}@{}/shop"
SINCE = datetime(2026, 1, 1, tzinfo=UTC)


def mapping(password: str = "a", host: str = "db", exclude: Sequence[str] = ()) -> Mapping:
    rules = (TableRule(RelationPattern("public", "t"), exclude=frozenset(exclude)),)
    return Mapping((SourceMapping("shop", None, Secret(URL.format(password, host)), rules),))


def replica(number: int, text: str | None, revision: int | None = None) -> ReplicaRecord:
    none: frozenset[str] = frozenset()
    since = None if revision is None else SINCE
    return ReplicaRecord(
        number,
        f"h:{number}",
        1,
        "0.1.0",
        None,
        none,
        None,
        False,
        none,
        none,
        text,
        revision,
        since,
        1,
        SINCE,
        SINCE,
        True,
    )


class Follower:
    """A follower, and the times at which the follower read the configuration."""

    def __init__(self, *dead: str) -> None:
        self.mapping = mapping()
        self.reads: list[float] = []
        self.now = 0.0
        self.following = MappingFollower(
            lambda: self.mapping, lambda: self.reads.append(self.now), dead.__contains__
        )

    @property
    def own(self) -> str:
        return self.following.report()

    def look(
        self, mappings: list[str], *replicas: ReplicaRecord, joined: float = 0.0
    ) -> str | None:
        self.following.report()
        record = FleetRecord(list(replicas), {}, mappings)
        return self.following.check(record, 1, self.now, joined)


def test_a_fingerprint_is_that_of_the_mapping_without_its_passwords() -> None:
    assert fingerprint(mapping()) == fingerprint(mapping("b"))
    assert fingerprint(mapping()) != fingerprint(mapping(host="other"))
    excluded = fingerprint(mapping(exclude=["x", "y"]))
    assert excluded == fingerprint(mapping(exclude=["y", "x"]))
    assert excluded != fingerprint(mapping())


def test_a_fingerprint_has_no_place_of_a_file() -> None:
    source = mapping().sources[0]
    faulty = [
        Mapping((replace(source, fault=MappingFault(f"{path}: no variable")),))
        for path in ("a.yaml", "b.yaml")
    ]
    assert fingerprint(faulty[0]) == fingerprint(faulty[1]) != fingerprint(mapping())


def test_the_newest_mapping_is_that_of_a_live_replica_that_stays() -> None:
    records = [replica(1, "old", 1), replica(2, "new", 2), replica(3, "unknown")]
    assert find_newest_mapping(records) == records[1]
    assert find_newest_mapping([records[0], replace(records[1], is_alive=False)]) == records[0]
    assert find_newest_mapping([records[0], replace(records[1], is_stopping=True)]) == records[0]
    assert find_newest_mapping([records[2]]) is None


def test_the_first_mapping_is_the_newest_one() -> None:
    follower = Follower()
    assert follower.look([]) == follower.own
    assert not follower.following.is_waiting


@pytest.mark.parametrize("is_old", [False, True])
def test_a_replica_that_starts_beside_others_takes_no_source_with_another_mapping(
    is_old: bool,
) -> None:
    follower = Follower()
    history = ["new", *([follower.own] if is_old else [])]
    others = [replica(1, follower.own), replica(2, "new", 2)]
    assert follower.look(history, *others, joined=100.0) is None
    assert follower.following.is_waiting
    assert follower.reads == [0.0]
    # AND an operator decides.
    follower.following.confirm()
    assert follower.look(history, *others, joined=101.0) == follower.own
    assert not follower.following.is_waiting


def test_an_older_file_does_not_win_when_the_replica_beside_it_is_killed() -> None:
    """A supervisor of processes starts the replica again within seconds."""
    follower = Follower("h:2")
    history, own = ["new", follower.own], replica(1, follower.own)
    assert follower.look(history, own, replica(2, "new", 2), joined=50.0) is None
    killed = replace(replica(2, "new", 2), is_alive=False)
    assert follower.look(history, own, killed, joined=100.0) is None
    assert follower.following.is_waiting
    # Ended in order, or forgotten by the target
    assert follower.look(history, own, joined=700.0) == follower.own
    # A process that starts after the kill is the operator's decision.
    later = Follower("h:2")
    assert later.look(history, own, killed) == later.own


def test_a_mapping_is_the_newest_one_when_all_others_have_ended_in_order() -> None:
    follower = Follower()
    assert follower.look(["new"], replica(1, follower.own)) == follower.own
    assert follower.look(["new", follower.own], replica(1, follower.own)) == follower.own
    stopping = replace(replica(2, "new", 2), is_stopping=True)
    assert follower.look(["new"], replica(1, follower.own), stopping) == follower.own


def test_replicas_that_lost_their_sessions_come_back_before_another_mapping_counts() -> None:
    follower = Follower()
    lost = replace(replica(2, "new", 2), is_alive=False)
    assert follower.look(["new"], lost, joined=1.0) is None
    assert follower.look(["new"], lost, joined=3.0) == follower.own  # a new mapping, after a crash
    # An older mapping waits for as long as the target stores replicas of the present mapping.
    assert follower.look(["new", follower.own], lost, joined=100.0) is None
    # A killed process of this machine does not come back.
    follower = Follower("h:2")
    assert follower.look(["new", follower.own], lost) == follower.own


def test_a_replica_tries_again_ever_more_rarely_until_it_has_the_mapping() -> None:
    follower = Follower()
    wanted = mapping(host="other")
    others = [replica(1, follower.own), replica(2, fingerprint(wanted), 5)]
    for second in range(200):
        follower.now = float(second)
        follower.look([fingerprint(wanted)], *others, joined=1000.0)
    assert follower.reads == [0.0, 2.0, 6.0, 14.0, 30.0, 62.0, 122.0, 182.0]
    assert SECONDS_MAX == 60.0
    follower.mapping = wanted
    assert follower.look([fingerprint(wanted)], *others, joined=1000.0) is None
    assert not follower.following.is_waiting
    assert len(follower.reads) == 8
