"""The tables that streamer creates for several tenants, wide enough for all definitions. Pure.

`streamer.schema_changes.widen_shared_table` widens such a table for each tenant before the copy of
that tenant, and never afterwards. A column without a type common to all tenants accepts the values
of some tenants only.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from streamer.commands.check.findings import Finding, error, in_words, info
from streamer.commands.check.source_facts import SourceFacts
from streamer.commands.check.table_pair import Pair, expected_relation, target_column
from streamer.commands.check.target_facts import TargetFacts
from streamer.errors.error_classes import TargetSchemaError
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import DdlCapture, DdlKind
from streamer.schema.desired_columns import at_target
from streamer.schema.indexes_constraints_types import DefinedType
from streamer.schema.source_definition import widens
from streamer.schema.target_relation import TargetRelation
from streamer.schema_changes.tenant_types import find_unlike_types
from streamer.schema_changes.translate.joining_source import widening, widening_statements


@dataclass(slots=True)
class SharedTable:
    """A target table and the tenants that share it.

    ``relation``: wide enough for the definitions of all tenants. ``origins``: the label of the
    tenant that defined the type of a column, by column. ``types``: the types of columns.
    """

    relation: TargetRelation
    types: list[DefinedType]
    origins: dict[str, str] = field(default_factory=dict)

    def add(self, pair: Pair) -> None:
        """Widen the table for the rows of *pair*, as `run` does before the copy."""
        mapping, columns = pair.mapping, dict(self.relation.columns)
        changes, unfilled = widening(pair.relation.definition, mapping, self.relation)
        for change in changes:
            name = mapping.own_column(change.column, columns)
            if change.after is None or name is None:
                continue
            present, column = columns.get(name), at_target(change.after, mapping, name)
            if present is None:
                columns[name] = target_column(
                    replace(column, name=name, not_null=False, default=None, identity="")
                )
                self.origins[name] = pair.tenant
            elif change.kind is DdlKind.WIDEN_TYPE:
                columns[name] = replace(present, type=column.type, base_type=column.type)
                self.origins[name] = pair.tenant
            elif change.kind is DdlKind.DROP_NOT_NULL:
                unfilled.append(name)
        for name in set(unfilled) - set(self.relation.primary_key):
            columns[name] = replace(columns[name], not_null=False)
        self.relation = replace(self.relation, columns=columns)
        self.name_origins(pair)

    def name_origins(self, pair: Pair) -> None:
        """Record the tenant of *pair* as the origin of columns that no earlier tenant fills."""
        for column in pair.relation.columns:
            name = pair.mapping.target_column(column.name)
            if name in self.relation.columns and not column.generated:
                self.origins.setdefault(name, pair.tenant)


def shared_tables(
    sources: Iterable[SourceFacts], target: TargetFacts, *, create_tables: bool
) -> dict[RelationName, SharedTable]:
    """Return, by name, the tables of tenants that `run` creates or has created."""
    created = {record.target for record in target.relations.values() if record.target_created}
    shared: dict[RelationName, SharedTable] = {}
    for facts in sources:
        captures = facts.source.ddl is DdlCapture.CAPTURE
        for mapping, relation in facts.mapped():
            pair = Pair(facts, target, mapping, relation)
            if mapping.sid is None:
                continue
            if mapping.target not in shared:
                table = target.tables.get(mapping.target)
                if table is None and create_tables:
                    try:
                        shared[mapping.target] = SharedTable(expected_relation(pair), pair.types)
                    except TargetSchemaError:  # `check_missing` names the column
                        continue
                elif table is not None and table.relation is not None:
                    is_ours = str(mapping.target) in created and table.relation.has_sid
                    if not is_ours or captures:  # `on_ddl` decides
                        continue
                    shared[mapping.target] = SharedTable(
                        table.relation, target.shared_types.get(mapping.target, [])
                    )
                else:
                    continue
            if mapping.target not in target.tables or pair.needs_copy:
                shared[mapping.target].add(pair)
            else:
                shared[mapping.target].name_origins(pair)
    return shared


def check_widening(pair: Pair, relation: TargetRelation) -> Iterable[Finding]:
    """Name the statements by which `run` widens its own table *relation* for this tenant."""
    statements = widening_statements(pair.relation.definition, pair.mapping, relation)
    if statements:
        problem = f"its target table {pair.name} is narrower than this tenant's"
        yield info(pair.place, problem, in_words(f"`run` will: {'; '.join(statements)}"))


def check_common_types(pair: Pair, shared: SharedTable) -> Iterable[Finding]:
    """Find columns whose type has no common type with the type of another tenant."""
    for column in pair.relation.columns:
        name = pair.mapping.target_column(column.name)
        present = shared.relation.columns.get(name or "")
        if name is None or present is None or column.generated or pair.mapping.is_computed(name):
            continue
        kind = pair.mapping.type_of(name, column.type)
        if kind == present.type or widens(kind, present.type):
            continue
        # Each tenant's schema has a type of this name, and the target has a single such type.
        if pair.mapping.rule.sid is not None and _bare(kind) == _bare(present.type):
            continue
        origin = shared.origins.get(name, "another tenant")
        yield error(
            pair.place,
            f'column "{column.name}" has type {column.type}, but {present.type} in the table of '
            f"{origin}, and tenants share target table {pair.name}",
            in_words(
                "exclude the column, rename it with `columns`, or give this tenant a `target` of "
                "its own"
            ),
        )
    yield from _check_tenant_types(pair, shared)


def _check_tenant_types(pair: Pair, shared: SharedTable) -> Iterable[Finding]:
    """Find types of a tenant's schema that differ from the types of the shared table."""
    if pair.mapping.rule.sid is None:
        return
    definition = replace(pair.relation.definition, types=tuple(pair.types))
    for unlike in find_unlike_types(definition, pair.mapping, shared.relation, shared.types):
        problem = unlike.problem(pair.mapping.source, pair.name)
        yield error(pair.place, problem, in_words(unlike.advice))


def _bare(type_name: str) -> str:
    """Return the name of a type without its schema."""
    return type_name.rpartition(".")[2]
