"""Problems of target tables: verdict of the plan, privileges, types, keys, existing rows.

`streamer.apply.rows.apply_plan` makes the plans from the source's present catalogs. So `run`
reaches the same verdict at the first change. Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from streamer.apply.rows.apply_plan import ApplyPlan, Identity
from streamer.apply.rows.make_plan import (
    judge_added,
    make_plan,
    missing_columns,
    missing_remedy,
    missing_target,
)
from streamer.bookkeeping.purges import remaining_rows_error
from streamer.commands.check.findings import (
    Finding,
    Fix,
    Place,
    at_target,
    error,
    from_error,
    in_words,
    info,
    warning,
)
from streamer.commands.check.identity_findings import key_fix
from streamer.commands.check.shared_table_findings import (
    SharedTable,
    check_common_types,
    check_widening,
)
from streamer.commands.check.source_facts import SourceFacts
from streamer.commands.check.table_pair import Pair, expected_relation, target_column
from streamer.commands.check.target_facts import TargetFacts, TargetTable, written_sid
from streamer.commands.check.type_conversion import type_risk
from streamer.copy.copy_obstacles import OCCUPIED_WORDS, occupied_error
from streamer.copy.resync_scope import check_copy_where, unchanged_columns
from streamer.errors.error_classes import MappingError, TargetSchemaError
from streamer.errors.remedies import Remedy, Sql
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import Initial, OnColumnAdded, TableType
from streamer.mapping.rules import SourceLabel
from streamer.mapping.sid_and_history_columns import SID
from streamer.postgres.describing import USER_OIDS_BEGIN
from streamer.postgres.quoting import (
    quote_columns,
    quote_identifier,
    quote_literal,
)
from streamer.schema.desired_columns import (
    add_columns_sql,
    alter_type_sql,
    column_clause,
    columns_to_add,
    generation_expression,
    names_at_target,
)
from streamer.schema.indexes_constraints_types import type_difference
from streamer.schema.source_definition import ColumnChange, DefinedColumn
from streamer.schema.target_relation import TargetColumn, TargetRelation
from streamer.schema_changes.create_tables import published_relation, schemas_and_types_sql
from streamer.schema_changes.translate.type_translator import TypeTranslator
from streamer.target.missing_grants import Grants, needed_on_table
from streamer.target.missing_types import extension_sql, missing_type
from streamer.target.target_partitions import ROWS_MAX


def check_target_tables(
    facts: SourceFacts,
    target: TargetFacts,
    shared: Mapping[RelationName, SharedTable],
    *,
    create_tables: bool,
) -> Iterable[Finding]:
    """Judge the target of every mapped table of a source. *shared*: see `shared_tables`."""
    for mapping, relation in facts.mapped():
        if mapping.source in facts.expression_errors:
            continue
        pair = Pair(facts, target, mapping, relation)
        table = target.tables.get(mapping.target)
        if table is None:
            yield from check_missing(pair, shared.get(pair.name), create_tables=create_tables)
        elif table.relation is None:
            yield from_error(pair.place, missing_target(pair.name, table.kind))
        else:
            yield from check_table(pair, table, table.relation, shared.get(pair.name))
    yield from check_labels(facts, target)


# ---- missing tables ----------------------------------------------------------------------------


def check_missing(
    pair: Pair, shared: SharedTable | None, *, create_tables: bool
) -> Iterable[Finding]:
    """Judge a missing target table, which `run` creates or an operator must create."""
    try:
        pair.new_table.check()
    except TargetSchemaError as exc:
        yield error(pair.place, exc.message, in_words(exc.hint) if exc.hint else None)
        return
    if not create_tables:
        grants = Grants(pair.target.server.role)
        statements = [*missing_types_sql(pair)]
        if pair.name.namespace not in pair.target.namespaces:
            statements.insert(0, grants.create_schema(pair.name.namespace))
        statements += pair.new_table.statements
        # Another role may run these statements, and then owns the table.
        rights = ("select", "insert", "update", "delete", "truncate")
        statements.append(grants.on_table(rights, pair.quoted))
        fix = at_target(*statements, words="or set `target.create_tables: true`")
        yield error(pair.place, missing_target(pair.name).message, fix)
        return
    yield from check_extensions(pair)
    yield from check_collations(pair)
    try:
        make_pair_plan(pair, expected_relation(pair) if shared is None else shared.relation)
    except TargetSchemaError as exc:
        yield error(pair.place, exc.message, in_words(exc.hint) if exc.hint else None)
    if shared is not None:
        yield from check_common_types(pair, shared)


def check_collations(pair: Pair) -> Iterable[Finding]:
    """Find collations of the table's columns that the target lacks."""
    for column in pair.relation.columns:
        name = pair.mapping.target_column(column.name)
        if name is None or column.collation is None or column.collation in pair.target.collations:
            continue
        problem = (
            f'the target has no collation {column.collation}, which column "{column.name}" uses'
        )
        words = "create the collation at the target, or create the table with another collation"
        yield error(pair.place, problem, in_words(words))


