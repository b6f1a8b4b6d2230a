"""Slots and WAL senders that sources need, and servers of different versions, judged on facts."""

from dataclasses import replace

from streamer.commands.check.capacity_findings import check_capacity
from streamer.commands.check.findings import Place
from streamer.commands.check.source_facts import SourceFacts, Usage
from streamer.commands.check.source_findings import check_server, check_settings
from streamer.config.settings import Settings
from streamer.config.sync_section import SyncSection
from streamer.mapping.relation_names import RelationName, parse_relation
from streamer.mapping.rule_options import Initial
from streamer.mapping.rules import RelationMapping, SourceMapping, TableRule
from streamer.postgres.secret import Secret
from streamer.runtime.session_needs import target_needs
from streamer.source.catalog import SourceServer
from streamer.source.slot_and_publications.slot import Slot
from streamer.util.lsn import Lsn
from tests.support.checking import ERROR, WARNING, matching
from tests.unit.build import source_mapping

SERVER = SourceServer(
    version=18_00_01,
    version_text="18.1",
    system_identifier="1",
    timeline=1,
    flush_lsn=Lsn(1),
    database="shop",
    wal_level="logical",
    wal_sender_timeout_seconds=60,
    role="me",
    role_may_replicate=True,
    is_superuser=False,
    in_recovery=False,
    max_replication_slots=10,
    max_wal_senders=10,
    settings={"wal_sender_timeout": "60000"},
)


def _source(
    name: str, *, slots: int, walsenders: int, slot: Slot | None = None, initial: Initial
) -> SourceFacts:
    """A source with one table on a server that has two slots and two walsenders."""
    facts = SourceFacts(SourceMapping(name, None, Secret(""), ()))
    facts.server = replace(SERVER, max_replication_slots=2, max_wal_senders=2)
    facts.usage = Usage(
        "UTF8",
        may_create=True,
        slots=slots,
        walsenders=walsenders,
        max_connections=100,
        connections_reserved=3,
        connections_used=10,
        large_objects=0,
        is_target=False,
    )
    facts.is_complete, facts.slot = True, slot
    relation = RelationName("public", "t")
    rule = TableRule(parse_relation("t", "public"), initial=initial)
    facts.mappings = [RelationMapping(relation, relation, rule)]
    return facts


SETTINGS = Settings.model_validate({"target": {"url": "postgresql://localhost/dw"}})
SLOT = Slot("s", "pgoutput", "shop", None, Lsn(1), Lsn(1), None)


def test_slots_and_walsenders_for_all_sources_of_a_server() -> None:
    def found(*sources: SourceFacts) -> list[tuple[str, str]]:
        findings = check_capacity(sources, None, SETTINGS)
        return [(f.severity.value, f.problem.partition(" ")[0]) for f in findings]

    copy, none = Initial.COPY, Initial.NONE
    assert found(_source("a", slots=0, walsenders=0, initial=copy)) == []
    # Two sources: each holds a slot and a walsender, and a copy needs a further walsender at the
    # same time.
    two = [_source(name, slots=0, walsenders=0, initial=copy) for name in "ab"]
    assert found(*two) == [("warning", "max_replication_slots"), ("error", "max_wal_senders")]
    two = [_source(name, slots=0, walsenders=0, initial=none) for name in "ab"]
    assert found(*two) == [("warning", "max_replication_slots"), ("warning", "max_wal_senders")]
    (slots, _) = check_capacity(
        [_source(n, slots=1, walsenders=0, initial=none) for n in "ab"], None, SETTINGS
    )
    assert slots.severity is ERROR
    assert "max_replication_slots is 2, of which 1 are free: 2 needed" in str(slots)
    assert "alter system set max_replication_slots = 4; then restart" in str(slots)
    # A copy needs a second slot; a streaming source already has its slot.
    held = _source("a", slots=2, walsenders=0, slot=SLOT, initial=copy)
    assert found(held) == [("error", "max_replication_slots")]
    streaming = replace(SLOT, active_pid=1)
    assert found(_source("a", slots=2, walsenders=2, slot=streaming, initial=copy)) == [
        ("warning", "max_replication_slots"),
        ("warning", "max_wal_senders"),
    ]


def test_a_standby_needs_a_walsender_more() -> None:
    facts = _source("a", slots=0, walsenders=0, initial=Initial.NONE)
    assert list(check_capacity([facts], None, SETTINGS)) == []
    assert facts.server is not None
    facts.server = replace(facts.server, in_recovery=True)
    (finding,) = check_capacity([facts], None, SETTINGS)
    assert "max_wal_senders is 2, of which 2 are free: 2 needed, and one more" in str(finding)


def test_copies_of_sources_at_once_need_walsenders_and_connections() -> None:
    sources = [_source(f"s{n}", slots=0, walsenders=0, initial=Initial.COPY) for n in range(30)]
    assert sources[0].usage is not None
    usage = replace(sources[0].usage, connections_used=80)
    for facts in sources:
        facts.server = replace(SERVER, max_replication_slots=100, max_wal_senders=31)
        facts.usage = usage
    found = list(check_capacity(sources, None, SETTINGS))
    walsenders, connections = found
    assert "max_wal_senders is 31, of which 31 are free: 30 needed, and 4 more" in str(walsenders)
    assert "alter system set max_wal_senders = 34" in str(walsenders)
    assert "max_connections is 100, of which 17 are free: 90 needed, and 12" in str(connections)
    assert "alter system set max_connections = 185" in str(connections)
    assert {f.severity for f in found} == {ERROR}
    one_at_a_time = SETTINGS.model_copy(update={"sync": SyncSection(sources_at_once=1)})
    assert len(list(check_capacity(sources, None, one_at_a_time))) == 1, "31 walsenders suffice"


def test_servers_that_are_not_at_hand() -> None:
    place, source = Place("shop"), replace(source_mapping(), failover=True)
    assert not [*check_server(place, SERVER, source), *check_settings(place, SERVER, streams=True)]
    for server, severity, words in (
        (replace(SERVER, version=19_00_00), WARNING, "newer than any"),
        (replace(SERVER, version=16_00_00), ERROR, "failover: true is set, which PostgreSQL 16"),
    ):
        assert matching(list(check_server(place, server, source)), severity, words)


def test_each_of_several_processes_needs_its_own_connections_at_the_target() -> None:
    settings = Settings.model_validate({"target": {"url": "postgresql:///t"}})
    one = target_needs(settings, 60)
    three = target_needs(settings.model_copy(update={"processes": 3}), 60)
    assert (three.always, three.copies) == (3 * one.always, 3 * one.copies)
