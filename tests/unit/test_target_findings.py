"""The judgements of `streamer check` on the target as a whole, made on facts."""

from dataclasses import replace
from typing import Any

import pytest

from streamer.bookkeeping.schema_version import SchemaVersion
from streamer.commands.check.capacity_findings import check_connections
from streamer.commands.check.target_facts import (
    BookkeepingFacts,
    Namespace,
    TargetFacts,
    TargetServer,
)
from streamer.commands.check.target_findings import (
    check_bookkeeping,
    check_loops,
    check_namespaces,
    check_origins,
    check_server,
)
from streamer.mapping.relation_names import RelationName
from streamer.report.problems import Severity
from streamer.runtime.session_needs import target_needs
from streamer.util.migrations import read_migrations
from tests.support.checking import ERROR, INFO, WARNING, matching
from tests.unit.test_capacity_findings import SERVER as SOURCE
from tests.unit.test_capacity_findings import SETTINGS
from tests.unit.test_source_findings import facts_of

SERVER = TargetServer(
    version=18_00_00, version_text="18.0", database="dw", encoding="UTF8", locale="C", role="me",
    is_superuser=False, may_create=True, may_use_temporary=True, may_use_plpgsql=True,
    has_plpgsql=True, may_replace_role=True, may_set_origin=True, origins_max=10, free_origins=10,
    is_source=False, in_recovery=False, system_identifier="9", timeline=1, started=5,
    synchronous_commit="on", fsync="on", max_connections=100, connections_reserved=3, connections_used=0,
)  # fmt: skip
NEWEST = read_migrations("target")[-1].number
OURS = BookkeepingFacts(
    True, True, ("migration", "relation", "source"), (), SchemaVersion(NEWEST, NEWEST)
)
NO_BOOKKEEPING = BookkeepingFacts(False, True, (), (), None)


def test_a_server_with_everything_right_has_no_findings() -> None:
    assert list(check_server(SERVER)) == []
    assert list(check_origins(SERVER, 99)) == []
    assert list(check_bookkeeping(SERVER, NO_BOOKKEEPING)) == []
    assert list(check_bookkeeping(SERVER, OURS)) == []
    newer = replace(OURS, version=SchemaVersion(NEWEST + 1, NEWEST))
    assert list(check_bookkeeping(SERVER, newer)) == []


@pytest.mark.parametrize(
    ("change", "severity", "words"),
    [
        ({"version": 11_00_00}, ERROR, ("too old", "oldest supported version is 12")),
        ({"version": 19_00_00}, WARNING, ("newer than any",)),
        ({"in_recovery": True}, ERROR, ("is a standby", "primary")),
        ({"may_use_temporary": False}, ERROR, ('grant temporary on database "dw" to "me"',)),
        (
            {"has_plpgsql": False, "may_use_plpgsql": False},
            ERROR,
            ("no language plpgsql", "create extension plpgsql"),
        ),
        ({"may_use_plpgsql": False}, ERROR, ('grant usage on language plpgsql to "me"',)),
        ({"synchronous_commit": "off"}, INFO, ("synchronous_commit is off",)),
        ({"synchronous_commit": "local"}, INFO, ("synchronous_commit is local",)),
        ({"fsync": "off"}, WARNING, ("fsync is off", "alter system set fsync = on")),
    ],
)
def test_one_thing_wrong_with_the_server_is_one_finding(
    change: dict[str, object], severity: Severity, words: tuple[str, ...]
) -> None:
    found = list(check_server(replace(SERVER, **change)))  # type: ignore[arg-type]
    assert len(found) == 1
    assert matching(found, severity, *words)


def test_writes_that_other_replication_cannot_tell_from_those_of_users() -> None:
    server = replace(SERVER, is_source=True)
    assert list(check_origins(server, 10)) == []
    (found,) = check_origins(server, 11)
    assert "10 replication origins are free, but up to 11 connections write" in found.problem
    assert "alter system set max_active_replication_origins = 11" in str(found)
    (found,) = check_origins(replace(server, version=17_00_00, free_origins=-3), 4)
    assert "0 replication origins are free" in found.problem
    assert "alter system set max_replication_slots = 17" in str(found)
    (found,) = check_origins(replace(server, may_set_origin=False), 1)
    assert found.fix is not None
    assert found.fix.sql
    (found,) = check_origins(replace(server, version=13_00_00, may_set_origin=False), 1)
    assert "only superusers" in str(found)


