"""Renders the definition of a source's table as statements for its target table.

A `Renderer` serves a single table. Each method renders an object and returns a `Planned`; `plan`
renders all objects of a level of `target.create`. The mapping translates names of columns. A column
``sid``, which distinguishes the sources of a table, leads each unique key, exclusion constraint and
foreign key.

The plan of an object that the target cannot have states the reason and the SQL of the source:

* an object that needs a column that the target does not get;
* a unique object that needs a column that `set` computes;
* a foreign key of a table that is not a clone, or to a table that lacks rows because of its rule;
* an action that would change ``sid``.

Rows of `append` and `history` tables outlive the source's rows, so unique indexes become plain
indexes. Pure.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from streamer.mapping.relation_names import NAME_BYTES_MAX, RelationName
from streamer.mapping.rule_options import Create, TableType
from streamer.mapping.sid_and_history_columns import SID, HistoryColumns
from streamer.postgres.quoting import (
    quote_columns,
    quote_identifier,
    quote_literal,
    quote_qualified,
)
from streamer.schema.columns_in_expressions import (
    AbsentColumnError,
    UnclearExpressionError,
    over_columns,
)
from streamer.schema.desired_columns import IDENTITIES, history_keys, identity_of, names_at_target
from streamer.schema.indexes_constraints_types import (
    ConstraintDefinition,
    IndexDefinition,
    IndexKey,
)
from streamer.schema.planned_definition import ObjectKind, Places, Planned, TargetPlace
from streamer.schema.source_definition import DefinedColumn, DefinedSequence
from streamer.schema.statistics_and_partitions import (
    for_partitions,
    plan_partitioning,
    plan_statistics,
)
from streamer.schema.table_definition import TableDefinition

_NULLS_NOT_DISTINCT_MIN: Final = 15_00_00
_SET_COLUMNS_MIN: Final = 15_00_00
"""Columns after ON DELETE SET NULL."""
_PERIOD_MIN: Final = 18_00_00
_NOT_ENFORCED_MIN: Final = 18_00_00


class _UnmadeError(Exception):
    """The target cannot have an object; the text states the reason."""


class _HashedError(_UnmadeError):
    """Expressions read a hashed column, so no literal of the expressions may reach the target."""


_ACTIONS: Final = {
    "a": "no action",
    "r": "restrict",
    "c": "cascade",
    "n": "set null",
    "d": "set default",
}


def other_name(name: str, target: RelationName) -> str:
    """Return a name for an index whose original name is taken in the target's schema."""
    mark = "_" + hashlib.sha256(f"{target}\0{name}".encode()).hexdigest()[:8]
    room = NAME_BYTES_MAX - len(mark)
    return name.encode()[:room].decode(errors="ignore") + mark


