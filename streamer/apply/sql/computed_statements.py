"""Statements for plans with expressions: `filter` and `set`, which the statements evaluate for
staged rows.

The staging table then has more columns. ``i_<n>`` are the source's columns that expressions use,
with the source's types. ``p_<n>`` are old values of these columns, for rows without a key.
Expressions see only these columns, by the source's names (`over_row`), as in the SELECT of a copy.
The server evaluates an expression only for rows with its inputs, because the expression may fail
without them.

An update whose row passes the filter changes or inserts the row at the target. Any other update
removes the row, or with `on_delete: mark` marks the row. A staged update carries the commit time in
the column for the mark, and a row that passes gets NULL in this column. A marked row counts as
missing.

The statements read unsent unchanged values from the target if the target stores the source's
values. Otherwise the table stops. ``mask`` contains a letter for each column without an expression,
then for each input. ``u`` means unchanged and unknown, ``f`` unchanged and filled in from the
target. Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from streamer.apply.rows.apply_plan import ApplyPlan, Identity, PlanColumn, PlanInput
from streamer.apply.sql.ordered_statements import FOUND, Statements
from streamer.apply.sql.set_statements import OP_CLEAR, OP_DELETE, RowPlace
from streamer.mapping.expressions import Conjunct, Expression, over_row
from streamer.mapping.rule_options import MetadataKind, TableType
from streamer.postgres.quoting import quote_identifier, quote_qualified


def statements_for(plan: ApplyPlan) -> Statements:
    """Return the statements of *plan*."""
    return ComputedStatements(plan) if plan.has_expressions else Statements(plan)


def input_name(number: int) -> str:
    """Return the staging column of the input with this number in the plan."""
    return f"i_{number}"


@dataclass(frozen=True)
class ComputedStatements(Statements):
    """The statements for a plan with expressions."""

    @property
    def _staged_old(self) -> list[tuple[str, str]]:
        inputs = [(f"p_{n}", i.type) for n, i in enumerate(self.plan.old_inputs)]
        return super()._staged_old + inputs

    @property
    def _staged_new(self) -> list[tuple[str, str]]:
        inputs = [(input_name(n), i.type) for n, i in enumerate(self.plan.inputs)]
        return super()._staged_new + inputs

    def _input(self, n: int, *, of_old: bool = False) -> str:
        return f"s.{self.name(f'p_{n}' if of_old else input_name(n))}"

    def _numbered(self, used: Expression | Conjunct) -> list[tuple[int, PlanInput]]:
        """Return the inputs that *used* names, each after the number in `ApplyPlan.inputs`."""
        return [(n, i) for n, i in enumerate(self.plan.inputs) if i.name in used.names]

    def _evaluate(
        self, used: Expression | Conjunct, *, of_old: bool = False, cast: str = ""
    ) -> str:
        columns = [(i.name, self._input(n, of_old=of_old)) for n, i in self._numbered(used)]
        return over_row(used.text, columns, cast=cast)

    def value(self, column: PlanColumn) -> str:
        if self.plan.marks_in_filter and column.name == self.plan.mapping.rule.deleted_at:
            return "null::timestamptz"  # the staged time is for rows outside the filter
        if column.expression is None:
            return super().value(column)
        return self._evaluate(column.expression, cast=column.cast)

    def old_value(self, column: PlanColumn) -> str:
        if column.expression is None:
            return super().old_value(column)
        # The original text, with the type's modifier.
        cast = f"{column.cast}::{column.target.base_type}"
        return self._evaluate(column.expression, of_old=True, cast=cast)

    @cached_property
    def _passes(self) -> str | None:
        return None if self.plan.filter is None else self._evaluate(self.plan.filter)

    # ---- sets ----------------------------------------------------------------------------------

    def _if_passes(self, op: int) -> str:
        if self._passes is None:
            return ""
        return f" and case when s.op = {op} then {self._passes} else false end"

    def _out(self, op: int) -> RowPlace:
        """Find the target's rows with the key of a row staged as *op* that does not pass the
        filter.
        """
        is_out = f" and case when s.op = {op} then {self._passes} is not true else false end"
        return self._staged_as(op, f"{self.matches_new_key}{self._is_unmarked}", is_out)

    def remain(self, op: int) -> str:
        if self._passes is None or op in (OP_DELETE, OP_CLEAR):
            return super().remain(op)
        out = self._out(op)
        return f"select exists (select from {out.source} join {self.rows} t on {out.condition})"

    def remove_unfiltered(self, op: int) -> str | None:
        return None if self._passes is None else self._remove_unfiltered(self._out(op))

    def make_room(self, op: int) -> str | None:
        if not self.plan.marks_in_filter:
            return None
        match = f"{self.matches_new_key} and not (true{self._is_unmarked})"
        return self.delete_rows(self._staged_as(op, match, self._if_passes(op)))

    def _remove_unfiltered(self, at: RowPlace) -> str:
        """Remove or mark rows whose update does not pass the filter."""
        if self.plan.type is TableType.APPEND:
            return "null"
        return self.update_rows(self._mark_left, at) if self.plan.marks else self.remove_rows(at)

    @property
    def _mark_left(self) -> str:
        """The assignments that mark a row whose update does not pass the filter.

        The operation is a delete, as for a row filter of a publication.
        """
        operation = dict(self.plan.mapping.rule.metadata).get(MetadataKind.OPERATION)
        return ", ".join(
            f"{quote_identifier(column.name)} = "
            + ("'delete'" if column.name == operation else f"s.{self.new(column)}")
            for column in self.plan.metadata_columns
        )

    # ---- exact order ---------------------------------------------------------------------------

    _MORE_DECLARED: ClassVar[str] = "streamer_passes boolean;"
    _IS_PARTIAL: ClassVar[str] = "strpos(s.mask, 'u') > 0"

    def _ordered_insert(self) -> str:
        insert = super()._ordered_insert()
        return insert if self._passes is None else f"if {self._passes} then\n{insert}\nend if;"

    def _search(self) -> str:
        """Return the search, which ignores a similar row if the old row did not pass the filter."""
        search = super()._search()
        if self.plan.filter is None or self.plan.identity is not Identity.ROW:
            return search
        passed = self._evaluate(self.plan.filter, of_old=True)
        return (
            f"if {passed} then\n{search}\n"
            "else streamer_relid := null; streamer_ctid := null; end if;"
        )

    def _refuse_partial_old(self) -> str:
        """Return no check of partial old rows if the plan has a filter: the target may lack the row
        because the filter excluded it.
        """
        return "" if self.plan.filter is not None else super()._refuse_partial_old()

    def _ordered_update(self, partial: bool) -> str:
        if self.plan.identity is Identity.NONE:
            return self._missing_identity()
        complain = self._raise_unknown() if partial else ""
        write = (
            f"{self._refuse_partial_old()}{complain}{self._clear_new_key()}"
            f"if streamer_ctid is null then {self._write_missing(partial)} "
            f"else {self._write_found(partial)} end if;"
        )
        search = self._search() + (self._fill_in() if partial else "")
        if self._passes is None:
            return f"{search}\n{write}"
        return (
            f"{search}\n{self._decide(partial)}\n"
            f"if streamer_passes then\n{write}\n"
            f"elsif streamer_ctid is not null then {self._remove_unfiltered(FOUND)}; end if;"
        )

    def _clear_new_key(self) -> str:
        if not self.plan.marks_in_filter:
            return super()._clear_new_key()
        # A marked row with this key counts as missing.
        is_entering = f"streamer_ctid is null or not ({self._same_key()})"
        return f"if {is_entering} then {self._clear()} end if;\n"

    def _letter(self, n: int) -> str:
        """The letter of input number *n* in the mask."""
        return f"substr(s.mask, {len(self.plan.plain_columns) + n + 1}, 1)"

    def _any(self, letters: str, numbers: Iterable[int]) -> str:
        """Whether the mask has one of *letters* for an input; never null."""
        tests = [f"strpos('{letters}', {self._letter(n)}) > 0" for n in numbers]
        return f"(s.mask is not null and ({' or '.join(tests) or 'false'}))"

    def _is_unknown(self, used: Expression | Conjunct) -> str:
        return self._any("u", (n for n, _ in self._numbered(used)))

    def _fill_in(self) -> str:
        """Take unknown inputs from the target's row."""
        filled = [(n, i.stored_in) for n, i in enumerate(self.plan.inputs) if i.stored_in]
        if not filled:
            return ""
        values = ", ".join(
            f"case when {self._any('u', [n])} then t.{quote_identifier(name)} "
            f"else {self._input(n)} end"
            for n, name in filled
        )
        into = ", ".join(self._input(n) for n, _ in filled)
        first = len(self.plan.plain_columns) + 1
        marks = "\n".join(
            f"if {self._any('u', [n])} then "
            f"s.mask := overlay(s.mask placing 'f' from {first + n} for 1); end if;"
            for n, _ in filled
        )
        return (
            "\nif s.mask is not null and streamer_ctid is not null then\n"
            f"select {values} into {into} from {self.rows} t where {FOUND.condition};\n"
            f"{marks}\nend if;"
        )

    def _decide(self, partial: bool) -> str:
        """Determine whether the row passes the filter."""
        assert self.plan.filter is not None
        decide = f"streamer_passes := coalesce({self._passes}, false);"
        if not partial:
            return decide
        # PL/pgSQL ends the condition at the first THEN outside brackets.
        is_out = " or ".join(
            f"(case when {self._is_unknown(conjunct)} then false "
            f"else {self._evaluate(conjunct)} is not true end)"
            for conjunct in self.plan.filter.conjuncts
        )
        return (
            f"if not {self._is_unknown(self.plan.filter)} then {decide}\n"
            f"elsif {is_out} then streamer_passes := false;\n"
            f"else {self._unknown_value('filter')} end if;"
        )

    def _raise_unknown(self) -> str:
        """Refuse to compute from a mixture of sent and unknown values."""
        tests = []
        for column in self.plan.computed_columns:
            assert column.expression is not None
            used = [n for n, _ in self._numbered(column.expression)]
            if len(used) > 1:
                complain = self._unknown_value(f"expression of {column.name}")
                test = f"{self._any('u', used)} and {self._any('.', used)}"
                tests.append(f"if {test} then {complain} end if;\n")
        return "".join(tests)

    def _unknown_value(self, action: str) -> str:
        name = self.plan.mapping.source
        quoted = quote_qualified(name.namespace, name.name)
        return self._missing(
            f"the {action} needs an unchanged value that was not sent; run at the source: alter "
            f"table {quoted} replica identity full, and then resync the table"
        )

    def _values(self, *, partial: bool = False) -> list[str]:
        if not partial:
            return super()._values()
        numbers = {id(column): n for n, column in enumerate(self.plan.plain_columns)}
        values = []
        for column in self.plan.columns:
            stored = f"t.{quote_identifier(column.name)}"
            if column.expression is None:
                unknown = f"substr(s.mask, {numbers[id(column)] + 1}, 1) = 'u'"
            else:
                unknown = self._is_unknown(column.expression)
            values.append(f"case when {unknown} then {stored} else {self.value(column)} end")
        return values
