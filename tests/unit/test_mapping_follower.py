"""Replicas follow the mapping of the one that changed last."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from streamer.mapping.fingerprint import fingerprint
from streamer.mapping.names import RelationPattern
from streamer.mapping.rules import Mapping, MappingFault, SourceMapping, TableRule
from streamer.postgres.secret import Secret
from streamer.progress.replicas import ReplicaRecord, find_newest_mapping
from streamer.runtime.replicas.mapping_follower import MOST_SECONDS, MappingFollower

URL = "postgresql://streamer:{}@{}/shop"
SINCE = datetime(2026, 1, 1, tzinfo=UTC)


def mapping(password: str = "a", host: str = "db", exclude: Sequence[str] = ()) -> Mapping:
    rules = (TableRule(RelationPattern("public", "t"), exclude=frozenset(exclude)),)
    return Mapping((SourceMapping("shop", None, Secret(URL.format(password, host)), rules),))


def replica(number: int, text: str | None, seconds: int = 0) -> ReplicaRecord:
    none: frozenset[str] = frozenset()
    since = None if text is None else SINCE + timedelta(seconds=seconds)
    return ReplicaRecord(
        number, f"h:{number}", 1, None, none, None, False, none, text, since, 1, SINCE, SINCE, True
    )


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
    records = [replica(1, "old"), replica(2, "new", 5), replica(3, None)]
    assert find_newest_mapping(records) == records[1]
    assert find_newest_mapping([records[0], replace(records[1], is_alive=False)]) == records[0]
    assert find_newest_mapping([records[0], replace(records[1], is_stopping=True)]) == records[0]
    assert find_newest_mapping([records[2]]) is None


def test_a_replica_reads_a_newer_mapping_and_never_an_older_one() -> None:
    reads: list[float] = []
    now = 0.0
    following = MappingFollower(mapping, lambda: reads.append(now))
    mine, _ = following.report(now)
    following.look([replica(1, mine, 5), replica(2, "old")], 1, now)
    assert reads == []
    following.look([replica(1, mine), replica(2, "new", 5)], 1, now)
    assert reads == [0.0]


def test_a_replica_tries_again_ever_more_rarely_until_it_has_the_mapping() -> None:
    reads: list[float] = []
    has = [mapping()]
    now = 0.0
    following = MappingFollower(lambda: has[0], lambda: reads.append(now))
    mine, _ = following.report(now)
    wanted = mapping(host="other")
    others = [replica(1, mine), replica(2, fingerprint(wanted), 5)]
    for second in range(200):
        now = float(second)
        following.look(others, 1, now)
    assert reads == [0.0, 2.0, 6.0, 14.0, 30.0, 62.0, 122.0, 182.0]
    assert MOST_SECONDS == 60.0
    has[0] = wanted
    assert following.report(500.0) == (fingerprint(wanted), 0.0)
    following.look(others, 1, 500.0)
    assert len(reads) == 8


def test_a_mapping_keeps_its_age_when_it_is_read_again_without_a_change() -> None:
    has = [mapping()]
    following = MappingFollower(lambda: has[0], lambda: None)
    following.report(10.0)
    has[0] = mapping()
    assert following.report(15.0)[1] == 5.0
