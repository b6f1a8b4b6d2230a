"""A table of a source and its target, as checks judge them. Pure."""

from dataclasses import dataclass

from streamer.commands.check.findings import Place, quote_relation
from streamer.commands.check.source_facts import SourceFacts
from streamer.commands.check.target_facts import TargetFacts
from streamer.mapping.expressions import ExpressionFacts
from streamer.mapping.names import RelationName
from streamer.mapping.options import TableType
from streamer.mapping.rules import RelationMapping
from streamer.source.catalog import SourceRelation
from streamer.source.user_defined_types import SourceType
from streamer.target.catalog import TargetColumn, TargetRelation
from streamer.target.conventions import HISTORY_COLUMNS, SID


@dataclass(frozen=True, slots=True)
class Pair:
    """A table of a source and its target."""

    facts: SourceFacts
    target: TargetFacts
    mapping: RelationMapping
    relation: SourceRelation

    @property
    def place(self) -> Place:
        return Place(self.facts.label, str(self.mapping.source))

    @property
    def sid(self) -> str | None:
        return self.facts.source.sid

    @property
    def name(self) -> RelationName:
        return self.mapping.target

    @property
    def needs_copy(self) -> bool:
        """Whether `run` would begin with a copy of this table, or with handing it over."""
        return self.target.needs_copy(self.facts.source, self.mapping)

    @property
    def quoted(self) -> str:
        return quote_relation(self.mapping.target)

    @property
    def expressions(self) -> ExpressionFacts:
        return self.facts.expressions.get(self.mapping.source, ExpressionFacts({}, {}))

    @property
    def types(self) -> list[SourceType]:
        return self.facts.types.get(self.mapping.source, [])


def expected_relation(pair: Pair) -> TargetRelation:
    """Return the relation that `create_table_sql` would create, in the form of the catalogs."""
    relation, mapping = pair.relation, pair.mapping
    columns: dict[str, TargetColumn] = {}
    if pair.sid is not None:
        columns[SID] = target_column(SID, "text", not_null=True)
    key = tuple(
        name
        for name in map(mapping.target_column, relation.key or relation.primary_key)
        if name is not None
    )
    for column in relation.columns:
        name = mapping.target_column(column.name)
        if name is None or mapping.has_expression(name):
            continue
        if name in key or not mapping.is_optional(column.name):
            kind = mapping.type_of(name, column.type)
            columns[name] = target_column(
                name, kind, not_null=column.not_null, generated=bool(column.generated)
            )
    for name, _ in mapping.rule.set:
        columns[name] = target_column(name, pair.expressions.types.get(name, "text"))
    if mapping.type is TableType.HISTORY:
        for name in HISTORY_COLUMNS:
            columns[name] = target_column(name, "timestamp with time zone", has_default=True)
    primary_key = ((SID,) if pair.sid is not None else ()) + key if key else ()
    is_late = relation.primary_key_timing and not relation.key
    is_unique = primary_key and not is_late and mapping.type is not TableType.HISTORY
    return TargetRelation(
        oid=0,
        name=pair.name,
        is_partitioned=False,
        columns=columns,
        primary_key=primary_key,
        unique_keys=(primary_key,) if is_unique else (),
        leading_index_columns=frozenset(primary_key[:1]),
        has_row_triggers=False,
        is_referenced=False,
        is_writable=True,
    )


def target_column(
    name: str,
    kind: str,
    *,
    not_null: bool = False,
    has_default: bool = False,
    generated: bool = False,
) -> TargetColumn:
    return TargetColumn(
        name=name,
        type=kind,
        base_type=kind,
        equality="=",
        type_oid=0,
        not_null=not_null,
        has_default=has_default,
        generated=generated,
        identity_always=False,
    )
