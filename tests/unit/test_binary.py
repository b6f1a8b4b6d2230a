"""When values may travel in binary."""

from dataclasses import replace

import pytest

from streamer.apply.rows.binary_transfer import BINARY_TYPES, binary_obstacle, binary_types
from streamer.decode.pgoutput import Relation
from streamer.mapping.rule_options import OnColumnAdded
from streamer.mapping.rules import RelationMapping
from streamer.schema.target_relation import TargetColumn, TargetRelation
from streamer.source.stream.replication_stream import StreamOptions
from tests.unit.build import (
    relation,
    relation_mapping,
    source_mapping,
    target_column,
    target_relation,
)

TEXT, INT8, MOOD, REGCLASS, NAME = 25, 20, 16_400, 2205, 19


def of_types(**types: int) -> Relation:
    built = relation(list(types), ["id"])
    columns = tuple(replace(c, type_oid=types[c.name]) for c in built.columns)
    return replace(built, columns=columns)


def there(**types: int) -> TargetRelation:
    columns: list[str | TargetColumn] = [
        replace(target_column(name, f"type {oid}"), type_oid=oid) for name, oid in types.items()
    ]
    return target_relation(columns)


def obstacle(
    source: Relation,
    target: TargetRelation | None,
    mapping: RelationMapping | None = None,
    sid: str | None = None,
) -> str | None:
    return binary_obstacle(
        source,
        mapping or relation_mapping(sid=sid),
        target,
        types=binary_types(18_00_00, 18_00_00),
        type_names={"m": "mood"},
    )


def test_types_of_postgresql_that_are_the_same_on_both_sides_are_fine() -> None:
    assert obstacle(of_types(id=INT8, v=TEXT), there(v=TEXT, id=INT8, more=MOOD)) is None
    assert obstacle(of_types(id=INT8, v=TEXT), None) is None


@pytest.mark.parametrize("oid", [MOOD, REGCLASS, 30, 1033, 1034])
def test_other_types_are_not(oid: int) -> None:
    unsafe = 'column "m" of table "public.t" is of mood, which is not safe in binary'
    assert obstacle(of_types(id=INT8, m=oid), there(id=INT8, m=oid)) == unsafe
    # The target gets the type with a new table or column.
    assert obstacle(of_types(id=INT8, m=oid), None) == unsafe
    assert obstacle(of_types(id=INT8, m=oid), there(id=INT8)) == unsafe


def test_another_type_at_the_target_is_not() -> None:
    said = obstacle(of_types(id=INT8, v=TEXT), there(id=INT8, v=1043))
    assert said == 'column "v" of table "public.t" is type 25, and type 1043 at the target'


def test_columns_that_are_not_written_do_not_matter() -> None:
    source, target = of_types(id=INT8, m=MOOD), there(id=INT8)
    assert obstacle(source, target, relation_mapping(exclude=["m"])) is None
    assert obstacle(source, None, relation_mapping(exclude=["m"])) is None
    assert obstacle(source, target, relation_mapping(columns={"id": "id"})) is None
    ignores = relation_mapping(on_column_added=OnColumnAdded.IGNORE)
    assert obstacle(source, target, ignores) is None
    generated = target_relation([target_column("m", generated=True)])
    assert obstacle(of_types(m=MOOD), generated) is None


@pytest.mark.parametrize(("oid", "fits"), [(TEXT, True), (1043, True), (1042, True), (NAME, False)])
def test_a_sid_is_text(oid: int, fits: bool) -> None:
    source, target = of_types(id=INT8), there(id=INT8, sid=oid)
    assert (obstacle(source, target, sid="eu") is None) is fits
    assert obstacle(source, target) is None
    assert obstacle(of_types(id=INT8, sid=oid), target) is None


def test_an_interval_may_be_infinite_on_servers_with_infinite_intervals() -> None:
    interval = set(BINARY_TYPES["interval"])
    assert binary_types(17_00_00, 16_00_04) == binary_types(16_00_00, 16_00_00) - interval
    assert binary_types(15_00_00, 18_00_00) == binary_types(17_00_00, 17_00_00)
    assert interval < binary_types(16_00_00, 15_00_00)


@pytest.mark.parametrize(("version", "has_binary"), [(13_00_00, False), (14_00_00, True)])
def test_a_source_is_asked_for_binary_from_14_on(version: int, has_binary: bool) -> None:
    options = StreamOptions.for_version(version, source_mapping(), ("p",), binary=True)
    assert ("binary 'true'" in options.sql()) is has_binary
    assert "binary" not in StreamOptions.for_version(version, source_mapping(), ("p",)).sql()
