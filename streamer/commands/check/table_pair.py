"""A table of a source and its target, as checks judge them. Pure."""

from dataclasses import dataclass

from streamer.commands.check.findings import Place, quote_relation
from streamer.commands.check.source_facts import SourceFacts
from streamer.commands.check.target_facts import TargetFacts
from streamer.mapping.expressions import ExpressionFacts
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import TableType
from streamer.mapping.rules import RelationMapping, SourceLabel
from streamer.schema.indexes_constraints_types import DefinedType
from streamer.schema.source_definition import DefinedColumn
from streamer.schema.target_relation import TargetColumn, TargetRelation
from streamer.schema_changes.create_tables import NewTable
from streamer.source.catalog import SourceRelation


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
    def tenant(self) -> str:
        """The label of the tenant whose rows the table contains."""
        return SourceLabel(self.facts.source.database, self.mapping.sid)

    @property
    def name(self) -> RelationName:
        return self.mapping.target

    @property
    def needs_copy(self) -> bool:
        """Whether the target still lacks all or some of the table's rows."""
        return self.target.needs_copy(self.facts.source, self.mapping)

    @property
    def quoted(self) -> str:
        return quote_relation(self.mapping.target)

    @property
    def expressions(self) -> ExpressionFacts:
        return self.facts.expressions.get(self.mapping.source, ExpressionFacts({}, {}))

    @property
    def new_table(self) -> NewTable:
        """The target table that `run` would create."""
        return NewTable(self.relation, self.mapping, self.expressions.types)

    @property
    def types(self) -> list[DefinedType]:
        return self.facts.types.get(self.mapping.source, [])


def expected_relation(pair: Pair) -> TargetRelation:
    """Return the relation that `run` would create, in the form of the catalogs.

    Raises TargetSchemaError.
    """
    table, primary_key = pair.new_table, tuple(pair.new_table.key)
    is_unique = primary_key and not table.timing and pair.mapping.type is not TableType.HISTORY
    is_unique = is_unique and table.has_unique_key
    rule = pair.mapping.rule.partition_by
    return TargetRelation(
        oid=0,
        name=pair.name,
        is_partitioned=rule is not None,
        partition_key=None if rule is None else rule.key,
        columns={column.name: target_column(column) for column in table.columns},
        primary_key=primary_key if table.has_unique_key else (),
        unique_keys=(primary_key,) if is_unique else (),
        leading_index_columns=frozenset(primary_key[:1]),
        has_row_triggers=False,
        is_referenced=False,
        is_writable=True,
    )


def target_column(column: DefinedColumn) -> TargetColumn:
    """Return a column that the target will have, in the form of the catalogs."""
    return TargetColumn(
        name=column.name,
        type=column.type,
        base_type=column.type,
        equality="=",
        type_oid=0,
        not_null=column.not_null,
        has_default=bool(column.default or column.identity) and not column.generated,
        generated=bool(column.generated),
        identity_always=False,
    )