def check_extensions(pair: Pair) -> Iterable[Finding]:
    """Find missing types of extensions; streamer creates all other types with the table."""
    for kind in pair.types:
        if kind.full_name in pair.target.types or kind.can_be_created:
            continue
        extension = kind.extension
        if extension is None:
            yield from_error(pair.place, missing_type(kind.full_name, "create it there"))
        elif extension not in pair.target.available_extensions:
            words = f"install the package of extension {extension} on that server"
            yield from_error(pair.place, missing_type(kind.full_name, words))
        else:
            sql = extension_sql(kind, pair.target.namespaces, pair.target.extensions)
            remedy = Remedy.of("run at the target: ", Sql("target", tuple(sql)))
            yield from_error(pair.place, missing_type(kind.full_name, remedy))


def missing_types_sql(pair: Pair) -> list[str]:
    """Return the statements that create the types which the target lacks."""
    namespaces, extensions = pair.target.namespaces, pair.target.extensions
    missing = [kind for kind in pair.types if kind.full_name not in pair.target.types]
    statements = [
        sql
        for kind in missing
        if not kind.can_be_created and kind.extension is not None
        for sql in extension_sql(kind, namespaces, extensions)
    ]
    new = [kind for kind in missing if kind.can_be_created]
    return list(dict.fromkeys([*statements, *schemas_and_types_sql((), new, namespaces)]))


# ---- existing tables ---------------------------------------------------------------------------


def check_table(
    pair: Pair, table: TargetTable, relation: TargetRelation, shared: SharedTable | None
) -> Iterable[Finding]:
    """Judge a target table, in its present form or as `run` widens it."""
    yield from check_rights(pair, table, relation)
    is_widened = shared is not None and pair.needs_copy
    if shared is not None:
        if is_widened:
            yield from check_widening(pair, relation)
            yield from check_common_types(pair, shared)
        relation = shared.relation
    missing = missing_columns(published_relation(pair.relation), pair.mapping, relation)
    judged = _judge_missing(pair, missing)
    if pair.mapping.rule.on_column_added is OnColumnAdded.ADD and all(
        change.before is None for change in judged.values()
    ):
        types = {column.name: column.type for column in pair.relation.columns}
        added = columns_to_add(pair.mapping, missing, types, judged)
        columns = {column.name: target_column(column) for column in added}
        relation = replace(relation, columns=relation.columns | columns)
        if added:
            words = f"`run` will: {'; '.join(add_columns_sql(pair.quoted, added))}"
            problem = f"its target table {pair.name} lacks columns, which `on_column_added` adds"
            yield info(pair.place, problem, in_words(words))
            yield from check_added_types(pair, added)
    try:
        plan = make_pair_plan(pair, relation)
    except (TargetSchemaError, MappingError) as exc:
        is_missing = missing_columns(published_relation(pair.relation), pair.mapping, relation)
        fix = _missing_fix(pair, missing, judged) if is_missing else plan_fix(pair, relation, exc)
        yield error(pair.place, exc.message, fix)
    else:
        yield from check_key(pair, plan)
        yield from check_condition(pair, relation)
    if not is_widened:
        yield from check_columns(pair, relation)
    yield from check_partitions(pair, table)
    yield from check_triggers(pair, table)
    yield from check_remaining_rows(pair)
    yield from check_occupied(pair, relation)


def check_condition(pair: Pair, target: TargetRelation) -> Iterable[Finding]:
    """Whether the target can evaluate `copy_where`, as copies and comparisons need."""
    mapping = pair.mapping
    if (condition := mapping.rule.copy_where) is None:
        return
    try:
        check_copy_where(
            condition, unchanged_columns(pair.relation.columns, mapping, target), mapping
        )
    except MappingError as exc:
        yield error(pair.place, exc.message, in_words(exc.hint or ""))


