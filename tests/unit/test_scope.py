"""The part of a fleet that `--database`, `--sid` and names of tables choose."""

import pytest

from streamer.errors.error_classes import MappingError
from streamer.mapping.relation_names import parse_relation
from streamer.mapping.row_sid import SidTemplate
from streamer.mapping.rules import Mapping, SourceLabel, SourceMapping, TableRule
from streamer.mapping.scope import Scope
from streamer.postgres.secret import Secret

TENANTS = TableRule(parse_relation("*.*", "public"), sid=SidTemplate.parse("{schema}"))
FLEET = Mapping(
    (
        SourceMapping("shop", "eu", Secret(""), ()),
        SourceMapping("shop", "us", Secret(""), (TENANTS,)),
        SourceMapping("bank", None, Secret(""), (TENANTS,)),
    )
)
TABLES = {
    ("shop", "eu"): {"public.t": "eu"},
    ("shop", "us"): {"a.t": "a", "b.t": "b"},
    ("bank", None): {"a.t": "a", "a.u": "a"},
}


def tables_of(scope: Scope) -> list[str]:
    return [
        f"{label} {name}"
        for (database, sid), tables in TABLES.items()
        for label in [SourceLabel(database, sid)]
        for name in scope.select(label, ((name, row_sid, name) for name, row_sid in tables.items()))
    ]


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        (Scope(), ["shop:eu public.t", "shop:us a.t", "shop:us b.t", "bank a.t", "bank a.u"]),
        (Scope(sid="a"), ["shop:us a.t", "bank a.t", "bank a.u"]),
        (Scope(sid="a", database="bank"), ["bank a.t", "bank a.u"]),
        (Scope(("*.u",), sid="a"), ["bank a.u"]),
        (Scope(("a.t",), database="shop"), ["shop:us a.t"]),
        (Scope(sid="us"), ["shop:us a.t", "shop:us b.t"]),
        (Scope(sid="eu"), ["shop:eu public.t"]),
        (Scope(sid="b", labels=frozenset({"bank"})), []),
        (Scope.of(FLEET.sources[2]), ["bank a.t", "bank a.u"]),
        (Scope(sid="c"), []),
    ],
    ids=str,
)
def test_a_sid_is_that_of_a_source_or_of_rows(scope: Scope, expected: list[str]) -> None:
    assert tables_of(scope) == expected
    may_have = {source.label for source in scope.sources_of_tables(FLEET)}
    assert {table.split()[0] for table in expected} <= may_have


def test_a_tenant_that_is_a_schema_is_no_source() -> None:
    assert [source.label for source in Scope(sid="eu").sources(FLEET)] == ["shop:eu"]
    assert Scope(sid="a").sources_of_tables(FLEET) == list(FLEET.sources[1:])
    with pytest.raises(MappingError, match="no source has this database and sid"):
        Scope(sid="a").sources(FLEET)
    with pytest.raises(MappingError, match="no rows of a table have this sid"):
        Scope(database="other").sources_of_tables(FLEET)
    assert Scope().has_whole(FLEET.sources[0])
    assert Scope(sid="us").has_whole(FLEET.sources[1])
    assert not Scope(sid="a").has_whole(FLEET.sources[1])
    assert not Scope(("t",)).has_whole(FLEET.sources[0])
