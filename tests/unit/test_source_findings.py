"""The judgements of `streamer check` on a source, made on facts."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from streamer.commands.check.capture_findings import check_capture
from streamer.commands.check.findings import Finding, Place
from streamer.commands.check.source_facts import (
    OpenTransaction,
    PreparedTransaction,
    SourceFacts,
    Usage,
)
from streamer.commands.check.source_findings import (
    check_encoding,
    check_heartbeat,
    check_same_database,
    check_settings,
    check_transactions,
    check_unreplicated,
)
from streamer.mapping.relation_names import RelationName, parse_relation
from streamer.mapping.rule_options import DdlCapture, DdlKind, Initial, OnDdl, on_ddl_by_kind
from streamer.mapping.rules import RelationMapping, SourceMapping, TableRule
from streamer.postgres.secret import Secret
from streamer.source.catalog import find_unready
from tests.unit.test_capacity_findings import SERVER, SLOT

USAGE = Usage(
    "UTF8", may_create=True, slots=0, walsenders=0, large_objects=0, is_target=False,
    server_started="today", max_connections=100, connections_reserved=3, connections_used=0,
)  # fmt: skip


def facts_of(label: str = "shop", sid: str | None = None, **source: Any) -> SourceFacts:
    """A source with a table to copy, on a server without a problem."""
    facts = SourceFacts(SourceMapping(label, sid, Secret(""), (), **source))
    facts.server, facts.usage, facts.is_complete = SERVER, USAGE, True
    relation = RelationName("public", "t")
    rule = TableRule(parse_relation("t", "public"), initial=Initial.COPY)
    facts.mappings = [RelationMapping(relation, relation, rule)]
    return facts


def problems(findings: Iterable[Finding]) -> list[str]:
    return [f"{f.severity.value}: {f.problem}" for f in findings]


@pytest.mark.parametrize(
    ("version", "wal_level", "count"),
    [
        (18_00_00, "replica", 1),
        (18_00_00, "logical", 0),
        (19_00_00, "minimal", 1),
        (19_00_00, "replica", 0),
    ],
)
def test_a_server_of_version_19_decodes_at_wal_level_replica(
    version: int, wal_level: str, count: int
) -> None:
    server = replace(SERVER, version=version, wal_level=wal_level)
    assert len(list(find_unready(server, facts_of().source))) == count


@pytest.mark.parametrize(
    ("source", "target", "problem"),
    [
        ("UTF8", "UTF8", None),
        ("LATIN1", "LATIN1", None),
        ("LATIN1", "UTF8", None),
        ("SQL_ASCII", "UTF8", "its encoding is SQL_ASCII"),
        ("SQL_ASCII", "SQL_ASCII", "its encoding is SQL_ASCII"),
        ("UTF8", "SQL_ASCII", "the target's encoding is SQL_ASCII"),
        ("UTF8", "LATIN1", "its encoding is UTF8, the target's LATIN1"),
    ],
)
def test_text_that_the_target_may_refuse(source: str, target: str, problem: str | None) -> None:
    found = problems(check_encoding(Place("shop"), source, target))
    assert [f"warning: {problem}" in text for text in found] == ([True] if problem else [])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"wal_sender_timeout": "0"}, []),
        ({"wal_sender_timeout": "10000"}, []),
        ({"wal_sender_timeout": "9999"}, ["warning: wal_sender_timeout is 9999 ms"]),
        ({"max_slot_wal_keep_size": "-1"}, []),
        ({"max_slot_wal_keep_size": "0"}, ["warning: max_slot_wal_keep_size is 0 MB"]),
        ({"idle_replication_slot_timeout": "0"}, []),
        ({"idle_replication_slot_timeout": "60"}, ["warning: idle_replication_slot_timeout is 60"]),
        ({"logical_decoding_work_mem": str(16 * 1024)}, []),
        ({"logical_decoding_work_mem": "64"}, ["info: logical_decoding_work_mem is 64 kB"]),
    ],
)
def test_settings_that_end_the_stream_or_lose_the_slot(
    settings: dict[str, str], words: list[str]
) -> None:
    server = replace(SERVER, settings=SERVER.settings | settings)
    found = problems(check_settings(Place("shop"), server, streams=True))
    assert len(found) == len(words)
    assert all(text.startswith(start) for text, start in zip(found, words, strict=True))


def test_where_a_transaction_goes_that_is_larger_than_decoding_has_memory_for() -> None:
    server = replace(SERVER, settings=SERVER.settings | {"logical_decoding_work_mem": "64"})
    for version, streams, effect in (
        (18_00_00, True, "sent before they end"),
        (18_00_00, False, "written to the source's disk first"),
        (13_00_00, True, "written to the source's disk first"),
    ):
        (found,) = check_settings(Place("shop"), replace(server, version=version), streams=streams)
        assert effect in found.problem


def test_two_sids_of_one_group_for_one_database() -> None:
    def found(*sources: SourceFacts) -> list[str]:
        return [str(finding) for finding in check_same_database(sources)]

    one, same = facts_of(sid="eu"), facts_of(sid="us")
    (finding,) = found(one, same)
    assert finding.startswith("warning shop:us: ")
    assert "the url of shop:eu lead to the same database" in finding
    for other in (
        replace(SERVER, database="other"),
        replace(SERVER, system_identifier="2"),
    ):
        same.server = other
        assert found(one, same) == []
    # A copy of a server has the same identifier, and a different start time.
    same.server, same.usage = SERVER, replace(USAGE, server_started="yesterday")
    assert found(one, same) == []
    assert found(one, facts_of("crm", "us")) == [], "two groups may have one source"
    same.server = None
    assert found(one, same) == []


def test_heartbeats_that_cannot_beat() -> None:
    facts = facts_of()
    assert problems(check_heartbeat(facts, 5.0)) == []
    facts.usage = replace(USAGE, may_write_heartbeats=False)
    assert problems(check_heartbeat(facts, 0.0)) == []
    (finding,) = check_heartbeat(facts, 5.0)
    assert finding.fix is not None
    grant = "grant execute on function pg_catalog.pg_logical_emit_message"
    assert finding.fix.sql == (f'{grant}(boolean, text, text, boolean) to "me"',)
    facts.server = replace(SERVER, version=16_00_00)
    (finding,) = check_heartbeat(facts, 5.0)
    assert "pg_logical_emit_message(boolean, text, text) to" in str(finding)
    facts.server = replace(SERVER, in_recovery=True)
    (text,) = problems(check_heartbeat(facts, 5.0))
    assert text == "info: has no heartbeats, because it is a standby whose url lacks the primary"
    off = facts_of(heartbeat_interval=0.0)
    off.usage = facts.usage
    assert problems(check_heartbeat(off, 5.0)) == [], "the source's own setting counts"


def test_transactions_that_a_new_slot_waits_for() -> None:
    facts = facts_of()
    facts.open_transactions = [
        OpenTransaction(7, "app", "shop", 90), OpenTransaction(8, "app", "crm", None)
    ]  # fmt: skip
    facts.prepared_transactions = [PreparedTransaction("it's", "shop")]
    timed, untimed, prepared = check_transactions(facts, None)
    assert 'open for 90 s: pid 7, user "app", database "shop"' in timed.problem
    assert "open for a while: pid 8" in untimed.problem
    assert prepared.fix is not None
    assert prepared.fix.sql == ("rollback prepared 'it''s'",)
    facts.slot = SLOT
    assert len(list(check_transactions(facts, None))) == 3, "a copy makes another slot"
    facts.mappings = [
        replace(mapping, rule=replace(mapping.rule, initial=Initial.NONE))
        for mapping in facts.mappings
    ]
    assert list(check_transactions(facts, None)) == []


def test_objects_that_are_not_replicated() -> None:
    facts = facts_of()
    assert problems(check_unreplicated(facts)) == []
    facts.usage = replace(USAGE, large_objects=3, is_target=True)
    (loops, large) = problems(check_unreplicated(facts))
    assert loops.startswith("info: a streamer process also writes to this database")
    assert large == "warning: 3 large objects are not replicated"
    forwards = facts_of(forward_origins=True)
    forwards.usage = replace(USAGE, is_target=True)
    assert problems(check_unreplicated(forwards)) == []


@pytest.mark.parametrize(
    ("ddl", "on_ddl", "is_synchronous", "expected"),
    [
        (DdlCapture.CAPTURE, {}, True, "drop_column, change_type, detach_partition"),
        (DdlCapture.CAPTURE, {DdlKind.ADD_INDEX: OnDdl.STOP}, True, "add_index"),
        (DdlCapture.CAPTURE, OnDdl.APPLY, True, None),
        (DdlCapture.CAPTURE, {}, False, None),
        (DdlCapture.OFF, {}, True, None),
    ],
)
def test_a_change_that_stops_a_table_would_stop_all_commits_of_a_synchronous_source(
    ddl: DdlCapture, on_ddl: Any, is_synchronous: bool, expected: str | None
) -> None:
    facts = facts_of(ddl=ddl, on_ddl=on_ddl_by_kind(on_ddl))
    facts.usage = replace(USAGE, is_synchronous=is_synchronous)
    warnings = [f.problem for f in check_capture(facts) if "stops all commits" in f.problem]
    assert bool(warnings) == (expected is not None)
    for kind in (expected or "").split(", "):
        assert kind in "".join(warnings)
