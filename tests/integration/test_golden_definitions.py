"""Golden cases: the SQL of a source's table, its rule, and the statements for its target.

`golden_definitions.txt` has the cases. Each case also runs its statements. Then the target has the
mapped definition of the source: a single model yields both.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamer.config import static_mapping
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import RelationMapping, resolve
from streamer.postgres.describing import USED_TYPES
from streamer.schema.indexes_constraints_types import DefinedType, TypeChange
from streamer.schema.planned_definition import TargetPlace
from streamer.schema.render_definitions import Renderer
from streamer.schema.source_definition import ColumnChange, SourceDefinition, all_differences
from streamer.schema.table_difference import as_it_is, table_difference, type_difference
from streamer.schema_changes.create_tables import NewTable, new_type_sql
from streamer.schema_changes.translate.definition_translator import DefinitionTranslator
from streamer.schema_changes.translate.generated_columns import GeneratedFacts
from streamer.schema_changes.translate.type_translator import TypeTranslator
from streamer.source.catalog import SourceRelation, read_relations
from streamer.source.connection import connection
from streamer.source.tables.user_defined_types import read_types
from streamer.target.catalog import read_relation
from streamer.target.connection import TargetAddress, target_connection
from tests.support.definitions import read_definition
from tests.support.postgres import Database
from tests.support.streamer import write_config

T = RelationName("public", "t")
KEYS = "hash_keys: {people: {key: 0123456789abcdef0123456789abcdef}}"


class Case:
    """A case of the file. ``steps``: SQL of the source, and the statements that follow."""

    def __init__(self, text: str) -> None:
        self.title, *lines = text.strip().splitlines()
        self.rule: list[str] = []
        self.sid: str | None = None
        self.steps: list[tuple[list[str], list[str]]] = []
        for line in lines:
            kind, _, rest = line.partition(":")
            rest = rest.strip()
            if kind == "target":
                self.steps[-1][1].append(rest)
            elif kind == "rule" and rest.startswith("sid: "):
                self.sid = rest.removeprefix("sid: ")
            elif kind == "rule":
                self.rule.append(rest)
            elif kind == "change" or not self.steps:
                self.steps.append(([rest], []))
            else:
                self.steps[-1][0].append(rest)


_, *TEXTS = Path(__file__).with_name("golden_definitions.txt").read_text().split("\n== ")
CASES = [Case(text) for text in TEXTS]


class Pair:
    """Both sides of the table of a case."""

    def __init__(self, case: Case, source: Database, target: Database, path: Path) -> None:
        self.case, self.source, self.target = case, source, target
        tables = "t:\n" + "".join(f"  {line}\n" for line in ["target: w.t", *case.rule])
        write_config(path, source, target, tables, settings=KEYS, sid=case.sid)
        (self.one,) = static_mapping.load(path)[1].sources
        self.mapping: RelationMapping
        (self.mapping,) = resolve(self.one, [T], "w")
        self.address = TargetAddress.parse(static_mapping.load(path)[0].target.url)

    async def relation(self) -> SourceRelation:
        async with connection(self.one) as plain:
            return (await read_relations(plain, [T]))[T]

    async def definition(self) -> SourceDefinition:
        """Return the definition in the form of a message, with the text of defaults."""
        known = (await self.relation()).definition
        texts = {c.name: c.default for c in read_definition(self.source, "public.t").columns}
        columns = (replace(column, default=texts[column.name]) for column in known.columns)
        return replace(known, columns=tuple(columns))

    async def created(self) -> Iterator[str]:
        """Return the statements for a new table, with the reasons for what the target lacks."""
        place = TargetPlace(self.mapping, self.case.sid is not None)
        renderer = Renderer(read_definition(self.source, "public.t"), place, {T: place}.get)
        relation = await self.relation()
        async with connection(self.one) as plain:
            types = await read_types(plain, {column.type_oid for column in relation.columns})
        made = [statement for type_ in types for statement in new_type_sql(type_)]
        made += NewTable(relation, self.mapping, {}).statements
        for planned in renderer.plan(self.mapping.rule.create):
            reason = planned.reason
            made += planned.statements if reason is None else [f"-- {reason}"]
        return iter(made)

    async def changed(self, before: SourceDefinition) -> Iterator[str]:
        """Return the statements for a table in the stream, with the columns to fill."""
        after = await self.definition()
        async with target_connection(self.address, "test") as there:
            table = await read_relation(there, self.mapping.target)
            assert table is not None
            names = [column.name for column in after.columns]
            present = read_definition(self.target, "w.t")
            facts = GeneratedFacts.of(names, present, there.server_version)
        translator = DefinitionTranslator(self.mapping, table, generated=facts)
        changes = all_differences(before, after)
        found = translator.translate([c for c in changes if isinstance(c, ColumnChange)])
        types = TypeTranslator({each.full_name: each for each in before.types or ()})
        typed = types.translate([c for c in changes if isinstance(c, TypeChange)])
        fills = zip(found.filled, found.reasons, strict=True)
        filled = [f"fill {name}: {why}" for name, why in fills]
        return iter([*typed.statements, *found.statements, *filled])


@pytest.mark.parametrize("case", CASES, ids=[case.title for case in CASES])
async def test_a_target_table_is_made_and_changed_as_the_rule_says(
    case: Case, source: Database, target: Database, tmp_path: Path
) -> None:
    pair = Pair(case, source, target, tmp_path / "config.yaml")
    target.execute("create schema w")
    before = None
    for sql, expected in case.steps:
        source.execute("; ".join(sql))
        made = list(await (pair.created() if before is None else pair.changed(before)))
        assert made == expected
        for statement in made:
            if not statement.startswith(("-- ", "fill ")):
                target.execute(statement)
        before = await pair.definition()
    here, there = read_definition(source, "public.t"), read_definition(target, "w.t")
    columns = frozenset(column.name for column in there.columns)
    place = TargetPlace(pair.mapping, case.sid is not None, columns)
    is_shared = case.sid is not None
    assert table_difference(here, place, {T: place}.get, there, is_shared=is_shared) == []
    assert table_difference(there, as_it_is(there.name), as_it_is, there) == []
    assert type_difference(used_types(source, "public.t"), used_types(target, "w.t")) == []


def used_types(side: Database, table: str) -> list[DefinedType]:
    used = USED_TYPES.replace("c.oid", f"'{table}'::regclass")
    found: Any = side.value(f"select ({used})")
    return [DefinedType.of(each) for each in found or ()]
