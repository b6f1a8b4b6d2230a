"""SQL that keeps the types of staged values and those of the target's columns equal.

A plan has the types that the target had when the plan was made, and a staging table is made of
them. If an operator alters a column later, staged values would still be rounded to its former type,
without an error. Pure.
"""

from dataclasses import dataclass
from functools import cached_property

from streamer.apply.plan import ApplyPlan
from streamer.mapping.options import TableType
from streamer.postgres.quoting import do_block, quote_identifier, quote_literal
from streamer.target.catalog import TargetColumn
from streamer.target.conventions import HISTORY_COLUMNS, HISTORY_ID


@dataclass(frozen=True)
class StagedTypes:
    """Statements about the columns that *plan* writes. ``name``: of a prepared statement."""

    plan: ApplyPlan
    name: str

    @cached_property
    def _columns(self) -> list[TargetColumn]:
        columns = [column.target for column in self.plan.columns]
        if self.plan.type is TableType.HISTORY:
            columns += [self.plan.target.columns[name] for name in HISTORY_COLUMNS]
            if self.plan.history_sequence is not None:
                columns.append(self.plan.target.columns[HISTORY_ID])
        return columns

    @cached_property
    def prepare(self) -> str:
        """Let the session know the types, and make sure that they are those of the plan."""
        names = ", ".join(quote_identifier(column.name) for column in self._columns)
        query = f"prepare {self.name} as select {names} from {self.plan.target.rows} where false"
        name = quote_literal(self.name)
        return do_block(f"""
begin
    if not exists (select from pg_catalog.pg_prepared_statements where name = {name}) then
        execute {quote_literal(query)};
    end if;
    execute {quote_literal(self.keep)};
    perform {self._require};
end""")

    @property
    def keep(self) -> str:
        """Keep the types until the transaction ends, or fail if they are others by now.

        EXECUTE locks the table, and the server refuses a result of other types, modifiers or
        collations. That costs a tenth of a query of the catalogs.
        """
        return f"execute {self.name}"

    @property
    def forget(self) -> str:
        return f"deallocate {self.name}"

    @cached_property
    def require(self) -> str:
        """Make sure that values arrived with the type that they were sent as.

        The target rejects a text that does not fit, but four bytes are an integer and a float
        alike. Tables that COPY has locked cannot change any more before the transaction ends.
        """
        return f"select {self._require}"

    @property
    def _require(self) -> str:
        names = ", ".join(quote_literal(column.name) for column in self._columns)
        facts = ", ".join(quote_literal(column.type_facts) for column in self._columns)
        return (
            f"streamer.require_types({quote_literal(self.plan.table)}, "
            f"array[{names}]::text[], array[{facts}]::text[])"
        )