class Renderer:
    """Renders the objects of a single table.

    *taken*: the names of the other relations in the target's schema.
    """

    def __init__(
        self,
        definition: TableDefinition,
        place: TargetPlace,
        places: Places,
        taken: frozenset[str] = frozenset(),
    ) -> None:
        self._definition = definition
        self._place = place
        self._places = places
        self._taken = taken

    # ---- all of a table ------------------------------------------------------------------------

    def plan(self, create: Create) -> list[Planned]:
        """Return the plans of the level *create*, foreign keys last."""
        partitioning = plan_partitioning(self._definition, self._place)
        if create is Create.COLUMNS:
            return partitioning
        planned = [self.index(index) for index in self._definition.indexes if index.is_valid]
        constraints = self._definition.constraints
        planned += [
            self._plain_key(part) for part in constraints if part.kind == "p" and part.period
        ]
        planned += [self.constraint(part) for part in constraints if part.kind in "ux"]
        if create is Create.ALL:
            planned += filter(None, map(self.default, self._definition.columns))
            planned += filter(None, map(self.statistics, self._definition.columns))
            planned += [self.constraint(part) for part in constraints if part.kind == "c"]
            planned += plan_statistics(self._definition, self._place)
            planned += self.comments()
            planned += [self.constraint(part) for part in constraints if part.kind == "f"]
        return partitioning + planned

    # ---- columns -------------------------------------------------------------------------------

    def default(self, column: DefinedColumn) -> Planned | None:
        """Render a column's default with the sequence, or the identity; None for neither.

        Only streamer writes versions of a history table, so its columns need no default.
        """
        is_history = self._place.mapping.type is TableType.HISTORY
        if is_history or column.generated or not (column.default or column.identity):
            return None
        name = self._place.column(column.name)
        if name is None or self._place.mapping.is_computed(name):
            return None
        table, quoted = self._place.quoted, quote_identifier(name)
        alter = f"alter table {table} alter column {quoted}"
        sequence = column.sequence
        statements: list[str] = []
        if column.identity:
            is_key = any(
                column.name in constraint.columns
                for constraint in self._definition.constraints
                if constraint.kind == "p"
            )
            how = IDENTITIES[identity_of(column.identity, is_key=is_key)]
            options = f" ({sequence.options})" if sequence else ""
            statements = [f"{alter} add generated {how} as identity{options}"]
            if self._is_clone and not self._place.has_sid:
                # ADD COLUMN could not set NOT NULL before the rows had values.
                statements.insert(0, f"{alter} set not null")
        elif sequence is not None and _draws_from(column):
            drawn = self._sequence_name(sequence)
            owned_by = f"alter sequence if exists {drawn} owned by {table}.{quoted}"
            statements = [
                f"create sequence if not exists {drawn} as {sequence.type} {sequence.options}",
                *([owned_by] if sequence.is_owned else []),
                f"{alter} {draws_from(drawn)}",
            ]
        else:
            statements = [f"{alter} set default {column.default}"]
        source_sql = f"{alter} set default {column.default}" if column.default else ""
        made = tuple(statements)
        # A sequence without its default would make the next attempt fail.
        return Planned(ObjectKind.DEFAULT, name, made, ("; ".join(made),), source_sql=source_sql)

    def filled(self, column: DefinedColumn) -> Planned | None:
        """Render NOT NULL and default of a new column whose rows get values after ADD COLUMN."""
        name = self._place.column(column.name)
        if name is None:
            return None
        owns = column.identity or column.draws
        is_all = self._place.mapping.rule.create is Create.ALL
        planned = self.default(column) if owns and is_all else None
        alter = f"alter table {self._place.quoted} alter column {quote_identifier(name)}"
        sets: tuple[str, ...] = (f"{alter} set not null",)
        if planned is None:
            return Planned(ObjectKind.NOT_NULL, name, sets, sets) if column.not_null else None
        if not column.not_null or sets[0] in planned.statements:
            return planned
        made = sets + planned.statements
        return replace(planned, statements=made, online=("; ".join(made),))

    def _sequence_name(self, sequence: DefinedSequence) -> str:
        """Return the name at the target; tables share a sequence without an owner."""
        name = sequence.name
        free = self.free(name) if sequence.is_owned else name
        return quote_qualified(self._place.mapping.target.namespace, free)

    def statistics(self, column: DefinedColumn) -> Planned | None:
        """Render the statistics target of a column; None if the column has the default."""
        name = self._place.column(column.name)
        if column.statistics is None or name is None:
            return None
        alter = f"alter table {self._place.quoted} alter column {quote_identifier(name)}"
        made = (f"{alter} set statistics {column.statistics}",)
        return Planned(ObjectKind.STATISTICS, name, made, made)

    def comments(self) -> list[Planned]:
        """Render the comments of the table and its columns."""
        table = self._place.quoted
        plans: list[Planned] = []
        if self._definition.comment is not None:
            made = (f"comment on table {table} is {quote_literal(self._definition.comment)}",)
            plans.append(Planned(ObjectKind.COMMENT, self._place.mapping.target.name, made, made))
        for column in self._definition.columns:
            name = self._place.column(column.name)
            if column.comment is not None and name is not None:
                quoted_column = f"{table}.{quote_identifier(name)}"
                made = (f"comment on column {quoted_column} is {quote_literal(column.comment)}",)
                plans.append(Planned(ObjectKind.COMMENT, name, made, made))
        return plans

    # ---- indexes -------------------------------------------------------------------------------

    def index(self, index: IndexDefinition) -> Planned:
        """Render an index that belongs to no constraint."""
        sql = _summary(index)
        return self._planned(ObjectKind.INDEX, index.name, sql, partial(self._index, index))

    def _planned(
        self, kind: ObjectKind, name: str, source_sql: str, render: Callable[[], Planned]
    ) -> Planned:
        """Return the plan that *render* makes, or the reason why the target has no such object."""
        try:
            planned = for_partitions(render(), self._place)
        except _HashedError as exc:
            text = quote_identifier(name)
            sql = f"-- {text} reads a hashed column, whose values streamer does not show"
            return Planned(kind, name, reason=str(exc), source_sql=sql)
        except _UnmadeError as exc:
            return Planned(kind, name, reason=str(exc), source_sql=source_sql)
        return replace(planned, source_sql=source_sql)

    def _index(self, index: IndexDefinition) -> Planned:
        name = self.free(index.name)
        is_unique = index.is_unique and self._is_clone
        if is_unique:
            self._refuse_computed(index)
        body = self._index_body(index, is_unique=is_unique)
        unique = "unique " if is_unique else ""
        quoted = quote_identifier(name)
        after = self._index_extras(index, name)
        return Planned(
            ObjectKind.INDEX,
            name,
            (f"create {unique}index {quoted} on {self._place.quoted} {body}", *after),
            (f"create {unique}index concurrently {quoted} on {self._place.quoted} {body}", *after),
            index=name,
            version_min=_NULLS_NOT_DISTINCT_MIN if is_unique and index.nulls_not_distinct else 0,
        )

    def _index_extras(self, index: IndexDefinition, name: str) -> list[str]:
        quoted_index = quote_qualified(self._place.mapping.target.namespace, name)
        shift = 2 if self._leads(index) else 1
        statements = [
            f"alter index {quoted_index} alter column {n + shift} set statistics {key.statistics}"
            for n, key in enumerate(index.keys)
            if key.statistics is not None
        ]
        if index.comment is not None:
            statements.append(f"comment on index {quoted_index} is {quote_literal(index.comment)}")
        return statements

    @property
    def _is_clone(self) -> bool:
        return self._place.mapping.type is TableType.CLONE

    def _leads(self, index: IndexDefinition) -> bool:
        """Whether sid is the first key of the target's index."""
        is_key = (index.is_unique and self._is_clone) or any(k.operator for k in index.keys)
        return self._place.has_sid and is_key

    def _index_body(self, index: IndexDefinition, *, is_unique: bool) -> str:
        """Return the definition from USING on."""
        keys = [self._key(key, index) for key in index.keys]
        if self._place.has_sid and is_unique:
            keys.insert(0, quote_identifier(SID))
        parts = [f"using {quote_identifier(index.method)} ({', '.join(keys)})"]
        return " ".join([*parts, *self._index_tail(index, is_unique=is_unique)])

    def _index_tail(self, index: IndexDefinition, *, is_unique: bool) -> list[str]:
        """Return the clauses after the keys."""
        parts = []
        if index.included:
            parts.append(f"include ({quote_columns(map(self._mapped, index.included))})")
        if index.nulls_not_distinct and is_unique:
            parts.append("nulls not distinct")
        if index.options:
            parts.append(f"with ({_options(index.options)})")
        if index.predicate is not None:
            parts.append(f"where ({self._renamed(index.predicate, index.uses)})")
        return parts

    def _key(self, key: IndexKey, index: IndexDefinition) -> str:
        if key.column is not None:
            parts = [quote_identifier(self._mapped(key.column))]
        else:
            parts = [f"({self._renamed(key.expression or '', index.uses)})"]
        if key.collation is not None:
            parts.append(f"collate {key.collation}")
        if key.opclass is not None:
            options = f" ({_options(key.opclass_options)})" if key.opclass_options else ""
            parts.append(f"{key.opclass}{options}")
        if key.descending:
            parts.append("desc")
        if key.nulls_first != key.descending:  # the default of NULLS FIRST depends on the direction
            parts.append("nulls first" if key.nulls_first else "nulls last")
        if key.operator is not None:
            parts.append(f"with {key.operator}")
        return " ".join(parts)

    def _mapped(self, column: str) -> str:
        name = self._place.column(column)
        if name is None:
            raise _UnmadeError(f'the target does not get column "{column}"')
        return name

    def _renamed(self, text: str, uses: Iterable[str]) -> str:
        """Return *text* with the target's column names. *uses*: the columns of *text* at the
        source.
        """
        place = self._place
        try:
            return over_columns(text, names_at_target(uses, place.mapping, place.columns))
        except AbsentColumnError as exc:
            if place.column(exc.column) is not None:
                raise _HashedError(f'streamer hashes column "{exc.column}"') from None
            raise _UnmadeError(f'the target does not get column "{exc.column}"') from None
        except UnclearExpressionError as exc:
            raise _UnmadeError(str(exc)) from None

    def _refuse_computed(self, index: IndexDefinition) -> None:
        for column in {*index.uses, *(key.column for key in index.keys if key.column)}:
            name = self._place.column(column)
            if name is not None and self._place.mapping.has_expression(name):
                raise _UnmadeError(f'`set` computes column "{name}", so it may not be unique')

    def free(self, name: str) -> str:
        """Return a name for an index that is unique in the target's schema."""
        return other_name(name, self._place.mapping.target) if name in self._taken else name

    # ---- constraints ---------------------------------------------------------------------------

    def constraint(self, constraint: ConstraintDefinition) -> Planned:
        """Render a unique, exclusion, check or foreign key constraint."""
        kinds = {
            "u": (ObjectKind.UNIQUE, self._unique),
            "p": (ObjectKind.UNIQUE, self._unique),
            "x": (ObjectKind.EXCLUSION, self._exclusion),
            "c": (ObjectKind.CHECK, self._check),
            "f": (ObjectKind.FOREIGN_KEY, self._foreign_key),
        }
        kind, render = kinds[constraint.kind]
        sql = self._source_sql(constraint)
        planned = self._planned(kind, constraint.name, sql, partial(render, constraint))
        is_index = planned.kind is ObjectKind.INDEX
        if constraint.comment is None or planned.reason is not None or is_index:
            return planned
        comment = (
            f"comment on constraint {quote_identifier(planned.name)} on {self._place.quoted}"
            f" is {quote_literal(constraint.comment)}"
        )
        statements, online = (*planned.statements, comment), (*planned.online, comment)
        return replace(planned, statements=statements, online=online)

    def _add(self, name: str) -> str:
        return f"alter table {self._place.quoted} add constraint {quote_identifier(name)}"

    def _source_sql(self, constraint: ConstraintDefinition) -> str:
        return f"{self._add(constraint.name)} {constraint.definition}"

    def primary_key(self) -> list[Planned]:
        """Render the primary key of a table that streamer created without a primary key.

        In a history table, the key with the number of the version is unique, and so is the key
        among open versions.
        """
        key = next((c for c in self._definition.constraints if c.kind == "p"), None)
        if key is None or self._place.mapping.type is TableType.APPEND:
            return []
        if self._is_clone:
            return [self.constraint(key)]
        columns = self._place.key(key.columns)
        return [] if columns is None else self._versions_key(key, columns)

    def _versions_key(self, key: ConstraintDefinition, columns: list[str]) -> list[Planned]:
        """Render the primary key of a history, and the index of open versions."""
        table, name, timing = self._place.quoted, self.free(key.name), key.timing
        add, whole = self._add(name), quote_identifier(name)
        listed, versions = history_keys(columns, self._place.mapping.rule, timing)
        primary = Planned(
            ObjectKind.UNIQUE,
            name,
            (f"{add} primary key {listed}",),
            (
                f"create unique index concurrently {whole} on {table} {listed}",
                f"{add} primary key using index {whole}",
            ),
            index=name,
        )
        if versions is None:
            return [for_partitions(primary, self._place)]
        of_open = versions_name(key.name, self._place.mapping.target)
        if timing:
            made = (f"{self._add(of_open)} {versions}",)
            exclusion = Planned(ObjectKind.EXCLUSION, of_open, made, made)
            return [for_partitions(plan, self._place) for plan in (primary, exclusion)]
        body = f"{quote_identifier(of_open)} on {table} {versions}"
        commands = (f"create unique index {body}",), (f"create unique index concurrently {body}",)
        unique = Planned(ObjectKind.INDEX, of_open, *commands, index=of_open)
        return [for_partitions(plan, self._place) for plan in (primary, unique)]

    def _plain_key(self, constraint: ConstraintDefinition) -> Planned:
        """Return the reason why a temporal key becomes a plain key at the target."""
        reason = "streamer needs a plain primary key, so ranges of the target may overlap"
        sql = self._source_sql(constraint)
        return Planned(ObjectKind.UNIQUE, constraint.name, reason=reason, source_sql=sql)

    def _unique(self, constraint: ConstraintDefinition) -> Planned:
        index = constraint.index
        assert index is not None
        if not self._is_clone:
            return self._index(index)
        self._refuse_computed(index)
        name, timing = self.free(constraint.name), constraint.timing
        add = self._add(name)
        names = [quote_identifier(self._mapped(column)) for column in constraint.columns]
        if constraint.period:
            names[-1] += " without overlaps"
        if self._place.has_sid:
            names.insert(0, quote_identifier(SID))
        distinct = "nulls not distinct " if index.nulls_not_distinct else ""
        word = "primary key" if constraint.kind == "p" else "unique"
        tail = " ".join(self._index_tail(replace(index, nulls_not_distinct=False), is_unique=True))
        plain = f"{add} {word} {distinct}({', '.join(names)}) {tail}".rstrip() + timing
        extras = self._index_extras(index, name)
        online = [plain, *extras]
        if not constraint.period:
            body = self._index_body(index, is_unique=True)
            quoted = quote_identifier(name)
            online = [
                f"create unique index concurrently {quoted} on {self._place.quoted} {body}",
                f"{add} {word} using index {quoted}{timing}",
                *extras,
            ]
        built = None if constraint.period else name
        version = _NULLS_NOT_DISTINCT_MIN if index.nulls_not_distinct else 0
        if constraint.period:
            version = _PERIOD_MIN
        made = (plain, *extras), tuple(online)
        return Planned(ObjectKind.UNIQUE, name, *made, index=built, version_min=version)

    def _exclusion(self, constraint: ConstraintDefinition) -> Planned:
        index = constraint.index
        assert index is not None
        if not self._is_clone:
            without = tuple(replace(key, operator=None) for key in index.keys)
            return self._index(replace(index, keys=without))
        self._refuse_computed(index)
        name = self.free(constraint.name)
        keys = [self._key(key, index) for key in index.keys]
        if self._place.has_sid:
            keys.insert(0, f"{quote_identifier(SID)} with operator(pg_catalog.=)")
        tail = " ".join(self._index_tail(index, is_unique=False))
        made = (
            f"{self._add(name)} exclude using {quote_identifier(index.method)} "
            f"({', '.join(keys)}) {tail}".rstrip()
            + constraint.timing,
            *self._index_extras(index, name),
        )
        return Planned(ObjectKind.EXCLUSION, name, made, made)

    def _check(self, constraint: ConstraintDefinition) -> Planned:
        for column in constraint.columns:
            name = self._mapped(column)
            if self._place.mapping.hash_of(name) is not None:
                raise _HashedError(f'streamer hashes column "{column}"')
            if self._place.mapping.is_computed(name):
                raise _UnmadeError(f'`set` computes column "{column}"')
        condition = self._renamed(constraint.expression or "", constraint.columns)
        inherit = " no inherit" if constraint.no_inherit else ""
        return self._validated(ObjectKind.CHECK, constraint, f"check ({condition}){inherit}")

    def _validated(self, kind: ObjectKind, constraint: ConstraintDefinition, sql: str) -> Planned:
        """Return a constraint whose online statements first add the constraint and then validate
        the rows.
        """
        add = f"{self._add(constraint.name)} {sql}"
        if not constraint.enforced:
            made = (f"{add} not enforced",)
            return Planned(kind, constraint.name, made, made, version_min=_NOT_ENFORCED_MIN)
        if not constraint.is_valid:
            made = (f"{add} not valid",)
            return Planned(kind, constraint.name, made, made)
        name = quote_identifier(constraint.name)
        online = (
            f"{add} not valid",
            f"alter table {self._place.quoted} validate constraint {name}",
        )
        return Planned(kind, constraint.name, (add,), online)

    def _foreign_key(self, constraint: ConstraintDefinition) -> Planned:
        assert constraint.referenced is not None
        place = self._places(constraint.referenced)
        self._check_reference(constraint.referenced, place)
        assert place is not None
        referring = [quote_identifier(self._mapped(column)) for column in constraint.columns]
        refers = []
        hashes = []
        for column in constraint.referenced_columns:
            name = place.column(column)
            if name is None or place.mapping.has_expression(name):
                raise _UnmadeError(f'table "{place.mapping.target}" has no column "{column}"')
            refers.append(quote_identifier(name))
            hashes.append(_key_of_hash(place, name))
        for column, referred in zip(constraint.columns, hashes, strict=True):
            name = self._mapped(column)
            if self._place.mapping.has_expression(name):
                raise _UnmadeError(f'`set` computes column "{column}"')
            if _key_of_hash(self._place, name) != referred:
                raise _UnmadeError(
                    f'`set` hashes column "{column}" and the referenced column differently'
                )
        if constraint.period:
            referring[-1], refers[-1] = f"period {referring[-1]}", f"period {refers[-1]}"
        actions = self._actions(constraint)
        match = " match full" if constraint.match == "f" else ""
        if place.has_sid:
            referring.insert(0, quote_identifier(SID))
            refers.insert(0, quote_identifier(SID))
            match = ""  # sid is never null, and MATCH FULL would refuse nulls beside it
        sql = (
            f"foreign key ({', '.join(referring)}) references {place.quoted} ({', '.join(refers)})"
            f"{match}{actions}{constraint.timing}"
        )
        planned = self._validated(ObjectKind.FOREIGN_KEY, constraint, sql)
        version = _PERIOD_MIN if constraint.period else planned.version_min
        if self._columns_on_delete(constraint):
            version = max(version, _SET_COLUMNS_MIN)
        return replace(planned, referenced=place.mapping.target, version_min=version)

    def _check_reference(self, referenced: RelationName, place: TargetPlace | None) -> None:
        if place is None:
            raise _UnmadeError(f'it references table "{referenced}", which is not replicated')
        if not self._is_clone:
            raise _UnmadeError(
                f"rows of a table of type {self._place.mapping.type} outlive the referenced rows"
            )
        if place.mapping.type is TableType.HISTORY:
            raise _UnmadeError(f'"{place.mapping.target}" is a history: its key is not unique')
        if place.mapping.rule.may_lack_rows:
            condition = place.mapping.rule.limits[0]
            raise _UnmadeError(f'`{condition}` keeps rows out of "{place.mapping.target}"')
        if place.has_sid and place.mapping.sid != self._place.mapping.sid:
            raise _UnmadeError(f'rows of "{place.mapping.target}" have another sid')
        if place.has_sid and not self._place.has_sid:
            raise _UnmadeError(f'only "{place.mapping.target}" has a column sid')

    def _actions(self, constraint: ConstraintDefinition) -> str:
        by_sid = self._place.has_sid
        parts = []
        if constraint.on_update != "a":
            if by_sid and constraint.on_update in "nd":
                raise _UnmadeError(f"ON UPDATE {_ACTIONS[constraint.on_update]} would change sid")
            parts.append(f" on update {_ACTIONS[constraint.on_update]}")
        if constraint.on_delete != "a":
            parts.append(f" on delete {_ACTIONS[constraint.on_delete]}")
            if columns := self._columns_on_delete(constraint):
                parts.append(f" ({quote_columns(map(self._mapped, columns))})")
        return "".join(parts)

    def _columns_on_delete(self, constraint: ConstraintDefinition) -> Sequence[str]:
        """Return the columns that ON DELETE SET changes; empty for all columns of the key."""
        if constraint.on_delete in "nd" and self._place.has_sid:
            return constraint.on_delete_columns or constraint.columns
        return constraint.on_delete_columns


