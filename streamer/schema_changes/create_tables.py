"""The definitions of target tables, and the creation of missing tables.

streamer creates a table from the source's definition: columns with their exact types and NOT NULL,
and generated columns with their expressions. The primary key is the sid, followed by the columns of
the source's replica identity or primary key. Identity columns become plain columns without
defaults, because values come from the source. Partitioned tables become plain tables, unless the
rule says `partitioned` and the target can have the partitions. A rule with `partition_by` gives the
table time partitions. Its key gets a plain index, unless the partition column is part of the key.

A history table also gets the columns of `HistoryColumns`: validity, and the order of versions that
begin at the same time. Key and order form its primary key. A unique index lets each key have one
open version. A deferrable key of the source is deferrable at the target, too. Time partitions of a
history need the end of the version in both keys, and have no deferrable key.

Building statements is pure; `create_tables` runs them.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from streamer.apply.rows.make_plan import check_time, two_sids
from streamer.bookkeeping.relation_definitions import store_created
from streamer.decode.pgoutput import Column, Relation
from streamer.errors.error_classes import StreamerError, TargetRejectedError, TargetSchemaError
from streamer.errors.remedies import Remedy, at_target
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import Create, TableType
from streamer.mapping.rules import RelationMapping
from streamer.mapping.sid_and_history_columns import SID, TABLE_COLUMNS_MAX
from streamer.mapping.time_partitions import default_partition
from streamer.postgres.quoting import quote_columns, quote_identifier, quote_qualified
from streamer.schema.create_type import create_type_sql
from streamer.schema.desired_columns import column_clause, desired_columns, history_keys
from streamer.schema.indexes_constraints_types import DefinedType
from streamer.schema.source_definition import DefinedColumn
from streamer.schema.statistics_and_partitions import create_partitions_sql, obstacle_to_partitions
from streamer.source.catalog import SourceRelation
from streamer.target.connection import TargetConnection, transaction
from streamer.target.foreign_functions import ForeignCall, foreign_error, read_calls
from streamer.target.missing_grants import missing_to_create
from streamer.target.missing_types import refuse_missing
from streamer.target.target_partitions import create_partitions, refuse_taken_names

_DDL_LOCK: Final = 0x7461626C6573  # "tables"


def published_relation(relation: SourceRelation) -> Relation:
    """Return the RELATION message that pgoutput would send: without generated columns."""
    return Relation(
        relid=relation.oid,
        namespace=relation.name.namespace,
        name=relation.name.name,
        replica_identity=relation.replica_identity,
        columns=tuple(
            Column(column.name, column.type_oid, -1, column.name in relation.key)
            for column in relation.columns
            if not column.generated
        ),
    )


@dataclass(frozen=True, slots=True)
class NewTable:
    """A target table to create, with the definition for a source's table.

    ``computed_types``: the types of `set`, by target column; ``relation_id``: the relation of the
    table, if the bookkeeping has a record. Pure.
    """

    relation: SourceRelation
    mapping: RelationMapping
    computed_types: dict[str, str]
    relation_id: int = 0

    @property
    def has_sid(self) -> bool:
        return self.mapping.sid is not None

    @property
    def quoted(self) -> str:
        return quote_qualified(self.mapping.target.namespace, self.mapping.target.name)

    @property
    def columns(self) -> list[DefinedColumn]:
        """Raises TargetSchemaError for a generated column that the target cannot compute."""
        return desired_columns(
            self.relation.columns,
            self.mapping,
            key=self._source_key,
            has_sid=self.has_sid,
            computed_types=self.computed_types,
        )

    @property
    def _source_key(self) -> tuple[str, ...]:
        return self.relation.key or self.relation.primary_key

    @property
    def key(self) -> list[str]:
        """The columns that identify a row, the sid first."""
        names = map(self.mapping.target_column, self._source_key)
        key = [name for name in names if name is not None]
        return [SID, *key] if key and self.has_sid else key

    @property
    def timing(self) -> str:
        """The clause of a key that is deferrable at the source."""
        return "" if self.relation.key else self.relation.primary_key_timing

    @property
    def key_name(self) -> str | None:
        """The name of the primary key, if PostgreSQL's default name is unsuitable."""
        rule, relation = self.mapping.rule, self.relation
        is_alike = self.mapping.type is not TableType.HISTORY and not self.has_sid
        if rule.create is Create.COLUMNS or not is_alike or relation.key != relation.primary_key:
            return None
        names = [o.name for o in relation.objects if o.kind == "p"]
        default = f"{self.mapping.target.name}_pkey"
        return next((name for name in names if name != default), None)

    @property
    def statements(self) -> list[str]:
        """The statements that create the table, CREATE TABLE first. Raises TargetSchemaError."""
        parts, key, after = [column_clause(column) for column in self.columns], self.key, []
        if self.mapping.type is TableType.HISTORY:
            primary, versions = history_keys(key, self.mapping.rule, self.timing)
            parts.append(f"primary key {primary}")
            if key and self.timing and versions is not None:
                parts.append(versions)
            elif key and not self.timing:
                after = [f"create unique index on {self.quoted} {versions}"]
        elif key and self.has_unique_key:
            parts.append(f"primary key ({quote_columns(key)}){self.timing}")
        elif key:
            after = [f"create index on {self.quoted} ({quote_columns(key)})"]
        clause, partitions = self._partitions
        return [f"create table {self.quoted} ({', '.join(parts)}){clause}", *partitions, *after]

    @property
    def has_unique_key(self) -> bool:
        """Whether the key can be unique: PostgreSQL needs the column of the partitions in it."""
        rule = self.mapping.rule.partition_by
        return rule is None or rule.column in self.key

    @property
    def _partitions(self) -> tuple[str, list[str]]:
        """The clause PARTITION BY, and the statements for the source's partitions, or for the
        default partition of time partitions.
        """
        if (rule := self.mapping.rule.partition_by) is not None:
            default = default_partition(self.mapping.target)
            quoted = quote_qualified(default.namespace, default.name)
            create = f"create table {quoted} partition of {self.quoted} default"
            return f" partition by {rule.key}", [create]
        tree, columns, key = self.relation.partitions, self.relation.column_names, self._source_key
        if not self.mapping.rule.partitioned or not tree:
            return "", []
        if obstacle_to_partitions(tree, self.mapping, columns, key) is not None:
            return "", []  # `check` and the bookkeeping name the obstacle
        return create_partitions_sql(tree, self.mapping, columns, key)

    def check(self) -> None:
        """Refuse a table with too many columns, with two columns named sid, or with a partition
        column that is no time. Raises TargetSchemaError.
        """
        if (rule := self.mapping.rule.partition_by) is not None:
            types = {column.name: column.type for column in self.columns}
            if rule.column in types:
                check_time(self.mapping, rule.column, types[rule.column])
        names = map(self.mapping.target_column, self.relation.column_names)
        if self.has_sid and SID in names:
            raise two_sids(self.mapping)
        count = len(self.columns)
        if count > TABLE_COLUMNS_MAX:
            raise TargetSchemaError(
                f'target table "{self.mapping.target}" would have {count} columns, with those that '
                f"streamer adds, and PostgreSQL allows {TABLE_COLUMNS_MAX}",
                hint=f"exclude {count - TABLE_COLUMNS_MAX} columns in the mapping",
            )


