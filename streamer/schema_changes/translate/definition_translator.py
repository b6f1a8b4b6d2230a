"""A change of a source table's definition as statements for its target. Pure.

The mapping translates names, and omits excluded and computed columns. A history table keeps every
column, because its old versions have values there. In the table of several tenants the first tenant
adds a column, and the last tenant drops it. Defaults and NOT NULL of a single tenant do not bind
its peers, so the target lacks them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from streamer.errors.error_classes import SharedTargetError, TargetSchemaError
from streamer.mapping.rule_options import Create, DdlKind, TableType
from streamer.mapping.rules import RelationMapping
from streamer.mapping.sid_and_history_columns import SID
from streamer.postgres.quoting import quote_identifier, quote_literal, quote_qualified
from streamer.schema.columns_in_expressions import uses_column
from streamer.schema.desired_columns import (
    IDENTITIES,
    at_target,
    column_clause,
    identity_of,
    type_clause,
)
from streamer.schema.indexes_constraints_types import under_new_name
from streamer.schema.partitions import PartitionRows
from streamer.schema.render_definitions import draws_from
from streamer.schema.source_definition import (
    AnyChange,
    ColumnChange,
    DefinedColumn,
    DefinedSequence,
    SourceDefinition,
    widens,
)
from streamer.schema.target_relation import TargetRelation
from streamer.schema_changes.translate.column_sequences import (
    find_sequence,
    follow_sequence,
    lost_sequence,
    with_sequence,
)
from streamer.schema_changes.translate.generated_columns import (
    GeneratedFacts,
    expression_of,
    set_expression,
)
from streamer.schema_changes.translate.object_translator import ObjectTranslation


@dataclass(slots=True)
class Translation:
    """The statements for one difference.

    ``filled``: target columns to copy for existing rows, because no statement computes the source's
    values. ``reason``: why the columns need a copy. ``objects``: the changes of indexes and
    constraints, whose statements are part of ``statements``.
    """

    statements: list[str] = field(default_factory=list)
    filled: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    objects: ObjectTranslation | None = None
    needed_types: set[str] = field(default_factory=set)
    """Types that the statements use and do not create."""
    unfinished: list[DefinedColumn] = field(default_factory=list)
    """New columns that get NOT NULL and a sequence once all rows have values."""
    doubts: list[tuple[AnyChange, str]] = field(default_factory=list)
    """Changes that need an operator's decision even where `on_ddl` says apply, with the reasons."""
    leaving: list[PartitionRows] = field(default_factory=list)
    """The rows that leave the table with detached partitions."""
    substitutes: dict[str, tuple[str, DefinedColumn]] = field(default_factory=dict)
    """The fallback of a rejected statement, and the column that then needs a backfill."""
    before: list[str] = field(default_factory=list)
    """Statements to commit in a separate transaction before `statements`."""
    is_for_all: bool = False
    """Whether all peers wait to make the same changes."""

    @property
    def reason(self) -> str | None:
        return "; ".join(self.reasons) or None

    @property
    def sql(self) -> list[str]:
        """The statements to show: first in the stream, then beside the stream."""
        planned = [] if self.objects is None else self.objects.planned
        return [*self.statements, *(plan.sql for plan in planned)]

    def fill(self, name: str, reason: str) -> None:
        """Request a backfill of a column."""
        self.filled.append(name)
        self.reasons.append(reason)


@dataclass(frozen=True, slots=True)
class _Present:
    """A column of the target, after the statements so far."""

    type: str
    not_null: bool
    has_default: bool
    is_generated: bool = False