def make_pair_plan(pair: Pair, target: TargetRelation) -> ApplyPlan:
    """Plan as `run` does at the first change. Raises TargetSchemaError."""
    relation = pair.relation
    types = {column.name: column.type for column in relation.columns}
    return make_plan(
        published_relation(relation),
        pair.mapping,
        target,
        primary_key=relation.primary_key,
        source_keys=relation.unique_keys,
        type_names=types,
        input_types=pair.expressions.with_collations(types),
        computed_types=pair.expressions.types,
    )


def _judge_missing(pair: Pair, missing: list[tuple[str, str]]) -> dict[str, ColumnChange]:
    """Return the changes that `run` stored about columns that the target lacks."""
    filled = pair.target.filled.get((pair.facts.label, str(pair.mapping.source)))
    if filled is None:
        return {}
    now = {column.name: column for column in pair.relation.columns}
    return judge_added([name for name, _ in missing], filled, now)


def _missing_fix(
    pair: Pair, missing: list[tuple[str, str]], judged: dict[str, ColumnChange]
) -> Fix:
    """Return the remedy that `run` gives for the change."""
    types = {column.name: column.type for column in pair.relation.columns}
    statements, words = missing_remedy(pair.mapping, pair.name, missing, types, judged)
    return at_target(*missing_types_sql(pair), *statements, words=words)


def check_added_types(pair: Pair, added: list[DefinedColumn]) -> Iterable[Finding]:
    """Find missing types of columns to add: `run` creates types only along with a table."""
    names = {column.name for column in added}
    user_types = {
        column.name
        for column in pair.relation.columns
        if column.type_oid >= USER_OIDS_BEGIN and pair.mapping.target_column(column.name) in names
    }
    if user_types and (statements := missing_types_sql(pair)):
        listed = ", ".join(f'"{name}"' for name in sorted(user_types))
        yield error(pair.place, f"the target lacks the type of {listed}", at_target(*statements))


def plan_fix(
    pair: Pair, relation: TargetRelation, exc: TargetSchemaError | MappingError
) -> Fix | None:
    """Return the statements for the hint of a plan's error."""
    if exc.column is not None:
        computed = _generated_source(pair, exc.column)
        if computed is not None:
            return generated_fix(pair, computed, exc.column, column_exists=True)
    return None if exc.remedy is None else Fix.of(exc.remedy)


def _generated_source(pair: Pair, target_name: str) -> DefinedColumn | None:
    for column in pair.relation.columns:
        if column.generated and pair.mapping.target_column(column.name) == target_name:
            return column
    return None


def generated_fix(pair: Pair, column: DefinedColumn, name: str, *, column_exists: bool) -> Fix:
    """Return the statements that let the target compute a column as the source does."""
    drop = f"drop column {quote_identifier(name)}, " if column_exists else ""
    names = names_at_target(pair.relation.column_names, pair.mapping)
    try:
        expression = generation_expression(column, names, pair.mapping)
    except TargetSchemaError as exc:
        return in_words(exc.message)
    desired = DefinedColumn(
        0, name, column.type, generated="s", default=expression, collation=column.collation
    )
    return at_target(f"alter table {pair.quoted} {drop}add column {column_clause(desired)}")


def check_rights(pair: Pair, table: TargetTable, relation: TargetRelation) -> Iterable[Finding]:
    """Find the privileges on the table that the role lacks."""
    role = pair.target.server.role
    grants = Grants(role)
    sid = written_sid(pair.mapping, pair.relation, relation)
    needed = needed_on_table(pair.mapping.type, sid, is_referenced=relation.is_referenced)
    missing = [name for name in table.missing_privileges if name in needed]
    if missing:
        problem = f'role "{role}" lacks {", ".join(missing)} on its target table {pair.name}'
        yield error(pair.place, problem, at_target(grants.on_table(missing, pair.quoted)))
    elif (
        "truncate" in table.missing_privileges
        and pair.mapping.rule.initial is not Initial.NONE
        and sid is None
        and not relation.is_referenced
    ):
        problem = (
            f'role "{role}" lacks truncate on its target table {pair.name}, so an interrupted '
            "copy cannot start again"
        )
        yield warning(pair.place, problem, at_target(grants.on_table(["truncate"], pair.quoted)))
    if table.row_security:
        problem = f"row level security hides rows of its target table {pair.name}"
        yield error(pair.place, problem, at_target(grants.of_all_rows()))


