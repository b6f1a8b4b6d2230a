"""The judgements of `streamer check` on roles of servers and on failover, made on facts."""

from dataclasses import replace
from typing import Any

from streamer.commands.check.failover_findings import check_failover
from streamer.commands.check.findings import Place
from streamer.commands.check.source_facts import SourceFacts
from streamer.commands.check.source_findings import check_server
from streamer.mapping.rules import SourceMapping
from streamer.postgres.secret import Secret
from streamer.source.server.primaries_after_failover import Primary
from streamer.source.slot_and_publications.standbys import StandbyState
from streamer.source.timeline_branches import Branch
from tests.unit.test_capacity_findings import SERVER, SLOT

READY = {
    "hot_standby_feedback": "on",
    "primary_slot_name": "standby",
    "sync_replication_slots": "on",
}
BOTH = "host=a,b target_session_attrs="


def facts_of(url: str, **source: Any) -> SourceFacts:
    facts = SourceFacts(SourceMapping("shop", None, Secret(url), (), **source))
    facts.server, facts.slot, facts.is_complete = SERVER, SLOT, True
    return facts


def found(facts: SourceFacts) -> list[str]:
    return [str(finding) for finding in check_failover(facts)]


def test_hosts_of_which_any_will_do_are_a_mistake() -> None:
    (text,) = found(facts_of("host=a,b"))
    assert "several hosts without target_session_attrs" in text
    assert found(facts_of("host=a")) == found(facts_of(f"{BOTH}read-write")) == []


def test_two_primaries_are_named_with_their_timelines() -> None:
    facts = facts_of(f"{BOTH}read-write")
    history = "1\t0/3000000\tx\n"
    facts.primaries = [
        Primary(("a", "1"), SERVER, Branch(1)),
        Primary(("b", "2"), SERVER, Branch.parse(2, history)),
        Primary(("c", "3"), replace(SERVER, system_identifier="7"), Branch(1)),
    ]
    (text,) = found(facts)
    assert text.startswith("error")
    assert "two primaries: a:1 (timeline 1), b:2 (timeline 2)" in text
    assert "stop the old primary, a:1 (timeline 1)" in text
    assert "resync" not in text
    facts.primaries = facts.primaries[1:]
    assert found(facts) == []


def test_a_standby_needs_its_primary_and_settings_that_protect_the_slot() -> None:
    facts = facts_of("host=a", failover=True)
    facts.server = replace(SERVER, in_recovery=True)
    facts.slot = replace(SLOT, is_synced=True)
    facts.replication = {"hot_standby_feedback": "off", "primary_slot_name": ""}
    (needs_primary,) = check_server(Place("shop"), facts.server, facts.source)
    is_copy, publications, feedback, physical_slot = found(facts)
    assert "failover: true needs the primary" in str(needs_primary)
    assert "is a copy of its primary's" in is_copy
    assert "streamer cannot change publications here" in publications
    assert "alter system set hot_standby_feedback = on" in feedback
    assert "primary_slot_name is empty" in physical_slot

    facts = facts_of(f"{BOTH}standby")
    facts.server, facts.replication = replace(SERVER, in_recovery=True), READY
    (text,) = found(facts)
    assert text.startswith("info")
    assert "publications and heartbeats at its primary" in text
    facts.server = replace(SERVER, in_recovery=True, version=15_00_00)
    assert found(facts) == []
    (old,) = check_server(Place("shop"), facts.server, facts.source)
    assert str(old).startswith("error")
    assert "upgrade to PostgreSQL 16" in str(old)


def test_a_failover_keeps_the_slot_where_the_standby_is_ready() -> None:
    facts = facts_of(f"{BOTH}read-write", failover=True)
    facts.replication = {"synchronized_standby_slots": "other"}
    facts.standbys = [StandbyState("b", SLOT, READY)]
    lacks, fit = found(facts)
    assert "synchronized_standby_slots = 'other, standby'" in lacks
    assert "ready for failover" in fit

    facts.replication = {"synchronized_standby_slots": "other, standby"}
    (fit,) = found(facts)
    cases = (
        (StandbyState("b", None, READY), "does not exist yet"),
        (StandbyState("b", replace(SLOT, is_temporary=True), READY), "would be lost"),
        (StandbyState("b", replace(SLOT, invalidation="rows_removed"), READY), "rows_removed"),
        (StandbyState("b", error="connection refused"), "cannot be checked: connection refused"),
    )
    for look, words in cases:
        facts.standbys = [look]
        (text,) = found(facts)
        assert words in text

    facts.standbys = [StandbyState("b", SLOT, READY | {"sync_replication_slots": "off"})]
    (off, _) = found(facts)
    assert "sync_replication_slots is off" in off

    facts = facts_of("host=a", failover=True)
    empty, one_host = found(facts)
    assert "synchronized_standby_slots is empty" in empty
    assert "its url lists one host" in one_host
