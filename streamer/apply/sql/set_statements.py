"""SQL text for applying changes: staging and set statements.

Staged rows live in a temporary table per plan. Its columns are ``seq`` (order), ``op`` (below) and
``at`` (commit time, for history). ``mask`` has one character per column, ``u`` if the value is
unchanged and unknown. ``o_<n>`` are the old values that find the row: key columns, or all.
``c_<n>`` are the new values; n counts the plan's columns. Names come from the catalogs and are
always quoted. `streamer.apply.sql.computed_statements` adds columns for expressions. A docstring
such as "Delete rows" says what the returned SQL does. Pure.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from streamer.apply.rows.apply_plan import ApplyPlan, PlanColumn
from streamer.apply.sql.planned_facts import PlannedFacts
from streamer.mapping.rule_options import TableType
from streamer.mapping.sid_and_history_columns import SID
from streamer.postgres.quoting import quote_identifier, quote_literal

OP_DELETE: Final = 1
OP_UPDATE: Final = 2
OP_INSERT: Final = 3
OP_TRUNCATE: Final = 4
OP_TRUNCATE_RESTART: Final = 5
OP_CLEAR: Final = 6
"""Sets only: a key whose row a statement deletes before the insert of a new row."""
OP_PROBED_DELETE: Final = 7
OP_PROBED_UPDATE: Final = 8
"""Sets only: a row whose key a query searches before the change."""
OP_UPDATED: Final = 9
OP_UPDATED_PARTLY: Final = 10
"""Sets only: a row that lacks unchanged values."""
OP_MOVED: Final = 11
"""Sets only: a row whose key changes."""

REFUSED: Final = "streamer_refused"
"""A temporary table: staged changes that the target refused, with errors, and their followers."""
CREATE_REFUSED: Final = (
    f"create temporary table if not exists {REFUSED} "
    "(seq integer, state text, message text, detail text, existing text) on commit drop; "
    f"truncate pg_temp.{REFUSED}"
)
NOTED: Final = "streamer_noted"
"""A temporary table: staged changes in exact order whose row the target lacks."""
CREATE_NOTED: Final = (
    f"create temporary table if not exists {NOTED} (seq integer, kind text, key text[]) "
    f"on commit drop; truncate pg_temp.{NOTED}"
)
CONFLICT_STATE: Final = "STR03"
"""SQLSTATE of a missing row in a block in exact order without `NOTED`."""
MISSED_STATE: Final = "STR04"
"""SQLSTATE of ``streamer.require_rows``: a statement touched too few or too many rows."""
KEY_TEXT_MAX: Final = 200
"""Characters of a key's value in the log of conflicts."""
SEVERAL_ROWS: Final = "several rows of the target table have the key of one change"


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Rows t of the target that meet *condition*. *source*: a further table that the condition may
    use.
    """

    condition: str
    source: str = ""


@dataclass(frozen=True)
class SetStatements:
    """The statements for a plan that stage changes, and write staged changes as sets."""

    plan: ApplyPlan

    @cached_property
    def _index(self) -> dict[int, int]:
        return {column.position: n for n, column in enumerate(self.plan.columns)}

    @cached_property
    def staged(self) -> list[tuple[str, str]]:
        """The staging columns and types of values, old values first."""
        return [*self._staged_old, *self._staged_new]

    @property
    def _staged_old(self) -> list[tuple[str, str]]:
        return [
            (f"o_{self._index[column.position]}", column.target.staged_type)
            for column in self.plan.staged_key
        ]

    @property
    def _staged_new(self) -> list[tuple[str, str]]:
        return [
            (f"c_{self._index[column.position]}", column.target.staged_type)
            for column in self.plan.plain_columns
        ]

    @cached_property
    def new_values(self) -> tuple[list[str], tuple[int, ...]]:
        """The staging columns of a new row's values, and the positions in the row."""
        positions = [column.position for column in self.plan.plain_columns]
        positions += [source.position for source in self.plan.inputs]
        return [name for name, _ in self._staged_new], tuple(positions)

    def name(self, staged: str) -> str:
        """Return the name of a staged value."""
        return staged

    def new(self, column: PlanColumn) -> str:
        """The name of the staging column with the new value of *column*."""
        return self.name(f"c_{self._index[column.position]}")

    def old(self, column: PlanColumn) -> str:
        """The name of the staging column with the old value of a key *column*."""
        return self.name(f"o_{self._index[column.position]}")

    def value(self, column: PlanColumn) -> str:
        """SQL of the value of *column*, from a staged row."""
        return f"s.{self.new(column)}"

    def old_value(self, column: PlanColumn) -> str:
        """SQL of the value of a key *column* before the change."""
        return f"s.{self.old(column)}"

    @property
    def rows(self) -> str:
        """SQL of the target table in statements about existing rows."""
        return self.plan.target.rows

    @property
    def stage(self) -> str:
        return f"streamer_stage_{self.plan.number}"

    @cached_property
    def create_stage(self) -> str:
        columns = ["seq integer", "op smallint", "mask text", "at timestamptz"]
        columns += [f"{name} {kind}" for name, kind in self.staged]
        return f"create temporary table if not exists {self.stage} ({', '.join(columns)})"

    @property
    def delete_stage(self) -> str:
        return f"delete from pg_temp.{self.stage}"

    @property
    def truncate_stage(self) -> str:
        return f"truncate pg_temp.{self.stage}"

    @property
    def drop_stage(self) -> str:
        return f"drop table if exists pg_temp.{self.stage}"

    @cached_property
    def facts(self) -> PlannedFacts:
        return PlannedFacts(self.plan, f"{self.stage}_facts")

    @cached_property
    def insert_columns(self) -> list[str]:
        """Columns that an insert names, the sid first."""
        sid = [SID] if self.plan.sid is not None else []
        return sid + [column.name for column in self.plan.columns]

    def _sid_matches(self, table: str) -> str:
        if self.plan.sid is None:
            return ""
        return f" and {table}.{quote_identifier(SID)} = {quote_literal(self.plan.sid)}"

    def _matches(self, staged: Iterable[tuple[PlanColumn, str]]) -> str:
        comparisons = [
            f"t.{quote_identifier(column.name)} {column.target.equality} {value}"
            for column, value in staged
        ]
        return " and ".join(comparisons) + self._sid_matches("t")

    @cached_property
    def matches_new_key(self) -> str:
        """The condition that a row of the target has the key of a staged row."""
        return self._matches((column, f"s.{self.new(column)}") for column in self.plan.key)

    @cached_property
    def _matches_old_key(self) -> str:
        return self._matches((column, f"s.{self.old(column)}") for column in self.plan.key)

    # ---- effects of a change on rows, in sets and in exact order -------------------------------

    def delete_rows(self, at: RowPlace) -> str:
        using = f" using {at.source}" if at.source else ""
        return f"delete from {self.rows} t{using} where {at.condition}"

    def update_rows(self, assignments: str, at: RowPlace) -> str:
        source = f" from {at.source}" if at.source else ""
        return f"update {self.rows} t set {assignments}{source} where {at.condition}"

    def remove_rows(self, at: RowPlace) -> str:
        """Delete rows, mark rows, or end versions, as a delete of the source requires."""
        if self.plan.type is TableType.HISTORY:
            return self.end_versions("true", at)
        return self.update_rows(self._mark, at) if self.plan.marks else self.delete_rows(at)

    def end_versions(self, deleted: str, at: RowPlace) -> str:
        return self.update_rows(self.plan.history.end_sql("s.at", deleted, "t"), at)

    @property
    def _mark(self) -> str:
        """The assignments that mark a row as deleted."""
        return ", ".join(
            f"{quote_identifier(column.name)} = s.{self.new(column)}"
            for column in self.plan.metadata_columns
        )

    def insert(self, values: Mapping[str, str], source: str | None = None) -> str:
        """Insert a row of *values*, by column; with a *source*, once for each source row."""
        if not values:
            return f"insert into {self.plan.table} default values"
        names, written = ", ".join(map(quote_identifier, values)), ", ".join(values.values())
        rows = f"values ({written})" if source is None else f"select {written} {source}"
        return f"insert into {self.plan.table} ({names}) overriding system value {rows}"

    def row_of(self, values: Sequence[str]) -> dict[str, str]:
        """Return *values* of the plan's columns by column, and the sid."""
        sid = [quote_literal(self.plan.sid)] if self.plan.sid is not None else []
        return dict(zip(self.insert_columns, [*sid, *values], strict=True))

    def replacement(self, values: Sequence[str]) -> dict[str, str]:
        """Return *values* by column, completed with the remaining values of row t."""
        row = self.row_of(values)
        remaining = (c for c in self.plan.target.columns.values() if c.name not in row)
        return row | {c.name: f"t.{quote_identifier(c.name)}" for c in remaining if not c.generated}

    # ---- sets ----------------------------------------------------------------------------------

    def _staged_as(self, op: int, match: str, more: str = "") -> RowPlace:
        """Return the place of the target's rows that *match* a row staged as *op*."""
        return RowPlace(f"s.op = {op}{more} and {match}", f"pg_temp.{self.stage} s")

    @cached_property
    def delete(self) -> str:
        """Remove rows. Deletes that mark rows are updates, unless there is a filter."""
        at = self._staged_as(OP_DELETE, f"{self.matches_new_key}{self._is_unmarked}")
        return self.remove_rows(at) if self.plan.marks_in_filter else self.delete_rows(at)

    @cached_property
    def clear(self) -> str:
        """Delete the rows of keys that a later row reuses."""
        return self.delete_rows(self._staged_as(OP_CLEAR, self.matches_new_key))

    @cached_property
    def update_whole(self) -> str:
        """Update from rows with all values."""
        return self.update(OP_UPDATED)

    def update(
        self,
        op: int,
        unchanged: frozenset[int] = frozenset(),
        masked: frozenset[int] = frozenset(),
    ) -> str:
        """Update from rows staged as *op*, or only lock the target's rows if no value changes.

        All staged rows lack the values at positions *unchanged*. Some lack the values at *masked*,
        according to the mask; the target's row keeps these values.
        """
        assignments = self._assignments(self.plan.key, unchanged, masked)
        at = self._staged_as(op, self.matches_new_key, self._if_passes(op))
        if not assignments:
            source = f"{self.rows} t, {at.source}"
            return f"select from {source} where {at.condition} for no key update of t"
        return self.update_rows(assignments, at)

    def _assignments(
        self, excluded: Sequence[PlanColumn], unchanged: frozenset[int], masked: frozenset[int]
    ) -> str:
        """Assign values to all columns but *excluded*."""
        return ", ".join(
            f"{quote_identifier(column.name)} = {value}"
            for column, value in zip(self.plan.columns, self._present(masked), strict=True)
            if column not in excluded and not self.plan.is_unchanged(column, unchanged)
        )

    def _present(self, masked: frozenset[int]) -> list[str]:
        """SQL of the new values of all columns; some staged rows lack the values at *masked*."""
        by_mask = self._values(partial=bool(masked))
        return [
            value if self.plan.uses(column, masked) else self.value(column)
            for column, value in zip(self.plan.columns, by_mask, strict=True)
        ]

    def _values(self, *, partial: bool = False) -> list[str]:
        """SQL of the new values of all columns; with *partial*, the row t has unsent values."""
        if not partial:
            return [self.value(column) for column in self.plan.columns]
        return [
            f"case when substr(s.mask, {n + 1}, 1) = 'u' "
            f"then t.{quote_identifier(column.name)} else s.{self.new(column)} end"
            for n, column in enumerate(self.plan.plain_columns)
        ]

    def move(self, op: int, masked: frozenset[int]) -> str:
        """Write new keys and values of rows staged as *op*. *masked*: see `update`.

        Columns that only the target has keep their values, and foreign keys see an UPDATE.
        """
        assignments = self._assignments((), frozenset(), masked)
        return self.update_rows(assignments, self._staged_as(op, self._matches_old_key))

    def copy_moved(self, op: int, masked: frozenset[int]) -> str:
        """Write moved rows beside the old rows, to which foreign keys still refer."""
        at = self._staged_as(op, self._matches_old_key)
        source = f"from {self.rows} t, {at.source} where {at.condition} for no key update of t"
        return self.insert(self.replacement(self._present(masked)), source)

    def remove_unfiltered(self, op: int) -> str | None:
        """Delete or mark the rows whose update, staged as *op*, does not pass the filter."""
        return None

    def make_room(self, op: int) -> str | None:
        """Delete marked rows whose keys enter the filter again by rows staged as *op*."""
        return None

    def _if_passes(self, op: int) -> str:
        """The condition that rows staged as *op* pass the filter; empty without a filter."""
        return ""

    def passing(self, op: int) -> str:
        """Count the rows staged as *op* that pass the filter."""
        return f"select count(*) from pg_temp.{self.stage} s where s.op = {op}{self._if_passes(op)}"

    def insert_missing(self, op: int) -> str:
        """Insert rows staged as *op* that the target lacks."""
        return (
            f"{self.insert_staged(op)} and not exists "
            f"(select from {self.rows} t where {self.matches_new_key})"
        )

    def delete_others(self, op: int) -> str:
        """Delete this source's rows, except rows with the key of a row staged as *op*. The SQL runs
        twice, see `truncate`.
        """
        staged = self._staged_as(op, self.matches_new_key)
        is_staged = f"exists (select from {staged.source} where {staged.condition})"
        delete = self.delete_rows(RowPlace(f"not {is_staged}{self._sid_matches('t')}"))
        return f"{delete}; {delete}"

    def missing(self, op: int, limit: int) -> str:
        """Return number and key of at most *limit* rows staged as *op* that the target lacks."""
        return (
            f"select s.seq, {self._key_texts(self.new)} as key from pg_temp.{self.stage} s "
            f"where s.op = {op} and not exists "
            f"(select from {self.rows} t where {self.matches_new_key}) "
            f"order by s.seq limit {limit}"
        )

    def _key_texts(self, name: Callable[[PlanColumn], str]) -> str:
        """SQL of the key of a staged row as an array of texts."""
        texts = (f"left(s.{name(c)}::text, {KEY_TEXT_MAX})" for c in self.plan.staged_key)
        return f"array[{', '.join(texts)}]::text[]"

    def counted(self, op: int, statement: str) -> str:
        """Run *statement* on rows staged as *op*; return the number of target rows touched.

        ``several``: the key, as text, of a staged row that touched more than one row. A single
        snapshot gives both facts; a later statement could see more rows.
        """
        key = self._key_text("s", self.old if op == OP_MOVED else self.new)
        staged_row = f"s.ctid as staged, {key} as key"
        if statement.startswith("select from"):
            touch = statement.replace("select from", f"select {staged_row} from", 1)
        else:
            touch = f"{statement} returning {staged_row}"
        return (
            f"with touched as ({touch}), groups as (select count(*) as rows, min(key) as key"
            " from touched group by staged)"
            " select coalesce(sum(rows), 0)::int8 as rows,"
            " min(key) filter (where rows > 1) as several from groups"
        )

    def of_rows(self, count: int, statement: str) -> str:
        """Run *statement*, and fail unless it touches *count* rows of the target."""
        returning = "" if statement.startswith("select from") else " returning 1"
        return (
            f"with touched as ({statement}{returning})"
            f" select streamer.require_rows(count(*), {count}) from touched"
        )

    @property
    def _is_unmarked(self) -> str:
        """The condition that row t has no mark; empty unless rows that leave the filter are marked.
        A marked row counts as missing, because the row lacks changes from outside the filter. So a
        row that enters the filter gets no values of the marked row. No later change alters the
        mark.
        """
        if not self.plan.marks_in_filter:
            return ""
        return f" and t.{quote_identifier(self.plan.mapping.rule.deleted_at or '')} is null"

    def remain(self, op: int) -> str:
        """Whether the target has a row that rows staged as *op* should have removed or marked."""
        return (
            f"select exists (select from pg_temp.{self.stage} s join {self.rows} t "
            f"on {self.matches_new_key} where s.op = {op}{self._is_unmarked})"
        )

    def insert_staged(self, op: int) -> str:
        source = f"from pg_temp.{self.stage} s where s.op = {op}{self._if_passes(op)}"
        return self.insert(self.row_of(self._values()), source)

    def _key_text(self, row: str, name: Callable[[PlanColumn], str]) -> str:
        names = ", ".join(quote_identifier(column.name) for column in self.plan.staged_key)
        values = ", ".join(f"{row}.{name(column)}::text" for column in self.plan.staged_key)
        text = f"array_to_string(array[{values}]::text[], ', ', 'null')"
        return f"{quote_literal(f'({names})=(')} || {text} || ')'"

    @cached_property
    def truncate(self) -> str:
        """Empty the target of this source's rows; for history, close the open versions.

        A first DELETE does not see rows that sessions inserted while the DELETE waited.
        """
        if self.plan.truncates_by_delete:
            delete = self.delete_rows(RowPlace(f"true{self._sid_matches('t')}"))
            return f"{delete}; {delete}"
        return f"truncate {self.rows}"

    @cached_property
    def restart(self) -> str:
        """Restart the table's sequences; a rollback restores the values."""
        return "; ".join(f"alter sequence {s} restart" for s in self.plan.restarted_sequences)