def check_key(pair: Pair, plan: ApplyPlan) -> Iterable[Finding]:
    """Whether an index locates the rows to change. The end of a copy restores deferred indexes."""
    if str(pair.name) in pair.target.deferred:
        return
    key = [SID] if plan.sid is not None else []
    key += [column.name for column in plan.key]
    if plan.identity is Identity.ROW:
        yield warning(
            pair.place,
            "has no key, so every update and delete compares whole rows, which is slow",
            key_fix(pair.relation, pair.facts.candidates),
        )
    elif plan.identity is Identity.KEY and plan.type is TableType.HISTORY:
        if not plan.target.leading_index_columns.intersection(key):
            columns = quote_columns([*key, plan.history.end])
            sql = f"create index on {pair.quoted} ({columns})"
            problem = (
                f"target table {pair.name} has no index on ({', '.join(key)}), so changes are slow"
            )
            yield warning(pair.place, problem, at_target(sql))
    elif plan.identity is Identity.KEY and not plan.key_is_indexed:
        if plan.mapping.rule.partition_by is not None:
            yield from check_index(pair, plan, key)
            return
        sql = f"create unique index on {pair.quoted} ({quote_columns(key)})"
        problem = (
            f"target table {pair.name} has no unique index on ({', '.join(key)}), so "
            "changes are slow"
        )
        yield warning(pair.place, problem, at_target(sql))


def check_partitions(pair: Pair, table: TargetTable) -> Iterable[Finding]:
    """Whether streamer can create and remove time partitions, and the default partition is small.

    PostgreSQL scans the default partition under a lock whenever a session creates a partition.
    """
    rule, role = pair.mapping.rule.partition_by, pair.target.server.role
    if rule is None or table.relation is None or not table.relation.is_partitioned:
        return
    if not table.is_owned:
        problem = (
            f'role "{role}" does not own its target table {pair.name}, so streamer can neither '
            "create nor remove partitions"
        )
        yield error(pair.place, problem, at_target(Grants(role).to_own(pair.quoted)))
    namespace = pair.name.namespace
    if not pair.target.namespaces[namespace].may_create:
        problem = f'role "{role}" may not create the partitions of target table {pair.name}'
        yield error(pair.place, problem, at_target(Grants(role).on_schema("create", namespace)))
    if (default := pair.target.crowded.get(pair.name)) is not None:
        yield warning(
            pair.place,
            f"default partition {default} has more than {ROWS_MAX:,} rows, which "
            "PostgreSQL scans under a lock for every new partition",
            in_words(
                f'count the rows of {default} by "{rule.column}"; a larger `keep`, or an earlier '
                "`since`, gives older rows their partitions"
            ),
        )


def check_index(pair: Pair, plan: ApplyPlan, key: list[str]) -> Iterable[Finding]:
    """Whether an index finds the rows of a key that cannot be unique, because of partitions."""
    if not plan.target.leading_index_columns.intersection(key):
        sql = f"create index on {pair.quoted} ({quote_columns(key)})"
        problem = f"target table {pair.name} has no index on ({', '.join(key)})"
        yield warning(pair.place, f"{problem}, so changes are slow", at_target(sql))


def check_columns(pair: Pair, relation: TargetRelation) -> Iterable[Finding]:
    """Find columns whose values may not fit, or do not arrive."""
    for column in pair.relation.columns:
        name = pair.mapping.target_column(column.name)
        stored = relation.columns.get(name) if name is not None else None
        if name is None or pair.mapping.is_computed(name):
            continue
        if column.generated:
            yield from _check_generated(pair, column, name, stored)
        elif stored is not None and not stored.generated:
            yield from _check_type(pair, column, stored)


def _check_generated(
    pair: Pair, column: DefinedColumn, name: str, stored: TargetColumn | None
) -> Iterable[Finding]:
    if stored is not None and stored.generated:
        return
    fix = generated_fix(pair, column, name, column_exists=stored is not None)
    if stored is None:
        problem = f'column "{column.name}" is generated, and the target has no column of that name'
        yield info(pair.place, problem, fix)
    elif not stored.not_null or stored.has_default:  # otherwise the plan reports the column
        problem = (
            f'column "{column.name}" is generated, so the source does not send its values: the '
            "target's column stays empty"
        )
        yield warning(pair.place, problem, fix)