async def create_tables(
    connection: TargetConnection, tables: Sequence[NewTable], types: list[DefinedType]
) -> set[RelationName]:
    """Create target tables, and *types*, unless they exist; return the created tables.

    A single transaction creates all tables and stores their bookkeeping. Raises TargetSchemaError,
    TargetRejectedError with the statements to run instead.
    """
    for table in tables:
        table.check()
    new = {table.mapping.target: table for table in tables}
    named = ", ".join(f'"{name}"' for name in new)
    statements: list[str] = []
    role = quote_identifier(await connection.fetch_value("select current_user::text"))
    try:
        async with transaction(connection):
            # Several sources may create the same table at the same time.
            await connection.execute("select pg_advisory_xact_lock($1)", _DDL_LOCK)
            rows = await connection.fetch(
                "select name from unnest($1::text[]) name where to_regclass(name) is not null",
                [table.quoted for table in new.values()],
            )
            for row in rows:
                new = {n: table for n, table in new.items() if table.quoted != row["name"]}
            if not new:
                return set()
            missing = await _read_missing(connection, types)
            rows = await connection.fetch("select nspname as name from pg_catalog.pg_namespace")
            first = schemas_and_types_sql(new, missing, {row["name"] for row in rows})
            statements = [*first, *(sql for table in new.values() for sql in table.statements)]
            for statement in first:
                await connection.execute(statement)
            for name, table in new.items():
                if (rule := table.mapping.rule.partition_by) is not None:
                    await refuse_taken_names(connection, name, rule, datetime.now(UTC))
            names = [kind.full_name for kind in missing]
            _refuse(await read_calls(connection, [], names) if names else [], first)
            await connection.execute("; ".join(statements[len(first) :]))
            _refuse(await read_calls(connection, [t.quoted for t in new.values()]), statements)
            for table in new.values():
                await _name_primary_key(connection, table)
            await store_created(
                connection, {t.relation_id: t.relation.definition for t in new.values()}
            )
            for name, table in new.items():
                if (rule := table.mapping.rule.partition_by) is not None:
                    await create_partitions(connection, name, rule, datetime.now(UTC))
    except TargetRejectedError as exc:
        usage, write = _grants(new.values(), role)
        # The role may lack even the privilege to check whether the tables exist.
        sql = [*statements, usage, write] if statements else [usage]
        remedy = Remedy.of(at_target(*sql))
        namespaces = {name.namespace for name in new}
        if statements and (grants := await missing_to_create(connection, namespaces)):
            remedy = Remedy.of(at_target(*grants), "; or, without this privilege: ", remedy)
        raise TargetRejectedError(
            f"cannot create target table {named}: {exc.message}",
            hint=Remedy.of("have an administrator run at the target: ", remedy),
        ) from exc
    except StreamerError as exc:
        exc.add_note(f"while creating target table {named}")
        raise
    return set(new)


