"""Generated columns of a source table, as statements for its target. Pure.

Publications leave generated columns out, so the target computes the values. ALTER COLUMN … SET
EXPRESSION (PostgreSQL 17 and later) rewrites all rows of the source without a change in its stream.
The same statement rewrites the rows of the target. An expression applies to all rows of a table, so
an operator decides if rows of peer sources, or former versions, would change too.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self, TypeVar

from streamer.mapping.rules import RelationMapping
from streamer.postgres.quoting import quote_identifier
from streamer.schema.columns_in_expressions import without_needless_quotes
from streamer.schema.desired_columns import (
    column_clause,
    generation_expression,
    names_at_target,
)
from streamer.schema.source_definition import DefinedColumn, DefinedSequence
from streamer.schema.table_definition import TableDefinition

_SET_EXPRESSION_MIN: Final = 17_00_00
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class GeneratedFacts:
    """``source_columns``: the names of all columns of the source. ``expressions``: the expressions
    of the target's generated columns. ``identities``: the target's identity columns, 'a' for always
    or 'd' for by default. ``sequences``: the sequences of the target's columns. ``drawing``:
    columns whose default uses a sequence. ``version``: the version of the target.
    """

    source_columns: Sequence[str] = ()
    expressions: Mapping[str, str] = field(default_factory=dict)
    identities: Mapping[str, str] = field(default_factory=dict)
    version: int = _SET_EXPRESSION_MIN
    sequences: Mapping[str, DefinedSequence] = field(default_factory=dict)
    drawing: frozenset[str] = frozenset()

    @classmethod
    def of(cls, source_columns: Sequence[str], table: TableDefinition, version: int) -> Self:
        """Return the facts of the target's *table*."""
        columns = table.columns
        return cls(
            source_columns,
            {c.name: c.default or "" for c in columns if c.generated},
            {c.name: c.identity for c in columns if c.identity},
            version,
            {c.name: c.sequence for c in columns if c.sequence is not None},
            frozenset(c.name for c in columns if c.draws),
        )

    def renamed(self, former: str, name: str) -> Self:
        """Return the facts after a column of the target got a new name."""

        def moved(facts: Mapping[str, V]) -> dict[str, V]:
            return {name if column == former else column: fact for column, fact in facts.items()}

        return replace(
            self,
            expressions=moved(self.expressions),
            identities=moved(self.identities),
            sequences=moved(self.sequences),
            drawing=frozenset(name if drawn == former else drawn for drawn in self.drawing),
        )


def expression_of(
    column: DefinedColumn, mapping: RelationMapping, present: Collection[str], facts: GeneratedFacts
) -> str:
    """Return the expression of a generated column for the target, which has the columns *present*.

    Raises TargetSchemaError if the expression uses a column that the target lacks or stores as a
    hash.
    """
    names = names_at_target(facts.source_columns, mapping, present)
    return generation_expression(column, names, mapping)


def set_expression(
    alter: str, name: str, column: DefinedColumn, text: str, facts: GeneratedFacts
) -> tuple[list[str], str | None]:
    """Return the statements that give column *name* of the target the expression *text*.

    The list is empty if the column already has that expression. The second item is the reason for
    an operator's decision, or None.
    """
    former = facts.expressions.get(name)
    if former is not None and without_needless_quotes(former) == without_needless_quotes(text):
        return [], None
    quoted = quote_identifier(name)
    if facts.version >= _SET_EXPRESSION_MIN:
        return [f"{alter} alter column {quoted} set expression as ({text})"], None
    doubt = (
        f"PostgreSQL {facts.version // 10000} at the target has no SET EXPRESSION, so column "
        f'"{name}" would be created again, without its indexes and constraints'
    )
    added = column_clause(replace(column, name=name, default=text))
    return [f"{alter} drop column {quoted}", f"{alter} add column {added}"], doubt