def _check_type(pair: Pair, column: DefinedColumn, stored: TargetColumn) -> Iterable[Finding]:
    risk = type_risk(column.type, stored.base_type)
    if risk is None or column.type == stored.type:
        return
    yield warning(
        pair.place,
        f'column "{column.name}" has type {column.type}, but {stored.type} at the target: {risk}',
        at_target(
            *missing_types_sql(pair),
            alter_type_sql(pair.quoted, stored.name, column.type),
        ),
    )


def check_triggers(pair: Pair, table: TargetTable) -> Iterable[Finding]:
    """Find foreign keys and triggers that would fire, because the role lacks a privilege."""
    server = pair.target.server
    if server.may_replace_role or not (table.has_foreign_keys or table.triggers):
        return
    fix = at_target(Grants(server.role).to_replace_role(server.version), words="or drop them")
    reason = f'because role "{server.role}" may not set session_replication_role'
    if table.has_foreign_keys:
        problem = (
            f"foreign keys of target table {pair.name} would be checked, {reason}; streamer writes "
            "tables in parallel, so the target would reject rows"
        )
        yield error(pair.place, problem, fix)
    if table.triggers:
        listed = ", ".join(table.triggers)
        problem = f"triggers of target table {pair.name} would fire ({listed}), {reason}"
        yield warning(pair.place, problem, fix)


def check_remaining_rows(pair: Pair) -> Iterable[Finding]:
    """Find rows of a removed source in a table that `initial: none` marks as synced."""
    facts, mapping = pair.facts, pair.mapping
    label = SourceLabel(facts.source.database, mapping.sid)
    is_purged = pair.target.removed.get((label, str(mapping.target)))
    record = pair.target.record(facts.source, mapping)
    if mapping.rule.initial is Initial.NONE and record is None and is_purged is not None:
        source = facts.source
        names = str(mapping.source), str(mapping.target), source.database, source.sid
        error = remaining_rows_error(*names, row_sid=mapping.sid, is_purged=is_purged)
        yield from_error(pair.place, error)


def check_occupied(pair: Pair, relation: TargetRelation) -> Iterable[Finding]:
    """Find existing rows that prevent a copy."""
    occupied_by = pair.target.occupied.get((pair.facts.label, pair.mapping.source))
    if occupied_by is None or occupied_by is False:
        return
    if isinstance(occupied_by, str):
        problem = f"streamer cannot tell whether target table {pair.name} holds rows: {occupied_by}"
        yield warning(pair.place, problem, in_words("try again when it is not locked"))
        return
    sid = written_sid(pair.mapping, pair.relation, relation)
    empty = f"truncate {pair.quoted}"
    if sid is not None:
        condition = f"{quote_identifier(SID)} = {quote_literal(sid).strip()}"
        empty = f"delete from {pair.quoted} where {condition}"  # noqa: S608  # quoted, and only shown
    elif relation.is_referenced:
        empty = f"delete from {pair.quoted}"  # noqa: S608  # quoted, and only shown
    occupied = occupied_error(pair.name)
    fix = at_target(empty, words=OCCUPIED_WORDS, is_choice=True)
    yield error(pair.place, occupied.message, fix, occupied.code)


def check_labels(facts: SourceFacts, target: TargetFacts) -> Iterable[Finding]:
    """Find labels of enum types that the target's type of that name lacks."""
    kinds = {kind.full_name: kind for types in facts.types.values() for kind in types}
    for name, kind in sorted(kinds.items()):
        labels = target.types.get(name)
        if not labels:
            continue
        present = replace(kind, labels=tuple((0, label) for label in labels))
        reduced = replace(kind, labels=tuple(label for label in kind.labels if label[1] in labels))
        changes = type_difference([reduced], [kind])
        if statements := TypeTranslator({name: present}).translate(changes).statements:
            missing = ", ".join(f'"{label}"' for _, label in kind.labels if label not in labels)
            problem = (
                f"the target's type lacks {missing}, so the target rejects rows with these labels"
            )
            yield warning(Place(facts.label, f"type {name}"), problem, at_target(*statements))