def _key_of_hash(place: TargetPlace, column: str) -> str | None:
    """Return the check of the key that hashes a column; None for a plain value."""
    column_hash = place.mapping.hash_of(column)
    return None if column_hash is None else column_hash.check


def versions_name(key: str, target: RelationName) -> str:
    """Return the name of a history's index of open versions, for the name of a *key*."""
    return other_name(f"{key} versions", target)


def is_of_open_versions(index: IndexDefinition, history: HistoryColumns) -> bool:
    """Whether an index holds the open versions of a history."""
    return history.end in index.uses and "9999-01-01" in (index.predicate or "")


def draws_from(sequence: str) -> str:
    """Return the action of ALTER COLUMN that sets the default to nextval of a quoted *sequence*."""
    return f"set default nextval({quote_literal(sequence)}::regclass)"


def _draws_from(column: DefinedColumn) -> bool:
    """Whether the default is exactly nextval of a sequence."""
    text = column.default or ""
    return text.startswith("nextval(") and text.endswith("::regclass)")


def _options(options: Iterable[str]) -> str:
    """Return storage parameters as SQL: ``fillfactor='70'``."""
    pairs = (option.partition("=") for option in options)
    return ", ".join(f"{quote_identifier(n)}={quote_literal(v).strip()}" for n, _, v in pairs)


def _summary(index: IndexDefinition) -> str:
    """Return a description of a source's index that is close to its SQL."""
    keys = ", ".join(key.column or f"({key.expression})" for key in index.keys)
    unique = "unique " if index.is_unique else ""
    where = f" where {index.predicate}" if index.predicate else ""
    return (
        f"create {unique}index {quote_identifier(index.name)} using {index.method} ({keys}){where}"
    )