def test_a_schema_streamer_that_cannot_be_used() -> None:
    for change, words in (
        ({"may_use": False}, 'grant usage, create on schema streamer to "me"'),
        (
            {"tables": ("relation", "source")},
            "does not belong to streamer, but has a table relation",
        ),
        ({"forbidden_tables": ("source",)}, "may not write its tables"),
        (
            {"version": SchemaVersion(NEWEST + 2, NEWEST + 1)},
            f"newer streamer (migration {NEWEST + 2})",
        ),
    ):
        (found,) = check_bookkeeping(SERVER, replace(OURS, **change))
        assert found.severity is ERROR
        assert words in str(found)
    (found,) = check_bookkeeping(replace(SERVER, may_create=False), NO_BOOKKEEPING)
    assert 'grant create on database "dw" to "me"' in str(found)


def test_schemas_that_tables_cannot_be_written_or_made_in() -> None:
    source = facts_of()
    target = TargetFacts(SERVER, NO_BOOKKEEPING)

    def found(namespace: Namespace | None, *, create_tables: bool = True) -> list[str]:
        target.namespaces = {} if namespace is None else {"public": namespace}
        findings = check_namespaces(target, [source], create_tables=create_tables)
        return [finding.problem for finding in findings]

    assert found(Namespace(may_use=True, may_create=True)) == []
    assert found(Namespace(may_use=True, may_create=False), create_tables=False) == []
    assert found(Namespace(may_use=False, may_create=False)) == [
        'role "me" may not use it',
        'role "me" may not create the missing tables there',
    ]
    assert found(None) == []
    target.server = replace(SERVER, may_create=False)
    assert found(None) == ["is missing, and streamer may not create it"]
    assert found(None, create_tables=False) == []


def test_a_table_that_would_be_written_to_itself() -> None:
    source = facts_of()
    source.server = replace(SOURCE, started=SERVER.started)
    same = replace(SERVER, system_identifier=SOURCE.system_identifier, database=SOURCE.database)
    for server, count in (
        (same, 1),
        (replace(same, database="other"), 0),
        (replace(same, system_identifier="2"), 0),
        (replace(same, timeline=2), 0),  # a promoted standby, or a restored copy
        (replace(same, started=6), 0),  # a copied data directory
    ):
        assert len(list(check_loops(TargetFacts(server, NO_BOOKKEEPING), [source]))) == count
    source.mappings = [
        replace(mapping, target=RelationName("copies", "t")) for mapping in source.mappings
    ]
    assert list(check_loops(TargetFacts(same, NO_BOOKKEEPING), [source])) == []


def test_connections_at_the_target_hardly_depend_on_the_number_of_sources() -> None:
    assert target_needs(SETTINGS, 8) == target_needs(SETTINGS, 1000)
    needs = target_needs(SETTINGS, 200)
    enough = replace(SERVER, max_connections=needs.most + 5, connections_reserved=5)
    assert not list(check_connections(TargetFacts(enough, NO_BOOKKEEPING), needs))
    tight = replace(enough, connections_used=1)
    (finding,) = check_connections(TargetFacts(tight, NO_BOOKKEEPING), needs)
    assert finding.severity is ERROR
    assert f"max_connections = {needs.most + 6}" in str(finding)


@pytest.mark.parametrize("kind", ["role", "database"])
def test_a_limit_of_role_or_database_leaves_the_connections_that_a_run_needs(kind: str) -> None:
    needs = target_needs(SETTINGS, 200)

    def facts(used: int) -> TargetFacts:
        limits: Any = {
            f"{kind}_connections_max": needs.most + 2,
            f"{kind}_connections_used": used,
        }
        return TargetFacts(replace(SERVER, max_connections=1000, **limits), NO_BOOKKEEPING)

    assert not list(check_connections(facts(2), needs))
    (finding,) = check_connections(facts(3), needs)
    assert finding.severity is ERROR
    assert f"the connection limit of the {kind} is {needs.most + 2}, of which" in finding.problem
    name = SERVER.role if kind == "role" else SERVER.database
    assert f'alter {kind} "{name}" connection limit {needs.most + 3}' in str(finding)