class DefinitionTranslator:
    """Translates changes for the target of one relation.

    *peers*: the definitions of peer sources. *unchanged*: the peers that do not wait to make the
    same changes; None for all. *unfilled*: columns of the target whose values existing rows lack.
    *generated*: facts about generated columns. *renamed*: the new names of the target's types, by
    their names in *target*.
    """

    def __init__(
        self,
        mapping: RelationMapping,
        target: TargetRelation,
        *,
        peers: Sequence[SourceDefinition] = (),
        unchanged: Sequence[SourceDefinition] | None = None,
        unfilled: Collection[str] = (),
        generated: GeneratedFacts | None = None,
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        self._mapping = mapping
        self._unfilled = unfilled
        self._generated = generated or GeneratedFacts()
        self._target = target
        self._sid = mapping.sid if target.has_sid else None
        self._peers = peers
        self._unchanged = peers if unchanged is None else unchanged
        self._alter = f"alter table {quote_qualified(target.name.namespace, target.name.name)}"
        self._sequences_in_use: list[int] = []  # sequences of the source that columns get or keep
        self._columns = {
            name: _Present(
                under_new_name(column.type, renamed or {}),
                *(column.not_null, column.has_default, column.generated),
            )
            for name, column in target.columns.items()
        }

    @property
    def columns(self) -> frozenset[str]:
        """The columns of the target, after the statements so far."""
        return frozenset(self._columns)

    def fill(self, column: DefinedColumn, reason: str, result: Translation) -> None:
        """Request a backfill for a column of the source, if the target has the column."""
        self._fill_computed(column, reason, result)
        name = self._name(column)
        if name is not None and name in self._columns:
            result.fill(name, reason)

    def backfill_peer_change(self, change: ColumnChange, result: Translation) -> None:
        """Request a backfill after a change that a peer source has made for all sources.

        Later changes may have renamed the column at the target by now.
        """
        column = change.after
        if change.kind is not DdlKind.CHANGE_TYPE or column is None:
            return
        self._record_new_values(change, column, result)
        name = self._name(column)
        if name is not None and not column.generated:
            result.fill(name, f'another source gave column "{name}" another type')

    def _fill_computed(self, column: DefinedColumn, reason: str, result: Translation) -> None:
        """Request a backfill of the columns that `set` computes from a column of the source."""
        for name, expression in self._mapping.rule.set:
            if column.name in expression.names and name in self._columns:
                result.fill(name, f'{reason}, and `set` computes "{name}" from it')

    @property
    def _is_history(self) -> bool:
        return self._mapping.type is TableType.HISTORY

    @property
    def _is_for_all(self) -> bool:
        """Whether all peers wait to make the same changes, so that this source must make them."""
        return bool(self._peers) and not self._unchanged

    @property
    def _is_shared(self) -> bool:
        return self._target.is_shared(self._mapping)

    def translate(self, changes: Sequence[ColumnChange]) -> Translation:
        """Return the statements for *changes*, in order.

        Raises TargetSchemaError if the target or the rule of the table does not allow a change.
        """
        result = Translation()
        columns = [c.after for c in changes if c.kind is DdlKind.SET_DEFAULT and c.after]
        self._sequences_in_use = [
            column.sequence.oid for column in columns if column.sequence is not None
        ]
        for change in changes:
            count = len(result.doubts)
            result.statements += self._statements(self._stored(change), result)
            result.doubts[count:] = [(change, reason) for _, reason in result.doubts[count:]]
        return result

    def _stored(self, change: ColumnChange) -> ColumnChange:
        """Return *change* reduced to its effect on the stored values of the target."""

        def stored(column: DefinedColumn | None) -> DefinedColumn | None:
            name = None if column is None else self._mapping.target_column(column.name)
            if column is None or name is None or self._mapping.hash_of(name) is None:
                return column
            present, hashed = self._columns.get(name), at_target(column, self._mapping, name)
            return hashed if present is None else replace(hashed, type=present.type)

        return replace(change, before=stored(change.before), after=stored(change.after))

    def ignore(self, changes: Sequence[ColumnChange]) -> Translation:
        """Return the statements after which the target accepts rows although it omits *changes*."""
        result = Translation()
        narrowing = (DdlKind.DROP_COLUMN, DdlKind.RENAME_COLUMN, DdlKind.DROP_NOT_NULL)
        for change in changes:
            name = None if change.before is None else self._name(change.before)
            if change.kind in narrowing and name is not None:
                result.statements += self._drop_not_null(name)
        return result

    def _statements(self, change: ColumnChange, result: Translation) -> list[str]:
        old, after = change.before, change.after
        match change.kind:
            case DdlKind.ADD_COLUMN if after is not None:
                return self._add(after, result)
            case DdlKind.DROP_COLUMN if old is not None:
                return self._drop(old)
            case DdlKind.RENAME_COLUMN if old is not None and after is not None:
                return self._rename(change, old, after, result)
        assert old is not None
        assert after is not None
        if change.kind in (DdlKind.WIDEN_TYPE, DdlKind.CHANGE_TYPE):
            self._record_new_values(change, after, result)
        name = self._name(after)
        is_stored_now = old.generated and not after.generated
        if name is not None and is_stored_now and change.kind is DdlKind.SET_DEFAULT:
            return self._drop_expression(name, after, result)
        if name is None or name not in self._columns:
            return []
        if self._columns[name].is_generated and not after.generated:
            return []  # the target computes a column that the source lacks
        match change.kind:
            case DdlKind.WIDEN_TYPE | DdlKind.CHANGE_TYPE:
                return self._change_type(change, name, after, result)
            case DdlKind.SET_EXPRESSION:
                return self._set_expression(change, name, after, result)
            case DdlKind.SET_NOT_NULL:
                lacks_values = name in self._unfilled or name in result.filled
                if lacks_values and not (self._is_shared or self._is_history):
                    result.unfinished.append(after)
                    return []
                return self._set_not_null(name)
            case DdlKind.DROP_NOT_NULL:
                return self._drop_not_null(name)
            case _:
                return self._set_default(name, old, after, result)

    def _name(self, column: DefinedColumn) -> str | None:
        """Return the target's name of a column; None if the target lacks the column."""
        return self._mapping.own_column(column.name, self._columns)

    def _add(self, column: DefinedColumn, result: Translation) -> list[str]:
        name = self._name(column)
        if name is None:
            return []
        present, replaced = self._columns.get(name), list[str]()
        if present is not None and present.type != column.type:
            # A peer has added the column, or a history has kept the column.
            may_differ = (self._is_shared or self._is_history) and not present.is_generated
            is_wide = widens(column.type, present.type) or widens(present.type, column.type)
            if not (may_differ and is_wide):
                replaced += self._replace(name, column, present.type)
                present = None
        if column.fills_rows_one_by_one:
            result.fill(name, f'each row has its own value in new column "{name}"')
            if present is None and not (self._is_shared or self._is_history):
                result.unfinished.append(column)
        elif present is not None and not (self._is_shared or present.is_generated):
            result.fill(name, f'target column "{name}" existed before the source added its column')
        statements = replaced + self._make_room(name, column)
        is_older = present is not None and not present.is_generated
        if self._is_shared and (column.constant is not None or is_older):
            more = f" and {quote_identifier(name)} is not null" if column.constant is None else ""
            updates = self._update_tenant_rows(name, column.constant or "null", result)
            statements += [update + more for update in updates]
        return statements

    def _update_tenant_rows(self, name: str, value: str, result: Translation) -> list[str]:
        """Return the statement that gives a column a value in the rows of this tenant.

        Without a sid, no statement finds these rows, so a copy finds them by their keys.
        """
        if self._sid is None:
            result.fill(name, f'column "{name}" changes only in the rows of this table')
            return []
        table, sid = self._alter.removeprefix("alter table "), quote_literal(self._sid)
        assigned = f"{quote_identifier(name)} = {value}"
        return [f"update {table} set {assigned} where {quote_identifier(SID)}::text = {sid}"]

    def _replace(self, name: str, column: DefinedColumn, present: str) -> list[str]:
        """Return the statement that drops a column whose type differs from the type of new
        *column*.

        Raises TargetSchemaError unless all peers wait to make the same changes, and so have dropped
        the former column.
        """
        message = (
            f'target table "{self._target.name}" has a column "{name}" already, of type '
            f"{present}; the source added it with type {column.type}"
        )
        if not self._is_for_all or name in self._target.primary_key:
            is_in_use = self._is_shared and self._peers_have(name)
            raise (SharedTargetError if is_in_use else TargetSchemaError)(message)
        del self._columns[name]
        return [f"{self._alter} drop column {quote_identifier(name)}"]

    def _add_column(self, name: str, column: DefinedColumn) -> list[str]:
        quoted = quote_identifier(name)
        keeps_default = not (self._is_shared or self._is_history)
        not_null = column.not_null and keeps_default and not column.fills_rows_one_by_one
        value = None if self._is_shared else column.constant
        if column.generated:
            value = expression_of(column, self._mapping, self._columns, self._generated)
        added = replace(column, name=name, not_null=not_null, default=value, identity="")
        statements = [f"{self._alter} add column {column_clause(added)}"]
        default = column.own_default if keeps_default else None
        if not self._is_shared and column.constant is not None and default != column.constant:
            end = "drop default" if default is None else f"set default {default}"
            statements.append(f"{self._alter} alter column {quoted} {end}")
        elif column.constant is None and default is not None:
            statements.append(f"{self._alter} alter column {quoted} set default {default}")
        self._columns[name] = _Present(
            column.type, not_null, default is not None, bool(column.generated)
        )
        return statements

    def _make_room(self, name: str, column: DefinedColumn) -> list[str]:
        """Return the statements that make a target column accept the values of *column*."""
        present = self._columns.get(name)
        if present is None:
            return self._add_column(name, column)
        if present.type == column.type or widens(column.type, present.type):
            return []
        return self._retype(name, column)

    def _columns_of(self, sources: Sequence[SourceDefinition], name: str) -> list[DefinedColumn]:
        """Return the columns of peer sources that write a column of the target."""
        columns = (column for source in sources for column in source.columns)
        return [c for c in columns if self._mapping.target_column(c.name) == name]

    def _peers_have(self, name: str) -> bool:
        """Whether a peer still writes a column of the target."""
        return bool(self._columns_of(self._peers, name))

    def _drop(self, column: DefinedColumn) -> list[str]:
        name = self._name(column)
        if name is None or name not in self._columns:
            return []
        if self._is_history or (self._is_shared and self._peers_have(name)):
            return self._drop_not_null(name)
        del self._columns[name]
        return [f"{self._alter} drop column {quote_identifier(name)}"]

    def _rename(
        self,
        change: ColumnChange,
        old: DefinedColumn,
        after: DefinedColumn,
        result: Translation,
    ) -> list[str]:
        rule = self._mapping.rule
        listed = {name for name, _ in rule.columns or ()} | rule.exclude
        used = {name for expression in rule.expressions for name in expression.names}
        if old.name in listed | used and old.name not in (after.name,):
            raise TargetSchemaError(
                f'the rule of table "{self._mapping.source}" names column "{old.name}", which '
                f'the source renamed to "{after.name}"',
                hint="write the new name in the rule",
            )
        former, name = self._name(old), self._name(after)
        if name is None:
            return [] if former is None else self._drop_not_null(former)
        if former is None or former not in self._columns:
            return [] if name in self._columns else self._add(after, result)
        quoted, now = quote_identifier(former), quote_identifier(name)
        is_shared_name = self._is_shared and self._peers_have(former)
        if is_shared_name or (self._is_shared and name in self._columns):
            is_last = not is_shared_name
            return self._move(old, after, (former, name), result, is_last=is_last)
        dropped = []
        if name in self._columns:  # left by `ignore`, kept by a history, or added by an operator
            if self._is_history:
                return [*self._add(after, result), *self._drop_not_null(former)]
            reason = (
                f'target table "{self._target.name}" already has a column "{name}", which '
                f'streamer would drop to rename column "{former}"'
            )
            result.doubts.append((change, reason))
            dropped = [f"{self._alter} drop column {now}"]
        self._columns[name] = self._columns.pop(former)
        self._generated = self._generated.renamed(former, name)
        return [*dropped, f"{self._alter} rename column {quoted} to {now}"]

    def _move(
        self,
        old: DefinedColumn,
        after: DefinedColumn,
        names: tuple[str, str],
        result: Translation,
        *,
        is_last: bool,
    ) -> list[str]:
        """Return the statements that move this tenant's values to the renamed column.

        *names*: the target's former and new name. *is_last*: no peer has the former column.
        """
        former, name = names
        if not is_last:
            self._refuse_users(former)
            if former in self._target.primary_key:
                raise TargetSchemaError(
                    f'other sources of target table "{self._target.name}" still have column '
                    f'"{former}" of its primary key. Once all sources wait at this '
                    f"rename, run `ddl edit` for one source with: {self._alter} rename column "
                    f"{quote_identifier(former)} to {quote_identifier(name)}; then run "
                    "`ddl apply` for the remaining sources"
                )
        # A later change of the same difference may give the column a new type.
        column = replace(after, type=old.type, collation=old.collation)
        statements = self._make_room(name, column)
        if not after.generated:
            statements += self._update_tenant_rows(name, quote_identifier(former), result)
        if not is_last:
            return [*statements, *self._drop_not_null(former)]
        del self._columns[former]
        return [*statements, f"{self._alter} drop column {quote_identifier(former)}"]

    def _refuse_users(self, former: str) -> None:
        """Raise TargetSchemaError if a generated column of the target uses column *former*."""
        for name, text in self._generated.expressions.items():
            if name != former and uses_column(text, former):
                raise TargetSchemaError(
                    f'generated column "{name}" of target table "{self._target.name}" uses '
                    f'"{former}", which other sources of the table still have'
                )

    def _record_new_values(
        self, change: ColumnChange, column: DefinedColumn, result: Translation
    ) -> None:
        """Record the columns and conditions that depend on a column with a new type."""
        self._fill_computed(column, f'column "{column.name}" got another type', result)
        condition = self._mapping.rule.filter
        if condition is None or not (
            change.kind is DdlKind.CHANGE_TYPE or _has_new_collation(change)
        ):
            return
        if column.name in condition.names:
            reason = (
                f'`filter` uses column "{column.name}", so different rows may match, and a '
                "resync with mode `diff` is due"
            )
            result.doubts.append((change, reason))

    def _change_type(
        self, change: ColumnChange, name: str, column: DefinedColumn, result: Translation
    ) -> list[str]:
        present = self._columns[name]
        if change.kind is DdlKind.CHANGE_TYPE and not column.generated:
            reason = f'column "{name}" got another type, which may have changed its values'
            result.fill(name, reason)
        was_alike = change.before is not None and change.before.type == present.type
        if present.type != column.type and not was_alike and widens(column.type, present.type):
            column = replace(column, type=present.type)  # the target's type is wider
        is_collated = _has_new_collation(change) and self._peers_have_collation(
            name, column, result
        )
        if present.type == column.type and not is_collated:
            return []
        return self._retype(name, column, result if change.kind is DdlKind.CHANGE_TYPE else None)

    def _peers_have_collation(self, name: str, column: DefinedColumn, result: Translation) -> bool:
        """Whether each peer has a column with the collation of *column*; otherwise add a reason."""
        peers = self._columns_of(self._peers, name) if self._is_shared else []
        have_collation = all(peer.collation == column.collation for peer in peers)
        if not have_collation:
            reason = (
                f'collation of column "{name}" waits until every source of the table has made the '
                "change"
            )
            result.reasons.append(reason)
        return have_collation

    def give_type(self, column: DefinedColumn, result: Translation) -> None:
        """Give a column the source's type, which accepts the same values as the present type."""
        name = self._name(column)
        if name is not None and name in self._columns and self._columns[name].type != column.type:
            result.statements += self._retype(name, column)

    def _retype(
        self, name: str, column: DefinedColumn, result: Translation | None = None
    ) -> list[str]:
        """Return the statement that gives a target column the type of the source *column*. Raises
        TargetSchemaError if a peer's values do not fit the type.

        The target casts the values. With *result*, a backfill then replaces them by the source's
        values. If the target lacks the cast or refuses a value, the column is null until the
        backfill.
        """
        present = self._columns[name]
        for peer in self._columns_of(self._unchanged, name) if self._is_shared else ():
            if not widens(peer.type, column.type):
                raise SharedTargetError(
                    f'column "{name}" of target table "{self._target.name}" would get type '
                    f"{column.type}, but another source has it with type {peer.type}"
                )
        quoted = quote_identifier(name)
        typed, alter = f"type {type_clause(column)}", f"alter column {quoted}"
        self._columns[name] = replace(present, type=column.type)
        if present.is_generated:
            return [f"{self._alter} {alter} {typed}"]
        # User-defined types have only casts to and from text.
        is_user_defined = "." in present.type or "." in column.type
        cast = "text::" if is_user_defined and column.type != "text" else ""
        value = f"{quoted}::{cast}{column.type}"
        first, last = self._defaults(name, column)
        parts = (
            [*first, f"{typed} using {value}", *last]
            if is_user_defined
            else [f"{typed} using {value}"]
        )
        statement = f"{self._alter} {', '.join(f'{alter} {part}' for part in parts)}"
        keys = [self._target.primary_key] if self._target.primary_key else self._target.unique_keys
        is_key = any(name in key for key in keys)
        if result is not None and not (self._is_history or self._unchanged or is_key):
            first += ["drop not null"] if present.not_null else []
            parts = [*first, f"{typed} using null", *last]
            null = f"{self._alter} {', '.join(f'{alter} {part}' for part in parts)}"
            result.substitutes[statement] = null, column
        return [statement]

    def _defaults(self, name: str, column: DefinedColumn) -> tuple[list[str], list[str]]:
        """Return the actions before and after a change of type that cannot cast the default."""
        has_default = self._columns[name].has_default and name not in self._generated.identities
        is_reported = column.default is not None or column.default_mark is None
        draws = column.default is not None and column.own_default is None
        if not has_default or draws or not is_reported:
            return [], []
        default = column.own_default
        return ["drop default"], [] if default is None else [f"set default {default}"]

    def _set_not_null(self, name: str) -> list[str]:
        if self._is_shared or self._is_history or self._columns[name].not_null:
            return []
        return [f"{self._alter} alter column {quote_identifier(name)} set not null"]

    def _drop_not_null(self, name: str) -> list[str]:
        present = self._columns.get(name)
        if present is None or not present.not_null or name in self._target.primary_key:
            return []
        return [f"{self._alter} alter column {quote_identifier(name)} drop not null"]

    def _set_expression(
        self, change: ColumnChange, name: str, column: DefinedColumn, result: Translation
    ) -> list[str]:
        if not self._columns[name].is_generated:
            return []  # until now, changes contain no values of the column
        facts = self._generated
        text = expression_of(column, self._mapping, self._columns, facts)
        statements, doubt = set_expression(self._alter, name, column, text, facts)
        if doubt is not None:
            result.doubts.append((change, doubt))
        if statements and self._is_shared and self._peers:
            reason = f'column "{name}" would change in the rows of other sources, too'
            result.doubts.append((change, reason))
        if statements and self._is_history:
            reason = f'column "{name}" would change in versions that have ended, too'
            result.doubts.append((change, reason))
        return statements

    def _drop_expression(self, name: str, column: DefinedColumn, result: Translation) -> list[str]:
        """Return the statements that turn a generated column of the target into a plain column."""
        present = self._columns.get(name)
        if present is not None and present.is_generated:
            self._columns[name] = replace(present, is_generated=False, has_default=False)
            return [f"{self._alter} alter column {quote_identifier(name)} drop expression"]
        result.fill(
            name, f'column "{name}" is no longer generated, and the target did not compute it'
        )
        if present is not None:
            return []
        if column.not_null and not (self._is_shared or self._is_history):
            result.unfinished.append(column)
        return self._add_column(name, replace(column, not_null=False))

    def _set_default(
        self, name: str, old: DefinedColumn, column: DefinedColumn, result: Translation
    ) -> list[str]:
        if self._is_history or column.generated:
            return []
        alter = f"{self._alter} alter column {quote_identifier(name)}"
        if self._is_shared:
            followed: list[str] = []
            if not self._peers_use_sequence(name, old):
                self._follow_sequence(alter, name, old, column, followed)
            return followed
        statements = self._set_identity(alter, name, old, column, result)
        sequence = self._follow_sequence(alter, name, old, column, statements)
        if (old.default_mark, old.generated) == (column.default_mark, column.generated):
            return statements
        is_all = self._mapping.rule.create is Create.ALL
        draws = name in self._generated.drawing
        if column.draws and draws and (sequence is not None or not is_all):
            return statements  # the operator owns the default: not part of `create`
        if column.draws and sequence is not None:
            return [*statements, f"{alter} {draws_from(sequence.quoted)}"]
        default = column.own_default
        if default is not None:
            statements.append(f"{alter} set default {default}")
        elif self._columns[name].has_default and name not in self._generated.identities:
            statements.append(f"{alter} drop default")
        if column.draws and is_all:
            result.unfinished.append(column)
        return statements

    def _peers_use_sequence(self, name: str, old: DefinedColumn) -> bool:
        """Whether a peer still uses the sequence of *old*, a column before its change."""
        peers = self._columns_of(self._peers, name)
        return any(_are_equal(peer.sequence, old.sequence) for peer in peers)

    def _follow_sequence(
        self,
        alter: str,
        name: str,
        old: DefinedColumn,
        column: DefinedColumn,
        statements: list[str],
    ) -> DefinedSequence | None:
        """Return the target's sequence for a column; add the statements that adapt the sequence."""
        if self._mapping.rule.create is not Create.ALL:
            return None
        table, facts = self._target.name, self._generated
        is_in_use = old.sequence is not None and old.sequence.oid in self._sequences_in_use
        lost = None if is_in_use else lost_sequence(table, name, old, column, facts)
        if lost is not None:
            drop = [f"{alter} drop default"] if name in facts.drawing else []
            statements[:0] = [*drop, f"drop sequence {lost.quoted}"]
            self._columns[name] = replace(self._columns[name], has_default=False)
            return None
        statements += follow_sequence(table, name, old, column, facts)
        present = find_sequence(table, name, column.sequence, facts)
        if present is not None and not column.identity:
            self._generated = with_sequence(name, present, column, facts)
        return present

    def _set_identity(
        self,
        alter: str,
        name: str,
        old: DefinedColumn,
        column: DefinedColumn,
        result: Translation,
    ) -> list[str]:
        """Return the statements for a changed identity of a column; a new identity waits."""
        if old.identity == column.identity or self._mapping.rule.create is not Create.ALL:
            return []
        present = self._generated.identities.get(name)
        if column.identity and not old.identity and present is None:
            result.unfinished.append(column)
        if present is None:
            return []  # a pending plan follows the change
        if not column.identity:
            return [f"{alter} drop identity"]
        desired = identity_of(column.identity, is_key=name in self._target.primary_key)
        return [] if desired == present else [f"{alter} set generated {IDENTITIES[desired]}"]


def _are_equal(sequence: DefinedSequence | None, peer: DefinedSequence | None) -> bool:
    """Whether sequences of two sources are equal except for the OIDs."""
    return sequence is not None and peer is not None and replace(sequence, oid=peer.oid) == peer


def _has_new_collation(change: ColumnChange) -> bool:
    old, after = change.before, change.after
    return old is not None and after is not None and old.collation != after.collation
