"""Builds a table to compare from the definitions of both sides. Pure.

The source computes `filter` and `set`, and casts a value whose column has a different type in the
target. The target reads only the rows of a single source, and only the open versions of a history
table.

A few types need care. A cast of ``char(n)`` to text drops blanks, so the query calls the output
function. PostgreSQL 16 writes non-ASCII values of ``"char"`` in a new format, so the comparison
uses numbers. The text of such a number is not a value of the type, so no index finds such a key.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from streamer.apply.rows.apply_plan import computed_cast
from streamer.apply.rows.binary_transfer import BINARY_OIDS
from streamer.apply.rows.make_plan import match_columns, missing_error, two_sids
from streamer.compare.compared_table import ComparedTable, Side
from streamer.compare.row_hashes import HashKind
from streamer.decode.pgoutput import Relation
from streamer.errors.error_classes import MappingError
from streamer.mapping.expressions import Expression, over_columns
from streamer.mapping.rule_options import TableType
from streamer.mapping.rules import RelationMapping
from streamer.mapping.sid_and_history_columns import SID, STABLE_OIDS_END
from streamer.postgres.quoting import quote_identifier, quote_literal, quote_qualified
from streamer.schema.target_relation import TargetColumn, TargetRelation

if TYPE_CHECKING:  # the imported modules read servers
    from streamer.schema.source_definition import DefinedColumn
    from streamer.source.catalog import SourceRelation

_CHAR: Final = 18
_BPCHAR: Final = 1042
_HASHED: Final = "case when {} is not null then 'hashed' end"

ORDERED_TYPES: Final = frozenset(
    {
        *(16, 17, 19, 20, 21, 23, 26, 700, 701, 829, 869, 650, 774, 1082, 1083),
        *(1114, 1184, 1186, 1266, 1560, 1562, 1700, 2950, 3220),
    }
)
"""OIDs of the types that every server sorts in the same order, independent of locale and
version.
"""


@dataclass(frozen=True, slots=True)
class TableFacts:
    """All facts about a table that a comparison needs.

    ``published``: the relation in the source's publication. ``where``: the operator's condition.
    ``copy_where``: the condition of the first copy, if the comparison leaves out all other rows.
    ``kept``: the condition for rows that the retention of the target keeps.
    """

    relation_id: int
    source_id: int
    database: str
    sid: str | None
    mapping: RelationMapping
    relation: "SourceRelation"
    published: Relation
    target: TargetRelation
    where: Expression | None = None
    copy_where: Expression | None = None
    kept: Expression | None = None


@dataclass(frozen=True, slots=True)
class _Value:
    """A column of the target and the source's expression for the value.

    ``source``: the column that holds the value; None for a computed value. ``is_same``: the value
    needs no cast. ``is_hashed``: compare only whether the value is NULL. ``has_type``: the
    expression has the type of the target's column.
    """

    target: TargetColumn
    expression: str
    source: str | None
    is_same: bool
    is_hashed: bool = False
    has_type: bool = False

    @property
    def sent_type(self) -> str:
        """The type whose binary form both sides compare; empty for the text."""
        is_sent = self.has_type and self.target.base_oid in BINARY_OIDS - {_CHAR}
        return self.target.base_type if is_sent else ""

    @property
    def target_expression(self) -> str:
        """The value of a row t of the target."""
        name = f"t.{quote_identifier(self.target.name)}"
        return _HASHED.format(name) if self.is_hashed else name


def build_table(facts: TableFacts, kind: HashKind, buckets: int) -> ComparedTable:
    """Build the table from the definitions of both sides.

    Raises TargetSchemaError or MappingError if the definitions do not match.
    """
    values = _values(facts)
    sid = _own_sid(facts)
    key = _key(facts, values)
    types = _key_types(values, key)
    target = facts.target
    is_ordered = bool(types) and _is_ordered(facts, values, key, has_sid=sid is not None)
    return ComparedTable(
        relation_id=facts.relation_id,
        source_id=facts.source_id,
        database=facts.database,
        sid=facts.sid,
        source_name=str(facts.relation.name),
        target_name=str(target.name),
        type=facts.mapping.type.value,
        columns=tuple(value.target.name for value in values),
        texts=tuple(value.target.base_oid == _BPCHAR for value in values),
        sent_types=tuple(value.sent_type for value in values),
        key=key,
        key_types=types,
        is_ordered=is_ordered,
        buckets=buckets,
        hash=kind,
        row_sid=sid,
        is_disjoint=facts.mapping.rule.is_disjoint,
        has_char=any(value.target.base_oid == _CHAR for value in values),
        source=_source_side(facts, values),
        target=_target_side(facts, values, sid),
    )


def _values(facts: TableFacts) -> list[_Value]:
    mapping = facts.mapping
    matched, missing = match_columns(facts.published, mapping, facts.target)
    if missing:
        types = {column.name: column.type for column in facts.relation.columns}
        raise missing_error(mapping, facts.target.name, missing, types)
    sources = {column.name: column for column in facts.relation.columns}
    values: dict[str, _Value] = {}
    for match in matched:
        column = sources[facts.published.columns[match.position].name]
        if mapping.hash_of(match.name) is None:
            values[match.name] = _plain_value(column, match.target)
        else:  # neither server has the hash key, so compare only NULL
            is_null = _HASHED.format(quote_identifier(column.name))
            values[match.name] = _Value(match.target, is_null, None, is_same=False, is_hashed=True)
    for name, expression in mapping.rule.set:
        output = facts.target.columns.get(name)
        if output is not None:
            cast = computed_cast(output, of_target=False)
            exact = f"::{output.base_type}" if 0 < output.base_oid < STABLE_OIDS_END else ""
            computed = f"(({expression}){cast}){exact}"
            values[name] = _Value(output, computed, None, is_same=False, has_type=bool(exact))
    if not values:
        raise MappingError(f'table "{mapping.source}" has no column to compare')
    return list(values.values())


def _plain_value(column: "DefinedColumn", target: TargetColumn) -> _Value:
    name = quote_identifier(column.name)
    if column.type in (target.type, target.base_type):
        has_type = column.type == target.base_type
        return _Value(target, name, column.name, is_same=True, has_type=has_type)
    if 0 < target.base_oid < STABLE_OIDS_END:  # the value in the type of the target's column
        # Use the text that the source sends, because a cast to text drops the blanks of char(n).
        text = f"case when {name} is distinct from null then pg_catalog.format('%s', {name}) end"
        expression = f"({text})::{target.base_type}"
        return _Value(target, expression, column.name, is_same=False, has_type=True)
    return _Value(target, name, column.name, is_same=False)


def _own_sid(facts: TableFacts) -> str | None:
    mapped = {facts.mapping.target_column(column.name) for column in facts.relation.columns}
    if not facts.target.has_sid or SID in mapped:
        if facts.target.has_sid and facts.mapping.sid is not None:
            raise two_sids(facts.mapping)
        return None
    return facts.mapping.sid


def _key(facts: TableFacts, values: list[_Value]) -> tuple[int, ...]:
    """Return the positions of the source's primary key, or of its replica identity, in the order of
    the index. Return an empty tuple unless the target contains all these columns.
    """
    relation = facts.relation
    identity = next((k for k in relation.unique_keys if set(k) == set(relation.key)), ())
    names = relation.primary_key or (identity if relation.key else ())
    positions = {value.source: n for n, value in enumerate(values) if value.source is not None}
    if not names or not all(name in positions for name in names):
        return ()
    return tuple(positions[name] for name in names)


def _key_types(values: list[_Value], key: tuple[int, ...]) -> tuple[str, ...]:
    """Return the types with which both servers can find a key, or an empty tuple."""
    types = []
    for position in key:
        value = values[position]
        output = value.target
        if not value.is_same or not 0 < output.base_oid < STABLE_OIDS_END:
            return ()
        if output.base_oid == _CHAR:
            return ()
        types.append(output.base_type if output.base_oid == _BPCHAR else output.plain_type)
    return tuple(types)


def _is_ordered(
    facts: TableFacts, values: list[_Value], key: tuple[int, ...], *, has_sid: bool
) -> bool:
    """Whether both servers sort keys in the same order, and find a range of keys by an index."""
    if not all(values[i].target.base_oid in ORDERED_TYPES for i in key):
        return False
    if not all(values[i].target.not_null for i in key):
        return False  # a row without a key would be outside all ranges
    names = [values[i].target.name for i in key]
    index_keys = [names, [SID, *names]] if has_sid else [names]
    return any(
        list(index[: len(names_in_order)]) == names_in_order
        for index in facts.target.unique_keys
        for names_in_order in index_keys
    )


def _shown(expression: str, target: TargetColumn) -> str:
    return f"{expression}::int4" if target.base_oid == _CHAR else expression


def _source_side(facts: TableFacts, values: list[_Value]) -> Side:
    relation, rule = facts.relation, facts.mapping.rule
    only = "" if relation.is_partitioned else "only "
    table = f"{only}{quote_qualified(relation.name.namespace, relation.name.name)}"
    shown = [_shown(value.expression, value.target) for value in values]
    expressions = (rule.filter, facts.copy_where, facts.kept, facts.where)
    conditions = [f"({e})" for e in expressions if e is not None]
    return _side(table, shown, conditions)


def _target_side(facts: TableFacts, values: list[_Value], sid: str | None) -> Side:
    table = facts.target.rows
    shown = [_shown(value.target_expression, value.target) for value in values]
    conditions = []
    if sid is not None:
        conditions.append(f"t.{quote_identifier(SID)} = {quote_literal(sid)}")
    if facts.mapping.type is TableType.HISTORY:
        history = facts.mapping.rule.history
        conditions.append(f"{history.is_open('t')} and not {history.quoted('t')[2]}")
    if (deleted_at := facts.mapping.rule.deleted_at) is not None:
        conditions.append(f"t.{quote_identifier(deleted_at)} is null")
    for place, where in (
        ("copy_where", facts.copy_where),
        ("partition_by", facts.kept),
        ("--where", facts.where),
    ):
        if where is not None:
            conditions.append(_where_of_target(facts, values, where, place))
    return _side(table, shown, conditions)


def _where_of_target(facts: TableFacts, values: list[_Value], where: Expression, place: str) -> str:
    """Return a condition over the target's columns, by the names of the source's."""
    target_names = {v.source: v.target.name for v in values if v.source is not None and v.is_same}
    if unknown := where.unknown(target_names):
        raise MappingError(
            f'{place} uses column "{unknown[0]}", and target table "{facts.target.name}" does not '
            "store the source's values of this column",
            hint=f"use these: {', '.join(sorted(target_names))}",
        )
    return over_columns(where, target_names, "t")


def _side(table: str, values: list[str], conditions: list[str]) -> Side:
    where = f"where {' and '.join(conditions)}" if conditions else ""
    return Side(table, tuple(values), where)