async def _name_primary_key(connection: TargetConnection, table: NewTable) -> None:
    """Give the primary key the source's name, if `create` asks for names and the name is free.
    Tables of several source schemas may share a target schema, where their names can clash.
    """
    name = table.key_name
    if name is None:
        return
    constraint = await connection.fetch_value(
        "select conname from pg_catalog.pg_constraint where conrelid = pg_catalog.to_regclass($1)"
        " and contype = 'p' and conname <> $2 and pg_catalog.to_regclass($3) is null",
        table.quoted,
        name,
        quote_qualified(table.mapping.target.namespace, name),
    )
    if constraint is not None:
        await connection.execute(
            f"alter table {table.quoted} rename constraint {quote_identifier(constraint)}"
            f" to {quote_identifier(name)}"
        )


def _grants(tables: Iterable[NewTable], role: str) -> tuple[str, str]:
    """Return the statements that let *role*, which owns no table, use *tables*."""
    granted = list(tables)
    schemas = sorted({quote_identifier(table.mapping.target.namespace) for table in granted})
    return (
        f"grant usage on schema {', '.join(schemas)} to {role}",
        f"grant all on {', '.join(table.quoted for table in granted)} to {role}",
    )


def new_type_sql(kind: DefinedType) -> list[str]:
    """Return the statements that create a type along with a table.

    Values come from the source. A domain's default may call a function that the target lacks.
    """
    return create_type_sql(replace(kind, default=None))


def _refuse(calls: Sequence[ForeignCall], statements: Sequence[str]) -> None:
    """Raise the error about *calls*, with *statements*, which an operator must review and run."""
    if calls:
        hint = Remedy.of("to allow this, run at the target: ", at_target(*statements))
        raise TargetSchemaError(foreign_error(calls).message, hint=hint)


async def _read_missing(
    connection: TargetConnection, types: Sequence[DefinedType]
) -> list[DefinedType]:
    """Return the *types* that the target lacks. Raises TargetSchemaError for a type of an
    extension.
    """
    absent = await connection.fetch(
        "select (i - 1)::int4 as number"
        " from unnest($1::text[], $2::text[]) with ordinality w (namespace, name, i)"
        " where not exists (select from pg_catalog.pg_type t"
        " join pg_catalog.pg_namespace n on n.oid = t.typnamespace"
        " where n.nspname = w.namespace and t.typname = w.name) order by i",
        [kind.namespace for kind in types],
        [kind.name for kind in types],
    )
    missing = [types[row["number"]] for row in absent]
    for kind in missing:
        await refuse_missing(connection, kind)
    return missing


def schemas_and_types_sql(
    tables: Iterable[RelationName], missing: Sequence[DefinedType], namespaces: Collection[str]
) -> list[str]:
    """Return the statements that create the schemas that *tables* and types lack, and the types.

    *namespaces*: the schemas of the target. Pure.
    """
    needed = {name.namespace for name in tables} | {kind.namespace for kind in missing}
    return [
        *(
            f"create schema if not exists {quote_identifier(n)}"
            for n in sorted(needed - {*namespaces})
        ),
        *(statement for kind in missing for statement in new_type_sql(kind)),
    ]
